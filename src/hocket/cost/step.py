"""Step: seconds of one training step of many layouts at once.

    stage     layers of the stage x (forward + backward) + exchange with its neighbours
    pipeline  1F1B, GPipe    sum of all stages + (m - 1) x the slowest
              interleaved    m x slowest + (p - 1)/v x stage            (Narayanan et al. 2021, 2.2)
              ZB-H1          m x slowest + (p - 1)(F + B - 2W)          (Qi et al. 2024, table 2)
              ZB-H2          m x slowest
              ZB-V           m x slowest + (p - 1) F / 2, the way down the V
              sequential     m x all stages
    step      pipeline + gradients and parameters over data ranks that compute does not hide
              + tied embeddings + optimizer + overhead

The closed forms serve to sort a million layouts; the best few are then simulated event by event.
FSDP gathers and reduces layer by layer during compute: T = max(C, K) + overlap x min(C, K).

Legend: m microbatches, p pipeline ranks, v stages of a rank, F B W seconds of forward, backward to
inputs, backward to weights; r rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hocket.cost.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, group, point_to_point
from hocket.cost.compute import BlockTimes, block_times
from hocket.cost.constants import Constants, Platform
from hocket.cost.device import FittedDevice
from hocket.cost.group_strides import stride
from hocket.cost.layout_batch import SCHEDULES, Layouts, RankLayers, equal_layers
from hocket.cost.machine import ClusterNumbers
from hocket.cost.memory import saved_bytes
from hocket.cost.state import (
    MASTER,
    Parameters,
    StateSharing,
    local_parameters,
    local_trained,
    state_groups,
)
from hocket.cost.terms import BlockTerms, Floats, Terms

EXCHANGE_LAUNCHES = 2.0
"""Kernels whose start by the CPU nothing hides when stages exchange: the message's own and, since
the CPU then waits until the message is there (Megatron-LM synchronizes after it, against a race
between the batched sends and receives), the first of the next stage's."""


HOST_UPDATE = 12.0 + 6.0
"""Bytes of host memory that the update of a parameter moves in addition to its moments, which are
read and written: gradient and master read, the master written; the new value rounded."""

HOST_CLIP = 4.0 + 8.0
"""Of finding the norm of its gradient, and of scaling it."""

HOST_RATE = 0.7
"""Share of the data sheet's rate that streams over all memory reach (STREAM on two-socket servers
gives 0.75 to 0.85), less what several processes lose on two sockets. The fused update on one and on
two cores of a measured machine moved its 28 bytes as fast as a copy moves its own."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds, [r].

    Attributes:
        step: the whole step. pipeline: of it, all microbatches with the bubble.
        bubble: seconds that the slowest stage waits within the pipeline.
        tensor: exposed communication inside blocks; data: between data ranks, exposed.
        optimizer: its update.
        forward, inputs, weights: one microbatch on a middle stage.
        exchange: one activation to the next stage.
        ulysses: 1 where context parallelism is by all-to-alls, 0 where by a ring.
        embedding, head: one microbatch, forward and backward.
    """

    step: Floats
    pipeline: Floats
    bubble: Floats
    tensor: Floats
    data: Floats
    optimizer: Floats
    forward: Floats
    inputs: Floats
    weights: Floats
    exchange: Floats
    embedding: Floats
    head: Floats
    ulysses: Floats


