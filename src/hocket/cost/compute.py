"""Compute: seconds that one block takes on one microbatch, forward and backward.

    matmul           `cost.device`, on its local sizes (`cost.local`)
    attention        fused: 4 b s^2 q visible / (rate x share), backward 2.5 times; else two
                     products and the passes over b a s^2 scores of softmax and dropout
    memory-bound     bytes / bandwidth
    launch           a step cannot be faster than the CPU starts its kernels:
                     T = (GPU^q + CPU^q)^(1/q) for forward, and for backward with its recompute;
                     q = 8, or 1 where the stack waits for the GPU between layers

Products run on their local sizes: [T, n/t] x [k], [T, n] x [k/t], and for backward
[T, k] over n (input gradient) and [n, k] over T (weight gradient). Experts are so many products of
few rows each: on average a rank's tokens x experts per token, divided by the experts it holds.

Legend: b samples of a microbatch, s sequence, T tokens on this rank, q query width, a heads,
t tensor ranks, r rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hocket.cost.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, group
from hocket.cost.constants import Platform
from hocket.cost.context import context_times, state_times
from hocket.cost.device import (
    ATTENTION_BACKWARD,
    FittedDevice,
    fuses_gradients,
    linear_seconds,
    matmul_seconds,
)
from hocket.cost.group_strides import stride
from hocket.cost.layout_batch import Layouts
from hocket.cost.local import local_matmul, stream_ranks, visible_share
from hocket.cost.state import imbalance_of, local_trained
from hocket.cost.terms import BlockTerms, Floats, Terms

UNFUSED_SOFTMAX_PASSES, UNFUSED_SOFTMAX_KERNELS = 4.0, 6.0
"""More where Megatron's fused softmax refuses: (samples x heads of a rank) % 4 != 0."""

EAGER_ATTENTION_KERNELS = 4.0
KERNEL_FLOOR = 3e-6
"""Seconds of the shortest kernel (measured products of a few rows)."""

MISALIGNED_RATE = 1 / 32
"""Of the dense rate: attention products whose head width is not a multiple of 8 (no "
"tensor cores)."""


