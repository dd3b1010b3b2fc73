"""Memory of a backward under ZeRO-2 and -3: what is whole while shares are made, block by block.

    block       activations           values (ZeRO-3)   gradients
    head        all                   it, last layer    its weight's
    after it    all but the logits    it, last layer    its bucket
    layer L     all but the head's    L, L - 1          L's bucket, and those under way
    embedding   its own               layer 0           its bucket, and layer 0's

Beside these lies the share of all gradients that are summed already. A bucket is there with the
first gradient that is copied into it: the logits' own gradient, which is as large as they, has gone
by then.
"""

from __future__ import annotations

from collections.abc import Mapping

from hocket.cost.communication import FIRST_BUCKET_BYTES, bucket_bytes
from hocket.cost.measured_prices import Job
from hocket.cost.measured_stage import GRADIENT_BYTES, local, saved_bytes, trained, weights
from hocket.spec.model_shape import BlockShape, Weight

UNDER_WAY = {2: 2, 3: 1}
"""ZeRO stage to the buckets whose reduction may be under way at once (`runtime.data_parallel`)."""


def fullest_half(job: Job, stage: int, working: int, pending: Mapping[str, int], made: int) -> int:
    """The most bytes of the inputs' half of a backward, beside what lives before it begins: the
    gradients of norms and embeddings open buckets, which wait for the weights' half.

    Args:
        working: what the backward of a layer makes for itself.
        pending: kind of block to the bytes that it keeps for the weights' half.
        made: bytes of the buckets that an earlier half has opened.
    """
    kinds, sizes, again = job.blocks(stage), block_bytes(job, stage), rerun(job, stage)
    values = value_bytes(job, stage) if job.layout.zero == 3 else None
    released = most = 0
    for at in reversed(range(len(kinds))):
        kind = kinds[at]
        saved = saved_bytes(job.shape, [kind], job.microbatch, job.element_bytes)
        one_again = saved - job.stream_bytes if again[at] else 0
        saved -= one_again
        used = 0 if values is None else _values(kinds, values, at)
        whole = max(0, sum(sizes[at:]) - made)
        one = sizes[at] if kind == "embedding" else 0
        work = job.hidden_bytes if one else working + one_again
        most = max(most, work + one - released + used + whole)
        released += saved - min(saved, pending[kind])
    return most


def fullest(job: Job, stage: int, working: int, *, first: bool) -> int:
    """The most bytes of one backward of a stage, beside what lives before it begins.

    Args:
        working: what the backward of a layer makes for itself.
        first: of the step: the share of the gradients comes into being with it.
    """
    kinds, ranks, zero = job.blocks(stage), job.state_ranks, job.layout.zero
    sizes = block_bytes(job, stage)
    values = value_bytes(job, stage) if zero == 3 else None
    opened = _opened(job, stage)
    tied = job.shape.tied and kinds[0] == "embedding" and kinds[-1] == "head"
    again = rerun(job, stage)
    done = released = late = most = 0
    for at in reversed(range(len(kinds))):
        kind = kinds[at]
        saved = saved_bytes(job.shape, [kind], job.microbatch, job.element_bytes)
        one_again = saved - job.stream_bytes if again[at] else 0
        saved -= one_again
        begins, ends = opened[at] if values is None else (_filling(kinds, sizes, at),) * 2
        (filling, going), whole = begins, sum(ends)
        used = 0 if values is None else _values(kinds, values, at) + (values[0] if tied else 0)
        share = done // ranks if first else going // ranks
        own = trained(job.shape.blocks[kind].weights)
        one = max((local(w, job.layout.tp) for w in own), default=0) * GRADIENT_BYTES
        if kind == "head":
            # The products of the logits' gradient, which is let go before a bucket fills.
            most = max(most, job.hidden_bytes + one + used)
            late = one if tied else 0
            filled = max(one + filling + going, late + whole)
            most = max(most, job.hidden_bytes - saved + used + filled)
        elif kind == "embedding":
            # A tied weight has two gradients, and their sum is another tensor; its bucket is there
            # with the first gradient that lies in it.
            before = whole - sizes[at] if zero == 3 and len(own) == 1 else whole
            filled = max(2 * late + one + before, one + whole)
            most = max(most, filled - released + used + share)
        else:
            beside = late - released + used + share
            most = max(most, working + one_again + beside + filling + going)
            most = max(most, 2 * job.hidden_bytes - saved + one + beside + whole)
        released += saved
        done += sizes[at]
    return most


