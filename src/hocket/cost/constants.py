"""Constants: what was fitted, per kind of GPU and software stack, in one data file.

`data/constants.json` holds every number with how it was fitted; `benchmarks/fit/train.py` writes
it. A GPU has six: the shape of its matrix rate, its memory's and its attention kernel's efficiency
and how much slower collectives are during compute. A software stack has at most six of the others;
what is not fitted for a stack is written down as assumed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from hocket.cost.machine import ClusterNumbers
from hocket.spec.errors import OptionError, unknown
from hocket.spec.precision import state_bytes

GPU_FIELDS = (
    "matrix_rate",
    "small_tile",
    "inner_overhead",
    "memory_rate",
    "flash_rate",
    "contention",
)


PRECISION_FIELDS = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "element_bytes")
"""Fields that follow from the precision alone."""

FALLBACK = "H100"
"""Family whose constants stand for accelerators of another architecture (AMD, Gaudi, TPU)."""

FEW_BITS = ("fp8", "fp4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Floats, or arrays with one number per row.

    Of the GPU:
        matrix_rate: share of the dense rate that large products reach in a training step.
        small_tile: rate of a tile half as large, relative.
        inner_overhead: start and end of a tile's inner loop, in elements of k.
        memory_rate: share of the memory bandwidth that memory-bound kernels reach.
        flash_rate: share of the dense rate that the fused attention kernel reaches.
        contention: of a tensor-parallel collective in a step, relative to alone.

    Of the software:
        kernel_time: seconds of CPU to start one kernel.
        traffic: memory traffic of norms, activations and the loss, relative to fused kernels.
        softmax: memory traffic of attention without a fused kernel, relative to counted passes.
        network: share of the network cards' rate that collectives reach.
        skew: seconds that a tensor-parallel collective of eight ranks waits while CPU-bound.
        overlap: share of the shorter of compute and communication that stays exposed, where the
            stack overlaps them.
        step_overhead: seconds of a step outside compute: data, logging.
        hop: seconds of each hop of a ring over the network.
        sharded_network: as `network`, of ZeRO-3's collectives.
        expert_passes: elements that sorting tokens by expert and back moves apart from what a trace
            counts, of each token that an expert sees; forward, and backward again.
        expert_time: seconds that a layer of experts waits for the CPU to learn who gets how many.
        expert_exposed: share of dispatching tokens to experts that compute does not hide.

        optimizer_copies: bytes a parameter that the update holds in addition to master and moments
            (gradients in 32 bits, temporaries).
        memory_slack: held by the allocator, relative to what is allocated.
        memory_overhead: bytes of the CUDA context, workspaces and communication buffers.

    Assumed of the software:
        flash: a fused attention kernel is used.
        scatter_gather: stages send each tensor rank's 1/tp and gather (Narayanan et al. 2021, 4.1).
        sharded_calls: collectives of one layer's parameters under ZeRO-3.
        per_layer_state: ZeRO-2 and 3 gather and reduce layer by layer during compute (FSDP).
        overlap_gradients: gradients are reduced during the last backward.
        fused_gradients: products of gradients add to the sum themselves, no kernel apart: 1 those
            of 32 bits, 2 all.
        merged_copies: copies of a token, one for each of its experts, that are sent as one: 0 none,
            1 those that cross the network to one node, 2 also those to one rank of a node.
        launch_norm: 8 where the CPU runs ahead of the GPU, 1 where the stack waits for it.
        tensor_exposed: share of tensor-parallel communication that compute does not hide (1: the
            stack does not overlap it).
        whole_gradients: ZeRO-1 sums whole gradients on every rank (DeepSpeed before 0.7).
        expert_outputs: experts' outputs are saved for the gradient of the routing weights; 0 where
            these multiply before the second product (Megatron-Core since 0.12).
        cast_bytes: moved to quantize an element that products in 8 and 4 bits read, in passes of
            its own: read for the largest, read again, and written by rows and by columns; 0 where
            norms and activations write it so (Transformer Engine).
        quantized_inputs: products in 8 and 4 bits save their inputs in 8 (Transformer Engine).
        selective_halves: selective recompute takes every second layer (torchtitan), not the
            attention core alone (Megatron).
        eager_saved: layers are the model's own code, which saves for backward operation by
            operation; else fused kernels.
        logits_in_place: the loss overwrites logits by their gradient, and they are freed before the
            backward of the last layer.

    Of the run:
        expert_imbalance: tokens of the expert rank that gets most, over the mean of them all; 1
            where routing is forced to be even, or a capacity bounds it.

    Of the precision (`spec.precision.state_bytes`):
        weight_bytes, gradient_bytes, optimizer_bytes: of one parameter.
        element_bytes: of an element of an activation, and of the messages that carry it.
    """

    matrix_rate: Any
    small_tile: Any
    inner_overhead: Any
    memory_rate: Any
    flash_rate: Any
    contention: Any
    kernel_time: Any
    traffic: Any
    softmax: Any
    network: Any
    skew: Any
    overlap: Any
    step_overhead: Any
    hop: Any
    sharded_network: Any
    optimizer_copies: Any
    memory_slack: Any
    memory_overhead: Any
    flash: Any
    scatter_gather: Any
    sharded_calls: Any
    per_layer_state: Any
    overlap_gradients: Any
    selective_halves: Any
    tensor_exposed: Any
    launch_norm: Any
    whole_gradients: Any
    fused_gradients: Any
    expert_passes: Any
    expert_time: Any
    expert_exposed: Any
    merged_copies: Any
    expert_outputs: Any
    quantized_inputs: Any
    eager_saved: Any
    logits_in_place: Any
    weight_bytes: Any
    gradient_bytes: Any
    optimizer_bytes: Any
    element_bytes: Any
    expert_imbalance: Any = 1.0
    cast_bytes: Any = 0.0


