"""Serving constants: what was fitted of inference, per kind of GPU and engine, in one data file.

`data/serving.json` holds every number with how it was fitted; `benchmarks/fit/serving.py` writes
it. A GPU has six: the rates that its kernels reach. An engine has at most six fitted: what a layer,
a step, a sequence and a collective take besides. What is assumed of an engine is marked so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from hocket.spec.errors import OptionError, unknown

GPU_FIELDS = (
    "weight_rate",
    "cache_rate",
    "prefill_rate",
    "matrix_rate",
    "matrix_rate_8",
    "traffic_rate",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConstants:
    """Floats, or arrays with one number per row.

    Of the GPU:
        weight_rate: share of the memory bandwidth at which weights are read.
        cache_rate: share of it at which attention reads cached keys and values.
        prefill_rate: share of the dense 16-bit rate that attention over a prompt reaches.
        matrix_rate, matrix_rate_8: share of the dense rate of large products in 16 and in fewer
            bits.
        traffic_rate: share of the memory bandwidth that norms and activations reach.

    Of the engine:
        layer_time: seconds of a layer besides its work: starts and tails of its kernels.
        step_time: seconds of a step: scheduling, sampling, launching.
        sequence_time: seconds of each sequence in a step: its sampling and bookkeeping.
        prefill_time: seconds of a request before its prompt is run.
        reduction_time: seconds added to each tensor-parallel sum.
        reduction_share: time of a tensor-parallel sum relative to the collective library's.

    Assumed of the engine:
        max_batch_tokens: tokens of a step. max_sequences: sequences of a step.
        overhead_bytes: CUDA context, workspaces, graphs.
        usable: share of the memory that the engine fills.
        reserved: share of a request's output for which place is kept when it starts.
        burst: of the prompts of all running requests, the share that one waits for on average.
    """

    weight_rate: Any
    cache_rate: Any
    prefill_rate: Any
    matrix_rate: Any
    matrix_rate_8: Any
    traffic_rate: Any
    layer_time: Any
    step_time: Any
    sequence_time: Any
    prefill_time: Any
    reduction_time: Any
    reduction_share: Any
    max_batch_tokens: Any
    max_sequences: Any
    overhead_bytes: Any
    usable: Any
    reserved: Any
    burst: Any


@functools.cache
def file() -> dict[str, Any]:
    """The data file as it stands."""
    data = resources.files("hocket.cost") / "data" / "serving.json"
    found: dict[str, Any] = json.loads(data.read_text())
    return found


def engines() -> tuple[str, ...]:
    """The engines that have constants."""
    return tuple(file()["engines"])


def default_engine() -> str:
    """The engine that stands for a tuned server with continuous batching."""
    return str(file()["default"])


def serving_constants(gpu: str, engine: str, **changes: Any) -> ServingConstants:
    """Constants of a GPU (by name: `H100-SXM-80`) under an engine.

    A GPU of a family that was not fitted takes the constants of the nearest that was.

    Raises:
        OptionError: an unknown engine.
    """
    data = file()
    if engine not in data["engines"]:
        message, hint = unknown("engine", engine, engines())
        raise OptionError(message, hint=hint)
    family = gpu.partition("-")[0]
    known = data["gpus"]
    entry = known.get(family) or known[data["nearest"].get(family, "H100")]
    values: dict[str, Any] = {name: entry[name] for name in GPU_FIELDS}
    fields = {f.name for f in dataclasses.fields(ServingConstants)}
    chain = []
    name: str | None = engine
    while name is not None:
        chain.append(name)
        name = data["engines"][name].get("based_on")
    for name in reversed(chain):
        values |= {k: v for k, v in data["engines"][name].items() if k in fields}
    return ServingConstants(**(values | changes))
