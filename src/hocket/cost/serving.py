"""Serving prices of one replica of a model: bytes held, seconds of a step, tokens that fit.

    serving_prices(shape, cluster, tp=4).decode_seconds(batch=32, context=2048)

What a step costs stands in `serving_step`; the constants in `serving_constants`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from hocket.cost.constants import Platform, constants
from hocket.cost.machine import MeasuredCurve, machine
from hocket.cost.serving_constants import default_engine, serving_constants
from hocket.cost.serving_rank import StepLoad
from hocket.cost.serving_shape import served_shape
from hocket.cost.serving_step import (
    ReplicaColumns,
    StepParts,
    cache_bytes,
    step_parts,
    weight_bytes,
)
from hocket.cost.terms import Floats
from hocket.spec.cluster import Cluster
from hocket.spec.errors import OptionError, unknown
from hocket.spec.model_shape import ModelShape

WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,
    "int4": 0.5625,
    "mxfp4": 0.53125,
}
"""Bytes of a weight: four bits come with a scale of 8 bits for each 16 weights, in mxfp4 for each
32 (OCP Microscaling Formats specification 1.0, section 5)."""

CACHE_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.5625}

COMMUNICATION_BYTES = 0.4e9
"""Buffers of the collective library where there is more than one rank (measured, NCCL)."""

TRAINING_STACK = "megatron-core"
"""Whose constants the network's share and latency are taken from."""


Number = Floats | float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPrices:
    """One replica: tp x pp x cp (x attention_dp) GPUs that hold the model once.

    Attributes:
        weight_bytes: on the peak GPU.
        cache_bytes: of one token on the peak GPU, on average over a request: keys and values of its
            layers, heads divided by tp and repeated where there are fewer.
        overhead_bytes: context, workspaces, graphs, communication buffers, activations of the
            largest step.
        memory: bytes that a process can have.
        gpus: of the replica. stages: of its pipeline.
        max_num_batched_tokens, max_sequences: of one step.
    """

    weight_bytes: float
    cache_bytes: float
    overhead_bytes: float
    memory: float
    gpus: int
    stages: int
    max_num_batched_tokens: int
    max_sequences: int
    shape: ModelShape
    replica: ReplicaColumns

    def step_seconds(self, prefill_tokens: Number, prefill_context: Number, decode_batch: Number,
                     decode_context: Number) -> Floats:  # fmt: skip
        """Seconds of one step through all stages.

        Args:
            prefill_tokens: new prompt tokens in the step, which attend to `prefill_context`
                positions on average.
            decode_batch: sequences that produce one token each, at mean context `decode_context`.

        Arrays are broadcast.
        """
        return self._parts(prefill_tokens, prefill_context, decode_batch, decode_context).step

    def stage_seconds(self, prefill_tokens: Number, prefill_context: Number, decode_batch: Number,
                      decode_context: Number) -> Floats:  # fmt: skip
        """Seconds of the slowest stage: with at least `stages` batches in flight, a step ends
        every so often."""
        return self._parts(prefill_tokens, prefill_context, decode_batch, decode_context).stage

    def prefill_seconds(self, prompt: Number, *, chunk: float | None = None) -> Floats:
        """Seconds until a prompt of so many tokens has run, in chunks of `chunk` tokens (None: the
        engine's)."""
        size = float(self.max_num_batched_tokens if chunk is None else chunk)
        tokens = _floats(prompt)
        chunks = np.maximum(np.ceil(tokens / size), 1.0)
        one = self.step_seconds(tokens / chunks, (tokens + 1) / 2, 0.0, 0.0)
        found: Floats = chunks * one + self.replica.constants.prefill_time
        return found

    def decode_seconds(self, batch: Number, context: Number) -> Floats:
        """Seconds of a step in which `batch` sequences produce one token each."""
        return self.step_seconds(0.0, 0.0, batch, context)

    def capacity(self, usable: float) -> float:
        """Cached tokens that fit next to weights and overhead where the engine may fill this share
        of the memory; at most 0: the model does not fit."""
        return (usable * self.memory - self.weight_bytes - self.overhead_bytes) / self.cache_bytes

    def _parts(self, *load: Number) -> StepParts:
        return step_parts(self.shape, self.replica, StepLoad(*map(_floats, load)))


