"""One step of a serving engine, in seconds: prompt tokens, and a token of each running sequence.

    matrix product   [T, k] x [k, n]:  max of 2 T n k / (rate x share) with half a wave of tiles
                     more, and of the weights' and activations' bytes over the bandwidth
    experts          of E, E (1 - (1 - top_k / E)^T) are read by T tokens
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

from hocket.cost.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    group,
    point_to_point,
)
from hocket.cost.constants import Platform
from hocket.cost.local import divided, together
from hocket.cost.serving_constants import ServingConstants
from hocket.cost.serving_shape import latent_width
from hocket.cost.terms import Floats
from hocket.spec.model_shape import Attention, BlockShape, MatrixProduct, ModelShape

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

POPULARITY = 0.5
"""Variance of how often the experts of one layer are chosen, relative to the mean's square."""

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
        tp, pp, ep: tensor, pipeline and expert ranks. attention_dp: ranks among which sequences are
            divided in attention while all hold the experts together (tp x attention_dp GPUs).
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
    attention_dp: Floats
    weight: Floats
    expert_weight: Floats
    cache: Floats
    flops: Floats
    few_bits: Floats
    platform: Platform
    constants: ServingConstants
    cp: Floats = dataclasses.field(default_factory=lambda: np.ones(1))
    imbalance: Floats | float = 1.0


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """What one step does: prompt tokens with their mean attended context, decoding sequences with
    theirs, and the whole prompts (not tokens) among them that end here."""

    prefill_tokens: Floats
    prefill_context: Floats
    decode_batch: Floats
    decode_context: Floats


@dataclasses.dataclass(frozen=True)
class StepParts:
    """Seconds of the whole traversal and of the slowest stage."""

    step: Floats
    stage: Floats


def cached_elements(core: Attention, block: BlockShape) -> tuple[float, bool]:
    """Elements that a token leaves in the cache of one attention core, and whether heads divide
    them (a latent vector is whole on every rank)."""
    latent = latent_width(core, block)
    if latent:
        return float(latent), False
    return float(core.kv_heads * (core.head_dim + core.value_dim)), True


def weight_bytes(shape: ModelShape, at: ReplicaColumns) -> Floats:
    """Bytes of weights on the peak GPU."""
    share = _stage_layers(shape, at) / len(shape.layers)
    of_kind = {kind: _held(shape.blocks[kind], at) for kind in dict.fromkeys(shape.layers)}
    total = sum(of_kind[kind] for kind in shape.layers) * share
    embedding, head = _held(shape.blocks["embedding"], at), _held(shape.blocks["head"], at)
    both = embedding if shape.tied else embedding + head
    found: Floats = total + np.where(at.pp > 1, np.maximum(embedding, head), both)
    return found


def cache_bytes(shape: ModelShape, at: ReplicaColumns, length: Floats | float = np.inf) -> Floats:
    """Bytes that one token leaves in the cache of the peak GPU, on average over a request of
    `length` tokens, of which layers with a window hold no more than it (vLLM's hybrid cache
    manager, TensorRT-LLM's cyclic cache); infinite: as if no layer had one."""
    of_kind: dict[str, list[Floats]] = {}
    for kind in dict.fromkeys(shape.layers):
        of_kind[kind] = []
        for core in shape.blocks[kind].attention:
            elements, divided = cached_elements(core, shape.blocks[kind])
            ranks = np.minimum(at.tp, core.kv_heads) if divided else 1.0
            kept = 1.0 if core.window is None else _kept(core.window, length)
            of_kind[kind].append(elements * at.cache / ranks * kept)
    total = np.zeros(np.broadcast(at.tp, at.cache, length).shape)
    for kind in shape.layers:
        for cached in of_kind[kind]:
            total = total + cached
    found: Floats = total * _stage_layers(shape, at) / len(shape.layers) / at.attention_dp / at.cp
    return found


def _kept(window: int, length: Floats | float) -> Floats:
    """Share of a request's tokens that a layer with a window holds; an infinite one: all."""
    found: Floats = np.where(np.isinf(length), 1.0, np.minimum(window / length, 1.0))
    return found


def sampler_seconds(shape: ModelShape, at: ReplicaColumns) -> Floats:
    """Seconds in which PyTorch draws the token of one sequence with penalties and top-p."""
    moved = SAMPLED_BYTES / (_bandwidth(at) * TRAFFIC_RATE)
    found: Floats = shape.vocab * (SORT + moved)
    return found


def _stage_layers(shape: ModelShape, at: ReplicaColumns) -> Floats:
    """Layers of the largest stage."""
    found: Floats = np.ceil(len(shape.layers) / at.pp)
    return found