@dataclasses.dataclass(frozen=True)
class Platform:
    """What a step runs on: the machine, and the constants of its GPU and software."""

    machine: ClusterNumbers
    constants: Constants


@functools.cache
def constants_file() -> dict[str, Any]:
    """The data file as it stands."""
    data = resources.files("hocket.cost") / "data" / "constants.json"
    found: dict[str, Any] = json.loads(data.read_text())
    return found


def fitted_family(gpu: str) -> str:
    """The family whose constants a GPU takes: its own where that was fitted, else the nearest by
    architecture (`nearest` of the data file), H100 where no architecture is near."""
    family = gpu.split("-", maxsplit=1)[0]
    data = constants_file()
    return family if family in data["gpus"] else str(data["nearest"].get(family, FALLBACK))


def stacks() -> tuple[str, ...]:
    """The software stacks that have constants."""
    return tuple(constants_file()["stacks"])


def constants(
    gpu: str,
    stack: str,
    *,
    precision: str = "bf16",
    grad_dtype: str | None = None,
    optimizer: str = "adamw",
    **changes: Any,
) -> Constants:
    """Constants of a GPU (by name: `H100-SXM-80`) under a software stack.

    A GPU of a family that was not fitted takes the constants of the nearest that was, those of the
    pair with a stack as well.

    Raises:
        OptionError: an unknown stack, or gradients of an unknown or too narrow type.
    """
    data = constants_file()
    if stack not in data["stacks"]:
        message, hint = unknown("stack", stack, stacks())
        raise OptionError(message, hint=hint)
    family = fitted_family(gpu)
    entry = data["gpus"][family]
    values: dict[str, Any] = {name: entry[name] for name in GPU_FIELDS}
    chain = []
    name: str | None = stack
    while name is not None:
        chain.append(name)
        name = data["stacks"][name].get("based_on")
    fields = {f.name for f in dataclasses.fields(Constants)}
    for name in reversed(chain):
        values |= {k: v for k, v in data["stacks"][name].items() if k in fields}
        for kind in dict.fromkeys((family, gpu.split("-", maxsplit=1)[0])):
            values |= data["pairs"].get(f"{kind} {name}", {})
    width = state_bytes(precision, grad_dtype, optimizer)
    for part in ("weight", "gradient", "optimizer", "element"):
        values[f"{part}_bytes"] = float(getattr(width, part))
    for field in ("quantized_inputs", "cast_bytes"):
        values[field] = values.get(field, 0.0) * (precision in FEW_BITS)
    return Constants(**(values | changes))


def few_bits(values: Constants, flops: Mapping[str, float], precision: str) -> Constants:
    """Constants where products run in 8 or 4 bits: the attention core stays in 16, and products
    reach another share of the higher rate (scaling and transposing are part of them)."""
    share = constants_file()["precisions"][precision]["matrix_rate"]
    return dataclasses.replace(
        values,
        flash_rate=values.flash_rate * flops["bf16"] / flops[precision],
        matrix_rate=values.matrix_rate * share,
    )


def quantiles(*, experts: bool = False) -> tuple[float, float]:
    """Measured over predicted step time at the 10th and 90th percentile of validation; `experts`:
    of mixtures of experts, whose families of models were left out."""
    low, high = constants_file()["residuals"]["step_time_experts" if experts else "step_time"]
    return low, high


def memory_quantiles() -> tuple[float, float]:
    """Measured over predicted peak memory at the 5th and 95th percentile of validation."""
    low, high = constants_file()["residuals"]["memory"]
    return low, high
