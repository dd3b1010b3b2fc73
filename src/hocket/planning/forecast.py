"""Forecast: what one layout would give, as plain numbers with their uncertainty.

Ranges are the 10th and the 90th percentile, from the residuals of the validation against published
runs; memory's `high` is the 95th.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hocket.planning.fit import fits_host, fits_memory
from hocket.planning.layouts import LATE, layout_at, not_trained
from hocket.planning.problem import Problem
from hocket.planning.search import Scored
from hocket.spec import renamed
from hocket.spec.capabilities import absent
from hocket.spec.layout import Layout

BILLION = 1e9


@dataclasses.dataclass(frozen=True)
class Range:
    """An expected value between its 10th and 90th percentile."""

    low: float
    median: float
    high: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self, renamed.attribute("Range", name, renamed.RANGE))

    def scaled(self, factor: float) -> Range:
        return Range(self.low * factor, self.median * factor, self.high * factor)

    def inverse(self, numerator: float) -> Range:
        """`numerator` over each: the high end of one is the low end of the other."""
        return Range(numerator / self.high, numerator / self.median, numerator / self.low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutForecast:
    """What one layout would give.

    Attributes:
        layout: with its microbatches. microbatch: sequences in one.
        num_gpus: that it uses.
        step_seconds: of one step.
        tokens_per_second_per_gpu: of the step.
        mfu: model FLOP/s utilisation: the model's own operations (attention unmasked, nothing
            recomputed) over the dense rate.
        memory: bytes expected on the peak GPU; `memory_high` at the 95th percentile.
        memory_by_kind: `memory` by what it holds.
        host_memory: bytes that a node's ranks keep in the host's memory.
        fits_host: whether they fit there.
        fits: whether a process can have what is expected, and the host what it keeps
            (`planning.fit`).
        tight: whether it fits and `memory_high` leaves less than the headroom free.
        bubble: share of the pipeline in which a rank waits, on average.
        exposed: share of the step that is communication that nothing overlaps.
        parts: seconds of the step by what they go to.
        dollars_per_billion_tokens: None where the catalogue has no price.
        simulated: whether the pipeline was simulated event by event, not by a closed form.
        unsupported: why this hocket cannot run it today; empty if it can.
        context: how keys and values travel over cp: `ring` or `ulysses`; empty without cp.
        tools: where `unsupported` holds something, software that can run it, as `--emit` names it.
        num_similar: layouts of the same kind that are not shown: they differ in microbatches,
            virtual stages or shard alone, and are no better.
    """

    layout: Layout
    microbatch: int
    num_gpus: int
    step_seconds: Range
    tokens_per_second_per_gpu: Range
    mfu: Range
    memory: int
    memory_high: int
    memory_by_kind: dict[str, int]
    fits: bool
    bubble: float
    exposed: float
    parts: dict[str, float]
    dollars_per_billion_tokens: Range | None
    simulated: bool
    unsupported: tuple[str, ...]
    context: str = ""
    tight: bool = False
    num_similar: int = 0
    host_memory: int = 0
    fits_host: bool = True
    tools: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self, renamed.attribute("LayoutForecast", name, renamed.FORECAST))

    @property
    def runs_here(self) -> bool:
        """Whether this hocket can run it today."""
        return not self.unsupported

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; the layout as text, keys in snake_case."""
        data = dataclasses.asdict(self)
        for name in ("memory_by_kind", "parts"):
            data[name] = {key.replace(" ", "_"): value for key, value in data[name].items()}
        return {**data, "layout": str(self.layout), "runs_here": self.runs_here}