def step_parts(shape: ModelShape, at: ReplicaColumns, load: StepLoad) -> StepParts:
    """Seconds of one step, see the head of the file."""
    constants = at.constants
    # From here on of one rank: its part of the prompts, and every row that decodes.
    load = dataclasses.replace(load, prefill_tokens=load.prefill_tokens / at.cp)
    tokens = load.prefill_tokens + load.decode_batch
    layers = np.zeros(np.broadcast(tokens, at.tp).shape)
    for kind in dict.fromkeys(shape.layers):
        layers = layers + shape.layers.count(kind) * _layer(shape, shape.blocks[kind], at, load)
    sampled = np.maximum(load.decode_batch, 1.0)
    head = _products(shape.blocks["head"], at, sampled)
    vocab = ACTIVATION * 4 * shape.vocab / at.tp * sampled / (_bandwidth(at) * TRAFFIC_RATE)
    head = head + vocab
    hop = np.zeros_like(layers)
    if np.any(at.pp > 1):
        sent = ACTIVATION * tokens * shape.hidden / at.tp
        hop = np.where(at.pp > 1, point_to_point(sent, at.tp, at.platform), hop)
    around = constants.step_time + constants.sequence_time * load.decode_batch
    step = layers + head + hop * (at.pp - 1) + around
    share = _stage_layers(shape, at) / len(shape.layers)
    stage = layers * share + np.where(at.pp > 1, hop, head + around)
    stage = np.where(at.pp > 1, np.maximum(stage, layers / at.pp + head + around), stage)
    return StepParts(step=step, stage=stage)


def _layer(shape: ModelShape, block: BlockShape, at: ReplicaColumns, load: StepLoad) -> Floats:
    constants = at.constants
    tokens = load.prefill_tokens + load.decode_batch
    mine = tokens / at.attention_dp
    time = _products(block, at, tokens)
    for core in block.attention:
        time = time + _attention(core, block, at, load) + _over_context(core, block, at, load)
    inside = sum(m.forward for m in block.memory_bound if m.split != "outside")
    outside = sum(m.forward for m in block.memory_bound if m.split == "outside")
    moved = ACTIVATION * mine * (inside / at.tp + outside)
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
    others = len(block.attention) + sum(1 for m in block.memory_bound if m.forward > 0)
    found: Floats = products * (1 + at.few_bits) + others
    return found


def _products(block: BlockShape, at: ReplicaColumns, tokens: Floats) -> Floats:
    time = np.zeros(np.broadcast(tokens, at.tp).shape)
    for same in together(block.products):
        first = same[0]
        if first.groups > 1:
            time = time + _expert_product(first, at, tokens)
            continue
        n, k = divided(first.split, float(sum(p.n for p in same)), float(first.k), at.tp)
        time = time + _product(tokens / at.attention_dp, n, k, at, at.weight)
    return time


def _product(
    rows: Floats, n: Floats | float, k: Floats | float, at: ReplicaColumns, weight: Floats
) -> Floats:
    """Seconds of [rows, k] x [k, n]."""
    constants = at.constants
    rate = np.where(at.few_bits > 0, constants.matrix_rate_8, constants.matrix_rate) * at.flops
    sms = at.platform.machine.sms
    padded = np.ceil(rows / ROUNDED) * ROUNDED
    tiles = np.ceil(rows / TILE) * np.ceil(n / TILE)
    compute = 2 * padded * n * k / rate * (1 + sms / (2 * np.maximum(tiles, sms / 2)))
    moved = weight * n * k / constants.weight_rate
    moved = moved + ACTIVATION * rows * (k + n) / TRAFFIC_RATE
    found: Floats = np.where(rows > 0, np.maximum(compute, moved / _bandwidth(at)), 0.0)
    return found


def touched_share(chosen: Floats | float, tokens: Floats) -> Floats:
    """Share of the experts that `tokens` tokens reach, each of which chooses a share `chosen`.

    Popularity differs between experts by a gamma distribution of variance `POPULARITY` (mean 1),
    so that an expert is reached by none with (1 + v x)^(-1/v) where evenly chosen ones are by
    exp(-x), x = -tokens log(1 - chosen).
    """
    drawn = -tokens * np.log1p(-np.minimum(chosen, 1 - 1e-9))
    found: Floats = 1 - (1 + POPULARITY * drawn) ** (-1 / POPULARITY)
    return np.maximum(found, np.minimum(chosen, tokens))