def step_times(
    model: Terms,
    layouts: Layouts,
    seq_len: Floats,
    machine: ClusterNumbers,
    constants: Constants,
    *,
    ranks: RankLayers | None = None,
) -> StepTimes:
    """Seconds of a step of every layout.

    Args:
        seq_len: tokens of a sample, [r] or one number.
        ranks: layers of pipeline ranks, where they are not equally many.
    """
    at = layouts
    platform = Platform(machine, constants)
    seq_len = np.broadcast_to(np.asarray(seq_len, dtype=np.float64), at.dp.shape)
    unique, back = _unique(layouts, model, machine)
    small = at.take(unique) if back is not None else at
    span = seq_len[unique] if back is not None else seq_len

    def spread(values: Floats) -> Floats:
        values = np.broadcast_to(values, small.dp.shape)
        return values if back is None else values[back]

    m, p, v = at.microbatches, at.pp, at.virtual
    zero = np.zeros_like(at.dp)
    forward = inputs = weights = exposed = sharded = zero
    ulysses = zero
    trained = Parameters(zero, zero)
    for count, block in model.kinds:
        times = block_times(block, model, small, span, platform)
        per_layer, gather, scatter = _sharded(block, at, platform)
        f, b, w = spread(times.forward), spread(times.inputs), spread(times.weights)
        share = np.broadcast_to(constants.overlap, at.dp.shape)
        f2 = np.where(per_layer, _overlapped(f, gather, share), f)
        again = np.where(at.zero >= 3, gather, 0.0)
        whole = np.where(per_layer, _overlapped(b + w, again + scatter, share), b + w)
        if np.any(at.offload):  # a layer's copies, behind its neighbour's compute
            copied = _copied(block, model, at, seq_len, platform)
            f2, whole = np.maximum(f2, copied), np.maximum(whole, copied)
        forward = forward + count * f2
        inputs = inputs + count * (whole - w)
        weights = weights + count * w
        exposed = exposed + count * spread(times.exposed)
        ulysses = np.maximum(ulysses, spread(times.ulysses))
        sharded = sharded + count * ((f2 - f) + (whole - (b + w)))  # exactly 0 without gathers
        trained = trained + local_trained(block, at).times(count)
    extra = 2.0 * at.lighter  # a pipeline as long as if every stage were full
    per_stage = (model.layers + extra) / (p * model.layers)
    forward, inputs, weights = forward * per_stage, inputs * per_stage, weights * per_stage
    layer = (forward + inputs + weights) * p / (model.layers + extra)

    head = block_times(model.head, model, small, span, platform)
    first = block_times(model.embedding, model, small, span, platform)
    head_time = spread(_sum(head))
    ends = local_trained(model.embedding, at) + local_trained(model.head, at)
    for count, block in model.prediction:  # each has the head once more
        times = block_times(block, model, small, span, platform)
        head_time = head_time + count * spread(_sum(times) + _sum(head))
        ends = ends + local_trained(block, at).times(count)
    embedding_time = spread(_sum(first))
    exposed = exposed + spread(head.exposed + first.exposed)

    size = constants.element_bytes * at.microbatch * seq_len / at.cp * model.hidden
    exchange = _exchange(size, at, platform)
    at_rank = ranks or equal_layers(model, at)
    both = (at.schedule == SCHEDULES.index("zb-v")) & (p > 1)  # ends that lie on one rank
    send = 2 * exchange * v
    stage = at_rank.most * layer + send
    last = at_rank.last * layer + send + np.where(both, 0.0, head_time)
    last = last + np.where(p > 1, 0.0, embedding_time)
    start = at_rank.first * layer + send + embedding_time + np.where(both, head_time, 0.0)
    start = np.where(p > 1, start, last)
    slowest = np.maximum(stage, np.maximum(last, start))
    between = (model.layers - at_rank.first - at_rank.last) * layer + (p - 2) * send
    fill = np.where(p > 1, start + last + between, last)

    pipeline = fill + (m - 1) * slowest
    pipeline = np.where((v > 1) & (p > 1), m * slowest + (p - 1) / v * stage, pipeline)
    late = (p - 1) * np.maximum(forward + inputs - weights, 0.0)
    pipeline = np.where(at.schedule == SCHEDULES.index("zb-h1"), m * slowest + late, pipeline)
    no_bubble = (at.schedule == SCHEDULES.index("zb-h2")) | (at.schedule == SCHEDULES.index("zb-v"))
    pipeline = np.where(no_bubble, m * slowest + np.where(both, (p - 1) / 2 * forward, 0), pipeline)
    pipeline = np.where(at.schedule == SCHEDULES.index("sequential"), m * fill, pipeline)

    tied = np.where((model.tied > 0) & (p == 1), 0.5, 1.0)
    held = trained.times(per_stage) + ends.times(tied * np.where((p > 1) & ~both, 0.5, 1.0))
    data, again = _data_parallel(held, at, platform)
    last_backward = (inputs + weights) / np.maximum(v, 1.0)
    hidden = np.asarray(constants.overlap_gradients) > 0

    def exposed_of(talk: Floats) -> Floats:
        return np.where(hidden, np.maximum(talk - 0.5 * last_backward, 0.1 * talk), talk)

    data = exposed_of(data) + (m - 1) * exposed_of(again)
    ties = _tied(model, at, platform)
    optimizer = _optimizer(held, at, platform)
    step = pipeline + data + ties + optimizer + constants.step_overhead
    return StepTimes(
        step=step,
        pipeline=pipeline,
        bubble=pipeline - m * slowest,
        tensor=exposed / p * m,
        data=data + ties + sharded / p * m,
        optimizer=optimizer,
        forward=forward,
        inputs=inputs,
        weights=weights,
        exchange=exchange,
        embedding=embedding_time,
        head=head_time,
        ulysses=ulysses,
    )


