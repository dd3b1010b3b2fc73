"""Memory of a backward under ZeRO-2 and -3: what is whole while shares are made, block by block.

    block       activations           values (ZeRO-3)   gradients
    head        all                   it, last layer    its bucket
    layer L     all but the head's    L, L - 1          L's bucket, and those under way
    embedding   its own               layer 0           its bucket, and layer 0's

Beside these lies the share of all gradients that are summed already.
"""

from __future__ import annotations

from hocket.cost.communication import FIRST_BUCKET_BYTES, bucket_bytes
from hocket.cost.measured_prices import Job
from hocket.cost.measured_stage import GRADIENT_BYTES, local, saved_bytes, trained, weights
from hocket.spec.model_shape import Weight

UNDER_WAY = {2: 2, 3: 1}
"""ZeRO stage to the buckets whose reduction may be under way at once (`runtime.data_parallel`)."""


def fullest(job: Job, stage: int, working: int, *, first: bool) -> int:
    """The most bytes of one backward of a stage, beside what lives before it begins.

    Args:
        working: what the backward of a layer makes for itself.
        first: of the step: the share of the gradients comes into being with it.
    """
    kinds, ranks, zero = job.blocks(stage), job.state_ranks, job.layout.zero
    sizes = block_bytes(job, stage)
    buckets = value_bytes(job, stage) if zero == 3 else None
    opened = _opened(job, stage)
    again = len(job.again(stage, "full"))
    done = released = most = 0
    for at in reversed(range(len(kinds))):
        kind = kinds[at]
        saved = saved_bytes(job.shape, [kind], job.microbatch, job.element_bytes)
        layer = kind not in ("embedding", "head")
        if layer and again:
            saved = job.hidden_bytes
        share = done // ranks if first else 0
        if buckets is not None:
            whole = _filling(kinds, sizes, at)
            values = _values(kinds, buckets, at)
        else:
            whole, values = opened[at], 0
        own = trained(job.shape.blocks[kind].weights)
        one = max((local(w, job.layout.tp) for w in own), default=0)
        made = 0 if kind == "head" else working
        most = max(most, made - released + share + whole + values + one * GRADIENT_BYTES)
        released += saved
        done += sizes[at]
    return most


def share_bytes(job: Job, stage: int) -> int:
    """A rank's share of the gradients of a stage."""
    return sum(block_bytes(job, stage)) // job.state_ranks


def left_bytes(job: Job, stage: int) -> int:
    """Whole gradients whose reduction a backward leaves under way until the next one begins."""
    if job.layout.zero == 3:
        return block_bytes(job, stage)[0]
    share = job.share(stage)
    return sum(bucket_bytes(share.gradient_bytes, job.bucket_mb * 1e6)[-UNDER_WAY[2] :])


def gathered_bytes(job: Job, stage: int) -> int:
    """The most bytes of values that a forward holds whole (ZeRO-3): two layers, or what follows
    the last one."""
    if job.layout.zero != 3:
        return 0
    kinds, sizes = job.blocks(stage), value_bytes(job, stage)
    return max(sum(sizes[i : i + 2]) for i in range(max(1, len(kinds) - 1)))


def kept_bytes(job: Job, stage: int) -> int:
    """Bytes of values that stay from a forward to its backward (ZeRO-3): what follows the layers,
    and an embedding that is tied to it."""
    if job.layout.zero != 3:
        return 0
    kinds, sizes = job.blocks(stage), value_bytes(job, stage)
    kept = sizes[-1] if kinds[-1] == "head" else 0
    if kinds[0] == "embedding" and kinds[-1] == "head" and job.shape.tied:
        kept += sizes[0]
    return kept


def block_bytes(job: Job, stage: int) -> list[int]:
    """Bytes of the gradients of each block of a stage; a tied one counts where it comes first."""
    return [
        GRADIENT_BYTES * sum(local(w, job.layout.tp) for w in trained(held))
        for held in _by_block(job, stage)
    ]


def value_bytes(job: Job, stage: int) -> list[int]:
    """Bytes of the values of each block, of what is frozen too; a tied one counts likewise."""
    return [
        job.element_bytes * sum(local(w, job.layout.tp) for w in held)
        for held in _by_block(job, stage)
    ]


def _by_block(job: Job, stage: int) -> list[list[Weight]]:
    kinds = job.blocks(stage)
    held = weights(job.shape, kinds)
    counts = [len(weights(job.shape, kinds[: n + 1])) for n in range(len(kinds))]
    return [held[a:b] for a, b in zip([0, *counts], counts, strict=False)]


def _filling(kinds: list[str], sizes: list[int], at: int) -> int:
    """Whole gradients that are there while block `at` runs backward: its own, and of the one after
    it, whose reduction is under way. What is no layer is reduced when all is over."""
    found = sizes[at] + (sizes[at + 1] if at + 1 < len(sizes) else 0)
    if kinds[at] == "embedding" and at + 2 < len(sizes):
        found += sizes[at + 2]
    return found


def _values(kinds: list[str], sizes: list[int], at: int) -> int:
    """Bytes of the blocks whose values are whole while block `at` runs backward."""
    if kinds[at] == "embedding":
        return sizes[at + 1] if at + 1 < len(sizes) else 0
    before = sizes[at - 1] if at and kinds[at - 1] != "embedding" else 0
    return sizes[at] + before


def _opened(job: Job, stage: int) -> list[int]:
    """ZeRO-2: bytes of the buckets that are there, filling or under way, when a block's last
    gradient comes."""
    kinds, tp = job.blocks(stage), job.layout.tp
    flat = [local(w, tp) * GRADIENT_BYTES for w in trained(weights(job.shape, kinds))]
    counts = [len(trained(weights(job.shape, kinds[: n + 1]))) for n in range(len(kinds))]
    filled: list[int] = []
    place: dict[int, int] = {}
    limit = min(FIRST_BUCKET_BYTES, job.bucket_mb * 1e6)
    for index in reversed(range(len(flat))):
        if filled and filled[-1] + flat[index] <= limit:
            filled[-1] += flat[index]
        else:
            limit = job.bucket_mb * 1e6 if filled else limit
            filled.append(flat[index])
        place[index] = len(filled) - 1
    found = []
    for number in range(len(kinds)):
        inside = range(counts[number - 1] if number else 0, counts[number])
        touched = {place[i] for i in inside} or {len(filled) - 1}
        begin = max(0, min(touched) - UNDER_WAY[2])
        found.append(sum(filled[begin : max(touched) + 1]))
    return found
