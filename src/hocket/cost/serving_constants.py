"""Serving constants: what was fitted of inference, per kind of GPU and engine, in one data file.

`data/serving.json` holds every number with how it was fitted; `benchmarks/fit/serving.py` writes
it. A GPU has six: the rates that its kernels reach. An engine has at most six fitted of seven: what
a kernel, a step, a sequence and a sum take besides, how it runs experts, and what it holds. What is
assumed of an engine is listed too; the file says which is which.
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
    "sum_time",
)

ENGINE_FIELDS = (
    "kernel_time",
    "step_time",
    "sequence_time",
    "reduction_time",
    "expert_time",
    "expert_rate",
    "overhead_bytes",
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
        sum_time: time of a tensor-parallel sum relative to the collective library's alone.

    Of the engine:
        kernel_time: seconds of each kernel of a layer besides its work: its start and its tail.
        step_time: seconds of a step: scheduling, sampling, launching.
        sequence_time: seconds of each sequence in a step: its sampling and bookkeeping.
        reduction_time: seconds that a sum of eight ranks waits for the last of them; in proportion
            to the other ranks.
        expert_time: seconds of a layer with experts besides: routing, sorting tokens by expert, and
            gathering what comes back.
        expert_rate: rates of products with experts, and of reading theirs, relative to dense ones.
        overhead_bytes: CUDA context, workspaces, graphs.

    Assumed of the engine:
        prefill_time: seconds of a request before its prompt is run and after.
        max_num_batched_tokens: tokens of a step. max_sequences: sequences of a step.
        usable: share of the memory that the engine fills.
        reserved: share of a request's output for which place is kept when it starts.
        waves: 1 where waiting prompts go before decoding, so that requests of equal length run in
            waves; 0 where both share a step.
        one_shot: 1 where small sums over NVLink are one kernel that reads all peers.
    """

    weight_rate: Any
    cache_rate: Any
    prefill_rate: Any
    matrix_rate: Any
    matrix_rate_8: Any
    sum_time: Any
    kernel_time: Any
    step_time: Any
    sequence_time: Any
    reduction_time: Any
    expert_time: Any
    expert_rate: Any
    overhead_bytes: Any
    prefill_time: Any
    max_num_batched_tokens: Any
    max_sequences: Any
    usable: Any
    reserved: Any
    waves: Any
    one_shot: Any


@functools.cache
def engine_file() -> dict[str, Any]:
    """The data file as it stands."""
    data = resources.files("hocket.cost") / "data" / "serving.json"
    found: dict[str, Any] = json.loads(data.read_text())
    return found


def engines() -> tuple[str, ...]:
    return tuple(engine_file()["engines"])


def default_engine() -> str:
    """The engine that stands for a tuned server with continuous batching."""
    return str(engine_file()["default"])


def serving_constants(
    gpu: str, engine: str, data: dict[str, Any] | None = None
) -> ServingConstants:
    """Constants of a GPU (by name: `H100-SXM-80`) under an engine.

    A GPU of a kind that was not fitted takes the constants of the nearest that was. `data`: another
    file's content (fitting).

    Raises:
        OptionError: an unknown engine.
    """
    data = engine_file() if data is None else data
    if engine not in data["engines"]:
        message, hint = unknown("engine", engine, engines())
        raise OptionError(message, hint=hint)
    values: dict[str, Any] = dict(data["gpus"][gpu_entry(gpu, data)])
    for name in reversed(engine_chain(engine, data)):
        values |= data["engines"][name]
    names = {f.name for f in dataclasses.fields(ServingConstants)}
    return ServingConstants(**{k: v for k, v in values.items() if k in names})


def gpu_entry(gpu: str, data: dict[str, Any] | None = None) -> str:
    """The entry whose constants a GPU takes: its own, its family's, or the nearest family's."""
    data = engine_file() if data is None else data
    known, parts = data["gpus"], gpu.split("-")
    for name in ("-".join(parts[:2]), parts[0]):
        if name in known:
            return name
    return str(data["nearest"].get(parts[0], "H100"))


def engine_chain(engine: str, data: dict[str, Any] | None = None) -> list[str]:
    """An engine and those that it inherits from, nearest first."""
    data = engine_file() if data is None else data
    found = []
    name: str | None = engine
    while name is not None:
        found.append(name)
        name = data["engines"][name].get("based_on")
    return found
