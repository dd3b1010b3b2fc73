"""One step of a serving engine, in seconds: prompt tokens, and a token of each running sequence.

    matrix product   [T, k] x [k, n]:  max of 2 T n k / (rate x share) with half a wave of tiles
                     more, and of the weights' and activations' bytes over the bandwidth
    experts          those that any token reaches are read (`serving_rank.touched_share`)
    attention        prompts: 2 heads (d_k + d_v) pairs / (rate x share)
                     decode: cached bytes of all running sequences / (bandwidth x share)
    memory-bound     bytes / (bandwidth x share)
    sums             one all-reduce of T h a half-layer over tp, on the links really crossed
    around it        starts of kernels for each layer, scheduling and sampling for each step

Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, 2.1) caches one latent vector a token,
which no tensor parallelism divides; it is recognised by its products.

Legend: T tokens of the step, r columns (layouts, or rows of a table), broadcast with the load.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hocket.cost.collectives import ALL_REDUCE, ALL_TO_ALL, group, point_to_point
from hocket.cost.constants import Platform
from hocket.cost.local import held_elements, together
from hocket.cost.serving_constants import ServingConstants
from hocket.cost.serving_rank import (
    RankCore,
    RankMatmul,
    StepLoad,
    cached_elements,
    context_collectives,
    fused_elements,
    own_tokens,
    rank_core,
    rank_matmuls,
)
from hocket.cost.terms import Floats
from hocket.spec.model_shape import BlockShape, ModelShape, Weight

ACTIVATION = 2.0
"""Bytes of an activation."""

TRAFFIC_RATE = 0.6
"""Share of the memory bandwidth that norms, activations and rotations reach: short kernels."""

ONE_SHOT, ONE_SHOT_SHARE = 6e-6, 0.6
"""Seconds of a sum in one kernel without its bytes (published: 4 to 7 us), and the share of the
link at which it reads the whole message of every peer."""

NVLINK = 100e9
"""Bytes/s per direction beyond which a link is no PCIe."""

SOCKET_GPUS, SOCKET_SHARE = 4, 0.6
"""GPUs behind one socket of a PCIe host, and what is left of a collective's rate where GPUs of
both take part and nothing was measured. Measured from four to eight GPUs: 0.28 on an L40S host
without peer access, 0.96 behind switches."""

TILE = 128.0
ROUNDED = 16.0
"""Rows of the smallest tensor-core tile."""

SORT = 1.12e-10
"""Seconds a logit to cut a distribution at top-p by sorting all of it, as PyTorch does: 2.3 ms for
128 and 6.2 ms for 512 sequences of 131,072 (measured by vLLM, pull request 40376; their geometric
mean)."""

SAMPLED_BYTES = 131.0
"""Bytes a logit moved around that sort: 34 for counts of prompt and output tokens, 51 for three
penalties, 46 for widening, temperature, softmax and the draw (vLLM, `v1/sample`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaColumns:
    """How one copy of a model is held, in columns [r].

    Attributes:
        tp, pp, ep: tensor, pipeline and expert ranks. dp: data ranks of the replica, among which
            attention divides the sequences; tp x dp ranks hold the experts together.
        weight: bytes of a weight; expert_weight: of an expert's; cache: of a cached element.
        flops: dense rate of products in their precision; few_bits: 1 where below 16 bits.
        platform: the machine, and the training constants that collectives need.
        constants: of GPU and engine.
        cp: context ranks: each computes its part of a prompt and has its part of the cache.
        imbalance: tokens of the expert rank that gets most, over the mean.
    """

    tp: Floats
    pp: Floats
    ep: Floats
    dp: Floats
    weight: Floats
    expert_weight: Floats
    cache: Floats
    flops: Floats
    few_bits: Floats
    platform: Platform
    constants: ServingConstants
    cp: Floats = dataclasses.field(default_factory=lambda: np.ones(1))
    imbalance: Floats | float = 1.0

    @property
    def expert_tp(self) -> Floats:
        """Ranks that divide one expert."""
        found: Floats = np.maximum(self.tp * self.dp / self.ep, 1.0)
        return found


@dataclasses.dataclass(frozen=True)
class StepParts:
    """Seconds of the whole traversal and of the slowest stage."""

    step: Floats
    stage: Floats


def weight_bytes(shape: ModelShape, at: ReplicaColumns) -> Floats:
    """Bytes of weights on the peak GPU."""
    of_kind = {
        kind: sum((_weight_bytes(w, block, at) for w in block.weights), np.zeros(at.tp.shape))
        for kind, block in shape.blocks.items()
    }
    embedding, head = of_kind["embedding"], of_kind["head"]
    both = embedding if shape.tied else embedding + head
    ends = np.where(at.pp > 1, np.maximum(embedding, head), both)
    return _largest_stage(shape, of_kind, at) + ends


def _weight_bytes(weight: Weight, block: BlockShape, at: ReplicaColumns) -> Floats:
    """Bytes of a weight on one rank; what is not divided, and the embedding, stay in 16 bits."""
    few = at.expert_weight if weight.split == "expert" else at.weight
    whole = block.kind == "embedding" or weight.split == "outside"
    found: Floats = held_elements(weight, at) * (ACTIVATION if whole else few)
    return found


def cache_bytes(shape: ModelShape, at: ReplicaColumns, length: Floats | float = np.inf) -> Floats:
    """Bytes that one token leaves in the cache of the peak GPU, on average over the data ranks and
    over a request of `length` tokens, see `serving_rank.cached_elements`."""
    of_kind = {
        kind: cached_elements(block, at, length) * at.cache / at.dp
        for kind, block in shape.blocks.items()
    }
    return _largest_stage(shape, of_kind, at)


def _largest_stage(shape: ModelShape, of_kind: dict[str, Floats], at: ReplicaColumns) -> Floats:
    """The sum over the layers of the largest stage of what each kind has."""
    total = sum(shape.layers.count(kind) * of_kind[kind] for kind in dict.fromkeys(shape.layers))
    return total * _stage_share(shape, at)


def sampler_seconds(shape: ModelShape, at: ReplicaColumns) -> Floats:
    """Seconds in which PyTorch draws the token of one sequence with penalties and top-p."""
    moved = SAMPLED_BYTES / (_bandwidth(at) * TRAFFIC_RATE)
    found: Floats = shape.vocab * (SORT + moved)
    return found


def _stage_share(shape: ModelShape, at: ReplicaColumns) -> Floats:
    """Of all layers, those of the largest stage."""
    found: Floats = np.ceil(len(shape.layers) / at.pp) / len(shape.layers)
    return found


def step_parts(shape: ModelShape, at: ReplicaColumns, load: StepLoad) -> StepParts:
    """Seconds of one step, see the head of the file."""
    constants = at.constants
    around = constants.step_time + constants.sequence_time * load.decode_batch
    load = load.of_data_rank(at.dp)
    tokens = own_tokens(load, at.cp, gpu=True)
    layers = np.zeros(np.broadcast(tokens, at.tp).shape)
    for kind in dict.fromkeys(shape.layers):
        layers = layers + shape.layers.count(kind) * _layer(shape, shape.blocks[kind], at, load)
    sampled = np.maximum(load.decode_batch, 1.0)
    head = _matmuls(shape.blocks["head"], at, sampled)
    vocab = ACTIVATION * 4 * shape.vocab / at.tp * sampled / (_bandwidth(at) * TRAFFIC_RATE)
    head = head + vocab
    hop = np.zeros_like(layers)
    if np.any(at.pp > 1):
        sent = ACTIVATION * tokens * shape.hidden / at.tp
        hop = np.where(at.pp > 1, point_to_point(sent, at.tp, at.platform), hop)
    step = layers + head + hop * (at.pp - 1) + around
    stage = layers * _stage_share(shape, at) + np.where(at.pp > 1, hop, head + around)
    stage = np.where(at.pp > 1, np.maximum(stage, layers / at.pp + head + around), stage)
    return StepParts(step=step, stage=stage)


def _layer(shape: ModelShape, block: BlockShape, at: ReplicaColumns, load: StepLoad) -> Floats:
    constants = at.constants
    tokens = own_tokens(load, at.cp, gpu=True)
    time = _matmuls(block, at, tokens)
    for core in block.attention:
        one = rank_core(core, block, at)
        time = time + _attention(one, at, load) / at.cp + _over_context(one, at, load)
    moved = ACTIVATION * sum(fused_elements(block, at, tokens))
    time = time + moved / (_bandwidth(at) * TRAFFIC_RATE)
    if any(p.groups > 1 for p in block.products):
        time = time + constants.expert_time
    found: Floats = (
        time + constants.kernel_time * _kernels(block, at) + _sums(shape, block, at, tokens)
    )
    return found


def _kernels(block: BlockShape, at: ReplicaColumns) -> Floats:
    """Kernels of a layer in a step: fused products, which quantize their input where they run in
    fewer than 16 bits, attention cores, and what is bound by memory."""
    products = len(together(block.products))
    others = len(block.attention) + len(fused_elements(block, at, 1.0))
    found: Floats = products * (1 + at.few_bits) + others
    return found


def _matmuls(block: BlockShape, at: ReplicaColumns, tokens: Floats) -> Floats:
    time = np.zeros(np.broadcast(tokens, at.tp).shape)
    for one in rank_matmuls(block, at, tokens, _uneven(at)):
        time = time + (_expert_matmul(one, at) if one.grouped else _matmul(one, at))
    return time


def _matmul(one: RankMatmul, at: ReplicaColumns) -> Floats:
    """Seconds of a linear layer's."""
    rows, n, k = one.rows, one.n, one.k
    constants = at.constants
    rate = np.where(at.few_bits > 0, constants.matrix_rate_8, constants.matrix_rate) * at.flops
    sms = at.platform.machine.sms
    padded = np.ceil(rows / ROUNDED) * ROUNDED
    tiles = np.ceil(rows / TILE) * np.ceil(n / TILE)
    compute = 2 * padded * n * k / rate * (1 + sms / (2 * np.maximum(tiles, sms / 2)))
    moved = at.weight * n * k / constants.weight_rate
    moved = moved + ACTIVATION * rows * (k + n) / TRAFFIC_RATE
    found: Floats = np.where(rows > 0, np.maximum(compute, moved / _bandwidth(at)), 0.0)
    return found


def _expert_matmul(one: RankMatmul, at: ReplicaColumns) -> Floats:
    """Seconds of a grouped one: experts that any of the replica's tokens reaches are read."""
    constants, touched = at.constants, one.experts
    rate = np.where(at.few_bits > 0, constants.matrix_rate_8, constants.matrix_rate) * at.flops
    size = one.n * one.k
    compute = 2 * np.maximum(one.rows, touched * ROUNDED) * size / (rate * constants.expert_rate)
    moved = at.expert_weight * touched * size / (constants.weight_rate * constants.expert_rate)
    # The constants were fitted with both sides divided over the ranks of an expert; one is whole.
    sides = one.n + one.k / at.expert_tp if one.split == "column" else one.n / at.expert_tp + one.k
    moved = moved + ACTIVATION * one.rows * sides / TRAFFIC_RATE
    found: Floats = np.where(one.rows > 0, np.maximum(compute, moved / _bandwidth(at)), 0.0)
    return found


def _attention(one: RankCore, at: ReplicaColumns, load: StepLoad) -> Floats:
    constants = at.constants
    rate = at.platform.machine.flops * constants.prefill_rate
    width = one.head_dim + one.value_dim
    prompt = 2 * one.heads * width * load.prefill_tokens * one.seen(load.prefill_context) / rate
    seen = load.decode_batch * one.seen(load.decode_context)
    read = seen * one.cached * at.cache / (_bandwidth(at) * constants.cache_rate)
    computed = 2 * one.heads * (2 * one.latent or width) * seen / rate
    found: Floats = prompt + np.maximum(read, computed)
    return found


def _over_context(core: RankCore, at: ReplicaColumns, load: StepLoad) -> Floats:
    total = np.zeros_like(load.tokens + at.cp)
    for name, nbytes in context_collectives(core, at, load, ACTIVATION, gpu=True):
        if np.any(at.cp > 1):
            seconds = group(name, nbytes, at.cp, at.tp, at.platform)
            total = total + np.where((at.cp > 1) & (nbytes > 0), seconds, 0.0)
    return total


def _sums(shape: ModelShape, block: BlockShape, at: ReplicaColumns, tokens: Floats) -> Floats:
    """Seconds of a layer's partial sums, and of dispatching tokens to experts."""
    constants = at.constants
    rows = [p for p in block.products if p.split == "row"]
    dense = sum(1 for p in rows if p.groups == 1)
    expert = 1 if any(p.groups > 1 for p in rows) else 0
    if dense > 1 and expert:
        dense = 1  # shared experts are summed with the routed ones
    size = ACTIVATION * tokens * shape.hidden
    one = group(ALL_REDUCE, size, at.tp, np.ones_like(at.tp), at.platform)
    machine = at.platform.machine
    unknown = np.array([not curves.points for curves in machine.curves])[machine.which.astype(int)]
    unknown = unknown | (at.tp > machine.bridge)  # curves are of the bridged pair
    both = unknown & (machine.link < NVLINK) & (at.tp > SOCKET_GPUS)
    one = np.where(both, one / SOCKET_SHARE, one)
    direct = ONE_SHOT + size * (at.tp - 1) / (ONE_SHOT_SHARE * machine.link)
    possible = (constants.one_shot > 0) & (machine.link > NVLINK) & (at.tp <= machine.domain)
    one = np.where(possible, np.minimum(one, direct), one)
    one = np.where(
        at.tp > 1, one * constants.sum_time + constants.reduction_time * (at.tp - 1) / 7, 0.0
    )
    talk = dense * one
    if expert:
        top = max(p.count for p in rows if p.groups > 1)
        sent = size * top * _uneven(at)
        moved = 2 * group(ALL_TO_ALL, sent, at.ep, np.ones_like(at.tp), at.platform)
        spread = at.dp > 1
        talk = talk + np.where(spread, moved, one)
    found: Floats = talk
    return found


def _uneven(at: ReplicaColumns) -> Floats:
    """Tokens of the most loaded expert rank over the mean, at most all of them."""
    found: Floats = np.minimum(at.imbalance, np.maximum(at.ep, 1.0))
    return found


def _bandwidth(at: ReplicaColumns) -> Floats:
    return at.platform.machine.bandwidth