@dataclasses.dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block and microbatch on one rank, [r].

    Attributes:
        forward: with its communication.
        inputs: backward to the inputs, with its communication and recompute.
        weights: backward to the weights.
        exposed: of these, tensor-, context- and expert-parallel communication.
        ulysses: 1 where context parallelism is by all-to-alls, 0 where by a ring.
    """

    forward: Floats
    inputs: Floats
    weights: Floats
    exposed: Floats
    ulysses: Floats


def block_times(
    block: BlockTerms,
    model: Terms,
    layouts: Layouts,
    seq_len: Floats,
    platform: Platform,
) -> BlockTimes:
    """Seconds of one block, see the head of the file. `seq_len`: [r] or one number."""
    at = layouts
    machine, constants = platform.machine, platform.constants
    tokens = at.microbatch * seq_len / at.cp
    memory = machine.bandwidth * constants.memory_rate
    forward = inputs = weights = np.zeros_like(tokens)
    grad = np.asarray(constants.gradient_bytes)
    element = np.asarray(constants.element_bytes)
    fused = fuses_gradients(constants)
    device = FittedDevice(platform)
    latent = fed = np.zeros_like(tokens)
    stops = np.asarray(constants.eager_saved) > 0  # hocket, before what nothing else needs
    uneven = imbalance_of(at, constants)
    for p in block.products:
        m, n, k, batch = local_matmul(p, tokens, at, shards=p.shards, imbalance=uneven)
        once, of_input, of_weight = linear_seconds(device, m, n, k, batch, frozen=p.frozen)
        cast = np.asarray(constants.cast_bytes) * batch * m / memory
        once, of_input = once + cast * k, of_input + cast * n
        forward, inputs, weights = forward + once, inputs + of_input, weights + of_weight
        latent = latent + once if p.latent else latent
        fed = fed + np.where(stops & p.stops, 0.0, once) if p.feed_forward else fed
    adding = local_trained(block, at).total * (element + 2 * grad) / memory
    apart = (at.microbatches > 1) & block.layer & ~fused
    weights = weights + np.where(apart, adding, 0.0)

    core_forward, core_backward, core_kernels = _attention(block, at, tokens, seq_len, platform)
    traffic = element * constants.traffic * tokens / memory
    kernels = block.kernels + core_kernels
    moved = traffic * block.forward.on_rank(at)
    forward = forward + core_forward + moved + KERNEL_FLOOR * kernels
    # At most: every memory-bound operation of forward. Norms are outside, activations inside.
    inside = traffic * (block.forward.inside / at.tp + block.forward.whole)
    modules = {
        "mla_up": latent,
        "activation": inside,
        "norm": traffic * block.forward.outside / stream_ranks(at),
    }
    moved = traffic * block.backward.on_rank(at)
    floor = KERNEL_FLOOR * (block.kernels_backward + 2 * core_kernels)
    inputs = inputs + core_backward + moved + floor
    if block.has_experts:
        sorting = (
            constants.expert_passes * model.experts_per_token * model.hidden / stream_ranks(at)
        )
        apart = element * sorting * uneven * tokens / memory + constants.expert_time
        forward, inputs = forward + apart, inputs + apart

    talk, talk_backward, talk_again, talk_fed, ulysses = _communication(
        block, model, at, tokens, platform, core=core_forward, samples=tokens * at.cp / seq_len
    )
    if block.has_feed_forward:
        modules["mlp"] = fed + inside + talk_fed
    summed = float(block.sums[0] + block.expert_sums[0])
    waiting = np.where(at.tp > 1, summed * constants.skew * (at.tp / 8.0) ** 2, 0.0)
    cpu = kernels * constants.kernel_time + waiting
    full, selective = at.recomputes("full"), at.recomputes("core_attn")
    half = np.asarray(constants.selective_halves) > 0
    again = np.where(selective, np.where(half, 0.5 * (forward + talk), core_forward), 0.0)
    by_module = np.zeros_like(again, dtype=bool)
    for kind, seconds in modules.items():
        again = again + np.where(at.recomputes_in(block, kind), seconds, 0.0)
        by_module |= at.recomputes_in(block, kind)
    again = np.where(full, forward + talk_again, again)
    again_cpu = np.where(full, cpu, np.where(selective, np.where(half, 0.5, 0.3) * cpu, 0.0))
    again_cpu = again_cpu + np.where(by_module, 0.3 * cpu, 0.0)
    if not block.layer:
        again, again_cpu = np.zeros_like(tokens), np.zeros_like(tokens)
        cpu = np.zeros_like(tokens)
    norm = constants.launch_norm
    whole = _bound(inputs + weights + talk_backward + again, cpu + again_cpu, norm)
    return BlockTimes(
        forward=_bound(forward + talk, cpu, norm),
        inputs=whole - weights,
        weights=weights,
        exposed=talk
        + talk_backward
        + np.where(full & block.layer, talk_again, 0.0)
        + np.where(at.recomputes("mlp") & block.layer, talk_fed, 0.0),
        ulysses=ulysses,
    )


def _bound(gpu: Floats, cpu: Floats, norm: Floats | float) -> Floats:
    large = np.maximum(np.maximum(gpu, cpu), 1e-30)
    small = np.minimum(gpu, cpu) / large
    found: Floats = large * (1 + small**norm) ** (1 / norm)
    return found


def _attention(
    block: BlockTerms,
    at: Layouts,
    tokens: Floats,
    seq_len: Floats,
    platform: Platform,
) -> tuple[Floats, Floats, Floats]:
    """Forward and backward seconds of the cores, and kernels more than counted."""
    machine, constants = platform.machine, platform.constants
    forward = backward = kernels = np.zeros_like(tokens)
    memory = machine.bandwidth * constants.memory_rate
    queries = seq_len / at.cp
    for core in block.cores:
        divided = core.split != "outside"
        heads = np.maximum(core.heads / at.tp, 1.0) if divided else core.heads
        keys = np.minimum(seq_len, core.window)
        visible = visible_share(seq_len, core.window, core.causal)
        width = core.head_dim + core.value_dim
        pairs = at.microbatch * heads * queries * keys
        fused = 2 * at.microbatch * heads * queries * seq_len * visible * width
        fused = fused / (machine.flops * constants.flash_rate)
        plain = matmul_seconds(queries, keys, core.head_dim, platform, at.microbatch * heads)
        plain = plain + matmul_seconds(
            queries, core.value_dim, keys, platform, at.microbatch * heads
        )
        odd = 2 * pairs * width / (machine.flops * MISALIGNED_RATE)
        plain = np.where(core.head_dim % 8 != 0, odd, plain)
        scores = constants.element_bytes * pairs / memory
        refused = (at.microbatch * heads) % 4 != 0
        more = np.where(refused, UNFUSED_SOFTMAX_PASSES * scores, 0.0)
        flash = np.broadcast_to(constants.flash, tokens.shape) > 0
        passes = scores * constants.softmax
        forward = forward + np.where(flash, fused, plain + core.passes * passes + more)
        backward = backward + np.where(
            flash, ATTENTION_BACKWARD * fused, 2 * plain + core.passes_backward * passes + more
        )
        started = EAGER_ATTENTION_KERNELS + np.where(refused, UNFUSED_SOFTMAX_KERNELS, 0.0)
        kernels = kernels + np.where(flash, 0.0, started)
    return forward, backward, kernels


def _communication(
    block: BlockTerms,
    model: Terms,
    at: Layouts,
    tokens: Floats,
    platform: Platform,
    *,
    core: Floats,
    samples: Floats,
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Seconds of exposed tensor, context and expert communication: forward, backward, and forward
    of a layer, and of a feed-forward layer, that is run again; and 1 where context parallelism is
    by all-to-alls."""
    constants = platform.constants
    size = constants.element_bytes * tokens * model.hidden
    one = np.ones_like(tokens)
    sliced = at.sequence_parallel > 0
    adds = group(ALL_REDUCE, size, at.tp, one, platform)
    gathers = np.zeros_like(adds)
    if np.any(sliced):
        adds = np.where(sliced, group(REDUCE_SCATTER, size, at.tp, one, platform), adds)
        gathers = np.where(sliced, group(ALL_GATHER, size, at.tp, one, platform), 0.0)
    exposed = constants.contention * constants.tensor_exposed
    # Tensor ranks that divide an expert gather all rows it gets, and reduce-scatter them.
    rows = np.where(sliced, model.experts_per_token, 1.0) * (at.expert_tp > 1)
    both = zip(block.sums, block.expert_sums, strict=True)
    leave, enter, kept = (count + rows * of_experts for count, of_experts in both)
    forward = (leave * adds + enter * gathers) * exposed
    backward = (enter * adds + leave * gathers) * exposed
    outputs, gradients = (
        sum(
            group(ALL_GATHER, constants.element_bytes * tokens * width, at.tp, one, platform)
            for width in widths
        )
        * exposed
        for widths in block.gathers
    )
    forward, backward = forward + outputs, backward + gradients
    # hocket stops a layer that is run again before what ends it is summed.
    stops = np.asarray(constants.eager_saved) > 0
    left = np.where(stops, (leave - kept) * adds * exposed, 0.0)
    sums, entered, inner = block.feed_forward_sums
    fed = (np.where(stops, inner, sums) * adds + entered * gathers) * exposed
    ulysses = np.zeros(tokens.shape)
    if np.any(at.cp > 1) and block.cores:
        exchange = context_times(block.cores, at, tokens, core, platform)
        forward, backward = forward + exchange.forward, backward + exchange.backward
        ulysses = exchange.ulysses.astype(np.float64)
    if np.any(at.cp > 1) and np.any(block.handed_inputs > 0):
        line = state_times(block.handed_inputs, block.handed_state, at, samples, platform)
        forward, backward = forward + line, backward + line
    if np.any(at.ep > 1) and block.has_experts:
        over = at.expert_tp < at.tp
        apart = stride("expert", at)
        nodes = np.maximum(at.ep * apart / platform.machine.domain, 1.0)
        places = np.where((nodes > 1) | (np.asarray(constants.merged_copies) < 2), nodes, at.ep)
        chosen = np.maximum(model.experts_per_token, 1.0)
        reached = places * (1 - (1 - 1 / places) ** chosen) / chosen
        once = (np.asarray(constants.merged_copies) > 0) & (places > 1)
        copies = model.experts_per_token * np.where(once, reached, 1.0)
        sent = imbalance_of(at, constants) * size * copies / np.where(over, at.tp, stream_ranks(at))
        moved = 2 * group(ALL_TO_ALL, sent, at.ep, apart, platform)
        moved = moved * constants.expert_exposed
        forward, backward = forward + moved, backward + moved
    return forward, backward, forward - left, fed, ulysses