def largest_bytes(job: Job, stage: int) -> int:
    """The largest gradient of a product of a stage."""
    products = {
        (kind, w.name): w
        for kind in job.blocks(stage)
        for w in trained(job.shape.blocks[kind].weights)
        if any(w.name.startswith(f"{p.name}.") for p in job.shape.blocks[kind].products)
    }
    return GRADIENT_BYTES * max((local(w, job.layout.tp) for w in products.values()), default=0)


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


def _filling(kinds: list[str], sizes: list[int], at: int) -> tuple[int, int]:
    """Whole gradients that are there while block `at` runs backward: those that fill, its own, and
    of the one after it, whose reduction is under way. What is no layer is reduced when all is
    over."""
    after = sizes[at + 1] if at + 1 < len(sizes) else 0
    if kinds[at] == "embedding" and at + 2 < len(sizes):
        return sizes[at] + after, sizes[at + 2]
    return sizes[at], after


def _values(kinds: list[str], sizes: list[int], at: int) -> int:
    """Bytes of the blocks whose values are whole while block `at` runs backward."""
    if kinds[at] == "embedding":
        return sizes[at + 1] if at + 1 < len(sizes) else 0
    before = sizes[at - 1] if at and kinds[at - 1] != "embedding" else 0
    return sizes[at] + before


def _opened(job: Job, stage: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """ZeRO-1 and -2: bytes of the buckets that are there when a block's inner gradients are widest
    and when its last one comes: each time those that fill, and those under way."""
    filled, places = bucket_places(job, stage)
    found = []
    for low, early, high in places:
        going = sum(filled[max(0, low - UNDER_WAY[2]) : low])
        found.append(((sum(filled[low : early + 1]), going), (sum(filled[low : high + 1]), going)))
    return found


def bucket_places(job: Job, stage: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Bytes of a stage's buckets, in the order in which they fill, and for each block the first
    that its gradients lie in, the last one when its inner gradients are widest, and the last."""
    kinds, tp = job.blocks(stage), job.layout.tp
    held = [trained(found) for found in _by_block(job, stage)]
    flat = [local(w, tp) * GRADIENT_BYTES for found in held for w in found]
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
    start = 0
    for kind, own in zip(kinds, held, strict=True):
        every = [place[start + at] for at in range(len(own))] or [len(filled) - 1]
        widest = narrowing(job.shape.blocks[kind])
        early = [place[start + at] for at, w in enumerate(own) if w.name.startswith(widest)]
        found.append((min(every), max(early or every), max(every)))
        start += len(own)
    return filled, found


def rerun(job: Job, stage: int) -> list[bool]:
    """Of each block of a stage, whether it is a layer that is run again in backward."""
    found, left = [], len(job.again(stage, "full"))
    for kind in job.blocks(stage):
        layer = kind not in ("embedding", "head")
        found.append(layer and left > 0)
        left -= layer
    return found


def narrowing(block: BlockShape) -> str:
    """How the names of the weights begin that take a block's widest inner tensor, or make the
    logits: theirs are its first gradients."""
    if block.kind == "head":
        return f"{max(block.products, key=lambda p: p.n).name}."
    rows = [p for p in block.products if p.split in ("row", "outside")]
    return f"{max(rows, key=lambda p: p.k * p.count).name}." if rows else ""