def _unique(
    at: Layouts, model: Terms, machine: ClusterNumbers
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows that differ in what a block's time depends on, and the way back to all rows."""
    if len(at) < 64 or len(model.hidden) > 1 or len(machine.flops) > 1:
        return np.arange(len(at)), None
    key = np.zeros(len(at))
    for name in ("tp", "cp", "ep", "etp", "microbatch", "recompute", "sequence_parallel"):
        column = getattr(at, name)
        values, place = np.unique(column, return_inverse=True)
        key = key * len(values) + place
    key = key * 2 + (at.microbatches > 1)
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back


def _sum(times: BlockTimes) -> Floats:
    return times.forward + times.inputs + times.weights


def _overlapped(compute: Floats, talk: Floats, share: Floats) -> Floats:
    return np.maximum(compute, talk) + share * np.minimum(compute, talk)


def _optimizer(held: Parameters, at: Layouts, platform: Platform) -> Floats:
    """Seconds of the update of parameters whose state this rank has."""
    updated = np.zeros_like(at.dp)
    for count, group_of in _kinds(held, at):
        updated = updated + count / np.where(at.zero > 0, group_of.ranks, 1.0)
    on_device = FittedDevice(platform).optimizer(updated)
    if not np.any(at.offload):
        return on_device
    return np.where(at.offloads_optimizer, _on_host(updated, at, platform), on_device)


def _on_host(updated: Floats, at: Layouts, platform: Platform) -> Floats:
    """Seconds of the update in the host's memory: gradients arrive, the ranks of a node step theirs
    at the rate of the memory that they share, and values go back (Ren et al. 2021, section 4).

    Under `params` the norm is found and gradients are scaled there, and values go back when a layer
    is gathered (`_sharded`)."""
    machine, constants = platform.machine, platform.constants
    ranks = _ranks_of_a_host(at, machine)
    shards = at.offloads_params
    arriving = np.where(shards, constants.gradient_bytes, MASTER)
    leaving = np.where(shards, 0.0, constants.weight_bytes)
    wide = np.asarray(constants.weight_bytes) >= MASTER
    moments = constants.optimizer_bytes - np.where(wide, 0.0, MASTER)
    moved = HOST_UPDATE + 2 * moments + np.where(shards, HOST_CLIP, 0.0)
    update = ranks * updated * moved / (machine.host * HOST_RATE)
    return (arriving + leaving) * updated / machine.pcie + update


def _ranks_of_a_host(at: Layouts, machine: ClusterNumbers) -> Floats:
    found: Floats = np.minimum(machine.per_node, at.dp * at.cp * at.tp * at.pp)
    return found


def _copied(
    block: BlockTerms, model: Terms, at: Layouts, seq_len: Floats, platform: Platform
) -> Floats:
    """Seconds to copy to the host what a layer saves of a microbatch, or back; 0 where it stays.

    The copies run next to compute, all ranks of a node at once: over a link of their own, to a
    memory that they share (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1)."""
    machine = platform.machine
    _, kept, _ = saved_bytes(block, model, at, seq_len, platform.constants)
    rate = np.minimum(machine.pcie, machine.host * HOST_RATE / _ranks_of_a_host(at, machine))
    found: Floats = kept * at.microbatch * seq_len / at.cp / rate
    return np.where(at.offloads_activations, found, 0.0)


def _kinds(held: Parameters, at: Layouts) -> list[tuple[Floats, StateSharing]]:
    """Dense parameters and, where there are any, experts, each with the ranks that share them."""
    dense, expert = state_groups(at)
    found = [(held.dense, dense)]
    return [*found, (held.expert, expert)] if np.any(held.expert > 0) else found


def _talk(
    operation: str, size: Floats, ranks: Floats, stride: Floats, platform: Platform
) -> Floats:
    """Seconds of one collective; none where there is nothing to send."""
    return np.where(size > 0, group(operation, size, ranks, stride, platform), 0.0)


def _sharded(
    block: BlockTerms, at: Layouts, platform: Platform
) -> tuple[np.ndarray, Floats, Floats]:
    """Whether a layer's state is gathered layer by layer; seconds to gather and to reduce it."""
    constants = platform.constants
    each = np.broadcast_to(constants.per_layer_state, at.dp.shape) > 0
    per_layer = ((at.zero >= 2) & each) | (at.zero >= 3)
    gather = scatter = np.zeros_like(at.dp)
    if not np.any(per_layer):
        return per_layer, gather, scatter
    slow = Platform(
        platform.machine, dataclasses.replace(constants, network=constants.sharded_network)
    )
    trained = local_trained(block, at)
    for part, (count, shared) in zip(
        ("dense", "expert"), _kinds(local_parameters(block, at), at), strict=False
    ):
        calls = (constants.sharded_calls - 1) * constants.hop * shared.ranks
        size, ranks = constants.gradient_bytes * getattr(trained, part), shared.ranks
        gathered = _talk(ALL_GATHER, constants.weight_bytes * count, ranks, shared.stride, slow)
        summed = _talk(REDUCE_SCATTER, size, ranks, shared.stride, slow)
        brought = constants.weight_bytes * count / ranks / platform.machine.pcie
        gathered = gathered + np.where(at.offloads_params, brought, 0.0)
        gather, scatter = gather + gathered + calls, scatter + summed + calls
        if np.any(shared.copies > 1):
            apart = shared.stride * ranks
            scatter = scatter + _talk(ALL_REDUCE, size / ranks, shared.copies, apart, slow)
    return per_layer, gather, scatter


def _data_parallel(held: Parameters, at: Layouts, platform: Platform) -> tuple[Floats, Floats]:
    """Seconds to sum gradients once a step, and to gather parameters under ZeRO-1 and 2; and of
    them, what ZeRO-2 repeats with every further microbatch, since it keeps no whole gradient."""
    constants = platform.constants
    each = np.broadcast_to(constants.per_layer_state, at.dp.shape) > 0
    once = often = np.zeros_like(at.dp)
    for count, shared in _kinds(held, at):
        size = constants.gradient_bytes * count
        ranks, stride = shared.ranks, shared.stride
        plain = _talk(ALL_REDUCE, size, shared.holders, stride, platform)
        split = _talk(REDUCE_SCATTER, size, ranks, stride, platform)
        if np.any(np.asarray(constants.whole_gradients) > 0):
            summed = _talk(ALL_REDUCE, size, ranks, stride, platform)
            split = np.where(np.asarray(constants.whole_gradients) > 0, summed, split)
        often = often + np.where((at.zero == 2) & ~each, split, 0.0)
        split = split + _talk(ALL_GATHER, constants.weight_bytes * count, ranks, stride, platform)
        if np.any(shared.copies > 1):
            apart = stride * ranks
            split = split + _talk(ALL_REDUCE, size / ranks, shared.copies, apart, platform)
        once = once + np.where(at.zero >= 1, split, plain)
    return np.where((at.zero >= 3) | ((at.zero >= 2) & each), 0.0, once), often


def _tied(model: Terms, at: Layouts, platform: Platform) -> Floats:
    """Gradients of embeddings that the first and the last stage hold."""
    constants = platform.constants
    size = constants.gradient_bytes * local_trained(model.head, at).total
    apart = stride("embedding", at)
    machine = platform.machine
    crossing = (at.tp * at.cp * at.dp * at.pp) > machine.domain
    away = np.where(crossing, machine.domain, np.minimum(apart, machine.domain - 1))
    time = point_to_point(size, away, platform)
    return np.where((at.pp > 1) & ((model.tied > 0) | (model.predictions > 0)), time, 0.0)


def _exchange(size: Floats, at: Layouts, platform: Platform) -> Floats:
    """Seconds to send one microbatch's activations to the next stage, until its work starts."""
    constants = platform.constants
    whole = (at.sequence_parallel == 0) & (np.asarray(constants.scatter_gather) == 0)
    piece = size / np.where(whole, 1.0, at.tp)
    apart = stride("pp", at)
    machine = platform.machine
    far = np.where(apart * at.pp > machine.domain, apart, np.minimum(apart, machine.domain - 1))
    time = point_to_point(piece, far, platform)
    gathers = (at.sequence_parallel == 0) & (at.tp > 1) & (np.asarray(constants.scatter_gather) > 0)
    if np.any(gathers):
        gathered = group(ALL_GATHER, size, at.tp, np.ones_like(size), platform)
        time = time + np.where(gathers, gathered * constants.contention, 0.0)
    time = time + EXCHANGE_LAUNCHES * constants.kernel_time
    return np.where(at.pp > 1, time, 0.0)
