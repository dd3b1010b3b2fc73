"""Memory of a backward whose gradients stay whole (one replica, several, ZeRO-1), block by block.

    block       activations                    gradients that a step's first backward has made
    head        all                            its weight's
    layer L     all but those of what is over, the later blocks', and of L the one of the product
                and L's own again if it is     that its widest inner tensor goes into; of replicas
                run again                      the buckets that these lie in
    embedding   its input's                    all, and once more that of the embedding itself

Later backwards of a step find the gradients there, and make one beside them at a time.
"""

from __future__ import annotations

from hocket.cost.measured_prices import Job
from hocket.cost.measured_shares import block_bytes, bucket_places, narrowing, rerun
from hocket.cost.measured_stage import GRADIENT_BYTES, local, saved_bytes, trained


def fullest_whole(job: Job, stage: int, working: int, *, first: bool) -> int:
    """The most bytes of one backward of a stage, beside what lives before it begins.

    Args:
        working: what the backward of a layer makes for itself.
        first: of the step: the gradients come into being with it.
    """
    kinds, again, tp = job.blocks(stage), rerun(job, stage), job.layout.tp
    opened = _opened(job, stage, first=first)
    tied = job.shape.tied and kinds[0] == "embedding" and kinds[-1] == "head"
    released = late = most = 0
    for at in reversed(range(len(kinds))):
        kind = kinds[at]
        saved = saved_bytes(job.shape, [kind], job.microbatch, job.element_bytes)
        saved += job.adapter_bytes(kind)
        kept = job.stream_bytes if again[at] else saved
        own = trained(job.shape.blocks[kind].weights)
        one = max((local(w, tp) for w in own), default=0) * GRADIENT_BYTES
        begins, ends = opened[at]
        if kind == "head":
            # The logits' gradient takes their place, and is let go when its products are there.
            copied = one if job.layout.dp > 1 or not first else 0
            most = max(most, job.hidden_bytes + one)
            most = max(most, job.hidden_bytes - saved + copied + ends)
            late = one if tied else 0
        elif kind == "embedding":
            # A tied weight has two gradients, and their sum is another tensor.
            copies = one + unwidened(job, one) + 2 * late
            most = max(most, job.hidden_bytes + copies + begins - released)
        else:
            whole = saved - kept  # what running it again makes anew
            most = max(most, working + whole + late + begins - released)
            most = max(most, 2 * job.hidden_bytes - kept + late + ends - released)
        released += kept
    return most


def fullest_inputs(job: Job, stage: int, working: int, pending: dict[str, int]) -> int:
    """The same of a backward's first half, which keeps `pending` bytes of each kind of block for
    the half that makes the weights' gradients."""
    kinds, again = job.blocks(stage), rerun(job, stage)
    released = most = 0
    for at in reversed(range(len(kinds))):
        kind = kinds[at]
        saved = saved_bytes(job.shape, [kind], job.microbatch, job.element_bytes)
        saved += job.adapter_bytes(kind)
        kept = job.stream_bytes if again[at] else saved
        if kind == "embedding":  # no matmul's weight: its gradient comes with the inputs'
            own = trained(job.shape.blocks[kind].weights)
            one = max((local(w, job.layout.tp) for w in own), default=0) * GRADIENT_BYTES
            most = max(most, job.hidden_bytes + one + unwidened(job, one) - released)
        elif kind != "head":
            most = max(most, working + saved - kept - released)
        # A layer that is run again leaves more for the second half than it held before.
        released += kept - (pending[kind] if again[at] else min(saved, pending[kind]))
    return most


def unwidened(job: Job, gradient: int) -> int:
    """Bytes of a gradient of `gradient` bytes in the type of its weight, in which backward makes it
    and which is there while it is copied to fp32; none of a weight in fp32."""
    same = job.element_bytes == GRADIENT_BYTES
    return 0 if same else gradient * job.element_bytes // GRADIENT_BYTES


def _opened(job: Job, stage: int, *, first: bool) -> list[tuple[int, int]]:
    """Bytes of gradients that are there, beside those before the backward began, when a block's
    inner gradients are widest and when its last one comes."""
    kinds, sizes = job.blocks(stage), block_bytes(job, stage)
    if not first:
        return [(0, 0)] * len(kinds)
    if job.layout.dp > 1:
        filled, places = bucket_places(job, stage)
        return [(sum(filled[: early + 1]), sum(filled[: high + 1])) for _, early, high in places]
    found, made = [], 0
    for kind, size in zip(reversed(kinds), reversed(sizes), strict=True):
        block = job.shape.blocks[kind]
        own = (w for w in trained(block.weights) if w.name.startswith(narrowing(block)))
        wide = sum(local(w, job.layout.tp) for w in own) * GRADIENT_BYTES
        found.append((made + (0 if kind == "embedding" else min(wide, size)), made + size))
        made += size
    return found[::-1]