def serving_prices(
    shape: ModelShape,
    cluster: Cluster,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    attention_dp: int = 1,
    cp: int = 1,
    precision: str = "bf16",
    expert_precision: str | None = None,
    cache_precision: str | None = None,
    engine: str | None = None,
    max_num_batched_tokens: int | None = None,
    curves: Iterable[MeasuredCurve] = (),
    expert_imbalance: float = 1.0,
    request_tokens: float = np.inf,
) -> ServingPrices:
    """Prices of one replica.

    Args:
        cluster: the GPUs.
        tp, pp, ep: tensor, pipeline and expert ranks; the replica has tp x pp x attention_dp GPUs,
            among whose ranks of one stage ep divides the experts, and tp the rest.
        attention_dp: ranks among which attention divides sequences instead of heads.
        cp: ranks among which each sequence and its cache are divided.
        precision: of weights and products; `expert_precision`: of the experts', None: the same.
        cache_precision: of keys and values; None: 8 bits with fp8 and fp4 weights, else 16.
        engine: one of `serving_constants.engines()`; None: the default.
        max_num_batched_tokens: of a step; None: the engine's.
        expert_imbalance: tokens of the expert rank that gets most, over the mean.
        curves: measured collectives of this kind of GPU and link.
        request_tokens: of a request, of which layers with a window cache no more than it.

    Raises:
        OptionError: an unknown precision or engine.
    """
    shape = served_shape(shape)
    engine = default_engine() if engine is None else engine
    expert_precision = precision if expert_precision is None else expert_precision
    if cache_precision is None:
        cache_precision = "fp8" if precision in ("fp8", "fp4") else "bf16"
    for what in (precision, expert_precision):
        if what not in WEIGHT_BYTES:
            message, hint = unknown("precision", what, WEIGHT_BYTES)
            raise OptionError(message, hint=hint)
    if cache_precision not in CACHE_BYTES:
        message, hint = unknown("cache precision", cache_precision, CACHE_BYTES)
        raise OptionError(message, hint=hint)
    node = cluster.node
    name = node.gpu.name
    numbers = machine(cluster, "bf16", curves)
    if node.link.kind == "nvlink-pairs" and node.num_gpus > 2 and tp > 2:
        numbers = dataclasses.replace(numbers, link=np.array([float(node.pcie)]))
    used = products_in(precision, node.gpu.flops)
    flops, few = _floats(node.gpu.flops[used]), used in ("fp8", "fp4")
    found = serving_constants(name, engine)
    replica = ReplicaColumns(
        tp=_floats(tp),
        pp=_floats(pp),
        ep=_floats(ep),
        dp=_floats(attention_dp),
        weight=_floats(WEIGHT_BYTES[precision]),
        expert_weight=_floats(WEIGHT_BYTES[expert_precision]),
        cache=_floats(CACHE_BYTES[cache_precision]),
        flops=flops,
        few_bits=_floats(float(few)),
        platform=Platform(numbers, constants(name, TRAINING_STACK)),
        constants=found,
        cp=_floats(cp),
        imbalance=_floats(expert_imbalance),
    )
    tokens = int(
        found.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    )
    return ServingPrices(
        weight_bytes=float(weight_bytes(shape, replica)[0]),
        cache_bytes=float(cache_bytes(shape, replica, request_tokens)[0]),
        overhead_bytes=found.overhead_bytes
        + activation_bytes(shape, tokens // cp, tp)
        + (COMMUNICATION_BYTES if tp * pp * attention_dp * cp > 1 else 0.0),
        memory=float(numbers.memory[0]),
        gpus=tp * pp * attention_dp * cp,
        stages=pp,
        max_num_batched_tokens=tokens,
        max_sequences=int(found.max_sequences),
        shape=shape,
        replica=replica,
    )


def products_in(precision: str, flops: Iterable[str]) -> str:
    """The precision in which products run: that of the weights where the GPU has it, else the next
    wider one that it has; integers are widened."""
    rates = set(flops)
    order = {"fp4": ("fp4", "fp8"), "fp8": ("fp8",)}.get(precision, ())
    return next((p for p in order if p in rates), "bf16" if "bf16" in rates else "fp16")


def activation_bytes(shape: ModelShape, tokens: int, tp: int) -> float:
    """Bytes alive at once in a step of so many tokens: two hidden states and the widest pair of
    neighbours; logits of 256 sequences in 32 bits."""
    widest = 0.0
    for block in shape.blocks.values():
        for p in block.products:
            if p.split != "vocab":
                split = tp if p.split == "column" else 1
                widest = max(widest, p.count * (p.n / split + p.k))
    return 2.0 * tokens * (2 * shape.hidden + widest) + 4.0 * 256 * shape.vocab


def _floats(value: Number) -> Floats:
    return np.atleast_1d(np.asarray(value, dtype=np.float64))