def _expert_product(p: MatrixProduct, at: ReplicaColumns, tokens: Floats) -> Floats:
    """Seconds of one grouped product: experts of this rank that any token reaches are read."""
    constants = at.constants
    ranks = at.tp * at.attention_dp
    held = np.maximum(p.groups / at.ep, 1.0)
    inside = np.maximum(ranks / at.ep, 1.0)
    touched = held * touched_share(np.minimum(p.count / p.groups, 1.0), tokens)
    touched = np.maximum(touched, np.minimum(tokens * p.count / at.ep, 1.0))
    rows = tokens * p.count / at.ep * _uneven(at)
    rate = np.where(at.few_bits > 0, constants.matrix_rate_8, constants.matrix_rate) * at.flops
    size = p.n * p.k / inside
    compute = 2 * np.maximum(rows, touched * ROUNDED) * size / (rate * constants.expert_rate)
    moved = at.expert_weight * touched * size / (constants.weight_rate * constants.expert_rate)
    moved = moved + ACTIVATION * rows * (p.n + p.k) / inside / TRAFFIC_RATE
    found: Floats = np.where(tokens > 0, np.maximum(compute, moved / _bandwidth(at)), 0.0)
    return found


def _attention(core: Attention, block: BlockShape, at: ReplicaColumns, load: StepLoad) -> Floats:
    constants = at.constants
    machine = at.platform.machine
    window = np.inf if core.window is None else float(core.window)
    heads = np.maximum(core.heads / at.tp, 1.0)
    width = core.head_dim + core.value_dim
    pairs = load.prefill_tokens / at.attention_dp * np.minimum(load.prefill_context, window)
    prompt = 2 * heads * width * pairs / (machine.flops * constants.prefill_rate)
    elements, by_heads = cached_elements(core, block)
    ranks = np.minimum(at.tp, core.kv_heads) if by_heads else 1.0
    seen = load.decode_batch / at.attention_dp / at.cp * np.minimum(load.decode_context, window)
    read = seen * elements * at.cache / ranks / (_bandwidth(at) * constants.cache_rate)
    absorbed = 2 * heads * 2 * elements * seen if not by_heads else 2 * heads * width * seen
    computed = absorbed / (machine.flops * constants.prefill_rate)
    found: Floats = prompt + np.maximum(read, computed)
    return found


def _over_context(core: Attention, block: BlockShape, at: ReplicaColumns, load: StepLoad) -> Floats:
    """Seconds in which context ranks gather queries, keys and values of prompts, and sum what each
    attended to, in fp32."""
    if np.all(at.cp == 1):
        return np.zeros_like(load.prefill_tokens + at.cp)
    heads = np.maximum(core.heads / at.tp, 1.0)
    elements, by_heads = cached_elements(core, block)
    ranks = np.minimum(at.tp, core.kv_heads) if by_heads else 1.0
    tokens, result = load.prefill_tokens * at.cp, 4.0 * heads * core.value_dim
    sent = ACTIVATION * tokens * (heads * core.head_dim + elements / ranks)
    talk = group(ALL_GATHER, sent, at.cp, at.tp, at.platform)
    talk = talk + group(REDUCE_SCATTER, tokens * result, at.cp, at.tp, at.platform)
    talk = talk + group(ALL_REDUCE, load.decode_batch * result, at.cp, at.tp, at.platform)
    found: Floats = np.where(at.cp > 1, talk, 0.0)
    return found


def _sums(shape: ModelShape, block: BlockShape, at: ReplicaColumns, tokens: Floats) -> Floats:
    """Seconds of a layer's partial sums, and of dispatching tokens to experts."""
    constants = at.constants
    rows = [p for p in block.products if p.split == "row"]
    dense = sum(1 for p in rows if p.groups == 1)
    expert = 1 if any(p.groups > 1 for p in rows) else 0
    if dense > 1 and expert:
        dense = 1  # shared experts are summed with the routed ones
    size = ACTIVATION * tokens / at.attention_dp * shape.hidden
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
        spread = at.attention_dp > 1
        talk = talk + np.where(spread, moved, one)
    found: Floats = talk
    return found


def _uneven(at: ReplicaColumns) -> Floats:
    """Tokens of the most loaded expert rank over the mean, at most all of them."""
    found: Floats = np.minimum(at.imbalance, np.maximum(at.ep, 1.0))
    return found


def _held(block: BlockShape, at: ReplicaColumns) -> Floats:
    """Bytes of a block's weights on one rank."""
    total = np.zeros(np.broadcast(at.tp, at.weight).shape)
    ranks = at.tp * at.attention_dp
    for w in block.weights:
        if w.split == "expert":
            total = total + w.elements * at.expert_weight / ranks
        elif block.kind in ("embedding",) or w.split == "outside":
            total = total + w.elements * ACTIVATION / (at.tp if w.split != "outside" else 1.0)
        else:
            for elements, units in w.segments:
                total = total + elements * at.weight / np.minimum(at.tp, units)
    return total


def _bandwidth(at: ReplicaColumns) -> Floats:
    return at.platform.machine.bandwidth