def layout_forecast(
    problem: Problem, scored: Scored, index: int, *, num_similar: int = 0
) -> LayoutForecast:
    """The forecast of one evaluated row. `num_similar`: as in `LayoutForecast`."""
    row = scored.take(np.array([index]))
    at, times = row.layouts, row.times
    layout = layout_at(at, 0)
    if layout.pp > 1 and problem.division == "even":
        layout = dataclasses.replace(layout, pipeline_split="even")
    seconds, pipeline = float(row.seconds[0]), float(row.pipeline[0])
    low, high = problem.time_range
    step = Range(seconds * low, seconds, seconds * high)
    gpus = layout.world_size
    gpu = problem.cluster.node.gpu
    held = problem.memory(at)
    busy = _busy(problem, row)
    exchanged = 2 * float(times.exchange[0]) * float(at.microbatches[0] * at.virtual[0])
    waiting = max(pipeline - busy, 0.0)
    exchanged = min(exchanged, waiting)  # messages that somebody waits for
    # What rounding leaves below nothing is nothing.
    inside, between = max(float(times.tensor[0]), 0.0), max(float(times.data[0]), 0.0)
    inside = min(inside, busy)
    parts = {
        "compute": busy - inside,
        "communication inside layers": inside,
        "communication between stages": exchanged,
        "pipeline bubble": waiting - exchanged,
        "communication between data ranks": between,
        "optimizer": float(times.optimizer[0]),
    }
    parts["other"] = max(seconds - sum(parts.values()), 0.0)
    if parts["other"] == 0.0:  # data-parallel traffic that overlaps with compute is in both
        parts["compute"] += seconds - sum(parts.values())
    rate = gpus * gpu.flops[problem.precision]
    price = gpu.price
    per_token = None if price is None else price * gpus / 3600 / problem.tokens
    known = {
        "weights": float(held.weights[0]),
        "gradients": float(held.gradients[0]),
        "optimizer": float(held.optimizer[0]),
        "activations": float(held.activations[0]),
    }
    peak = float(held.peak[0])
    on_host = float(problem.host_memory(at)[0])
    ranks = on_host / max(float(held.host[0]), 1.0)
    on_hosts = bool(fits_host(on_host, float(held.pinned[0]) * ranks, problem.cluster.node))
    enough = bool(fits_memory(held, gpu.usable)[0]) and on_hosts
    known["buffers and context"] = peak - sum(known.values())
    unsupported = [one.reason(layout) for one in absent(layout)]
    if problem.axes is not None:
        unsupported += [
            f"{axis} is {str(getattr(layout, axis)).lower()}: {problem.model_type} models do not "
            f"train under {axis}"
            for axis, used in not_trained(layout, problem.axes).items()
            if used
        ]
    refused = problem.refused(halved=layout.schedule in LATE and layout.pp > 1)
    unsupported += [] if refused is None else [refused]
    return LayoutForecast(
        layout=layout,
        microbatch=int(at.microbatch[0]),
        num_gpus=gpus,
        step_seconds=step,
        tokens_per_second_per_gpu=step.inverse(problem.tokens / gpus),
        mfu=step.inverse(problem.flops / rate),
        memory=round(peak),
        memory_high=round(float(row.high[0])),
        memory_by_kind={name: round(value) for name, value in known.items()},
        host_memory=round(on_host),
        fits_host=on_hosts,
        fits=enough,
        tight=enough and bool(row.high[0] > problem.usable),
        bubble=waiting / pipeline if pipeline else 0.0,
        exposed=(inside + exchanged + between) / seconds,
        parts=parts,
        dollars_per_billion_tokens=None if per_token is None else step.scaled(per_token * BILLION),
        simulated=bool(row.simulated[0]),
        unsupported=tuple(unsupported),
        context="" if layout.cp == 1 else "ulysses" if times.ulysses[0] > 0 else "ring",
        num_similar=num_similar,
    )


def _busy(problem: Problem, row: Scored) -> float:
    """Seconds that the average rank computes in a step's pipeline."""
    times, at = row.times, row.layouts
    whole = float(times.forward[0] + times.inputs[0] + times.weights[0])
    layers = len(problem.shape.layers)
    whole *= layers / (layers + 2 * float(at.lighter[0]))  # of the average rank
    ends = float(times.embedding[0] + times.head[0]) / float(at.pp[0])
    return float(at.microbatches[0]) * (whole + ends)
