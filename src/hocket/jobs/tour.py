"""The tour: claims about splitting a model, each tested by running it on this machine.

Every stop predicts by a formula or by the planner, then runs, then compares; its verdict follows
from the two numbers. What a stop says in words lies in `reporting/words`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from hocket.jobs.compare import Asked, Bench
from hocket.jobs.request import Request, request
from hocket.reporting.tour import bars
from hocket.spec.comparison import Outcome, Way
from hocket.spec.errors import OptionError, unknown
from hocket.spec.layout import Layout
from hocket.spec.tour import Stop
from hocket.spec.units import format_bytes, format_seconds

MODEL = "tiny-llama"
SIZES = {"seq_len": 128, "global_batch": 8, "steps": 3}

FLOAT = 4
"""Bytes of a number in fp32, which the tour computes in."""

NEAR = 0.1
"""Difference of two shares of a step that still counts as the same."""


def tour(
    *,
    only: Sequence[str] = (),
    backend: str = "auto",
    on_stop: Callable[[Stop], None] | None = None,
) -> list[Stop]:
    """Run the stops, in their order.

    Args:
        only: keys of stops; empty: all.
        backend: `auto`, `shm` or `gloo`.
        on_stop: called with each stop as soon as it is done.

    Raises:
        OptionError: an unknown stop.
    """
    for key in only:
        if key not in STOPS:
            message, hint = unknown("stop", key, STOPS)
            raise OptionError(message, hint=hint)
    job = request({"model": MODEL, "device": "cpu", "backend": backend, **SIZES})
    found = []
    with Guide(job) as guide:
        for key, stop in STOPS.items():
            if only and key not in only:
                continue
            began = time.monotonic()
            done = dataclasses.replace(stop(guide), seconds=time.monotonic() - began)
            found.append(done)
            if on_stop is not None:
                on_stop(done)
    return found


class Guide(Bench):
    """A bench that remembers what it ran: stops share runs."""

    def __init__(self, job: Request, say: Callable[[str], None] | None = None) -> None:
        super().__init__(job, Asked(input_work=5.0), say)
        self._ran: dict[tuple[str, int | None], Outcome] = {}

    def way(self, layout: str, layers: int | None = None) -> Outcome:
        """What a layout came to, of the model with another number of layers if asked."""
        key = (layout, layers)
        if key not in self._ran:
            if not self.referred and layers is None:
                self.reference()
            way = Way(name=layout, title=layout, layout=Layout.parse(layout))
            found = self.run(way, layers=layers)
            assert found.ran, found.reason
            self._ran[key] = found
        return self._ran[key]

    @property
    def batch(self) -> int:
        return self.request.workload.global_batch

    @property
    def tokens(self) -> int:
        return self.batch * self.request.workload.seq_len


def _verdict(holds: bool, otherwise: str = "false", here: str = "true") -> str:
    return here if holds else otherwise


def threads(guide: Guide) -> Stop:
    """Data parallel in one process: what the first device bears."""
    one, found = guide.way("dp1"), guide.way("dp2:data_parallel=threads")
    parameters = one.fullest["parameters"]
    vocabulary = guide.source.dimensions.vocab_size
    optimizer = 2 * parameters  # AdamW's two moments
    outputs = 2 * guide.tokens * vocabulary * FLOAT  # all logits and their gradient
    first, other = (row["total"] for row in found.memory)
    predicted, measured = optimizer + outputs, first - other
    (broadcast,) = (row for row in found.collectives if row["name"] == "broadcast")
    most = max(first, 1)
    return Stop(
        key="threads",
        command=f"hocket compare {MODEL} --ways threads data",
        verdict=_verdict(bool(found.equal) and abs(measured - predicted) < NEAR * predicted),
        values={
            "predicted": format_bytes(predicted),
            "optimizer": format_bytes(optimizer),
            "outputs": format_bytes(outputs),
            "measured": format_bytes(measured),
            "first": format_bytes(first),
            "other": format_bytes(other),
            "broadcast": format_bytes(broadcast["bytes"]),
        },
        picture=bars([("0", first / most, format_bytes(first)), ("1", other / most,
                      format_bytes(other))]),
    )  # fmt: skip


def processes(guide: Guide) -> Stop:
    """Data parallel in processes: only gradients travel."""
    one, found = guide.way("dp1"), guide.way("dp2")
    thread = guide.way("dp2:data_parallel=threads")
    predicted = one.fullest["gradients"]
    rows = [r for r in found.collectives if r["name"] == "all-reduce" and r["axis"] == "dp"]
    measured = sum(row["bytes"] for row in rows) / found.way.layout.world_size
    totals = {row["total"] for row in found.memory}
    near = abs(measured - predicted) < 0.01 * predicted
    return Stop(
        key="processes",
        command=f"hocket compare {MODEL} --ways threads data",
        verdict=_verdict(bool(found.equal) and near and len(totals) == 1),
        values={
            "predicted": format_bytes(predicted),
            "measured": format_bytes(measured),
            "total": format_bytes(max(totals)),
            "threads_cost": _more(thread),
            "processes_cost": _more(found),
        },
        picture=bars(
            [
                (name, (o.loaded_seconds or 0.0) / _longest(thread, found), _step(o))
                for name, o in (("threads", thread), ("processes", found))
            ]
        ),
    )


def _longest(*outcomes: Outcome) -> float:
    return max(o.loaded_seconds or o.step_seconds for o in outcomes)


def _more(found: Outcome) -> str:
    """How much longer a step takes with a busy input pipeline."""
    more = (found.loaded_seconds or found.step_seconds) - found.step_seconds
    return f"{'-' if more < 0 else '+'}{format_seconds(abs(more))}"


def _step(found: Outcome) -> str:
    return f"{format_seconds(found.step_seconds)} -> {format_seconds(found.loaded_seconds or 0.0)}"


def layers(guide: Guide) -> Stop:
    """Layer-wise splitting: 48 layers over 4 devices, one batch at a time."""
    even = guide.way("pp4:schedule=sequential,cut=even,microbatches=1", 48)
    balanced = guide.way("pp4:microbatches=4", 48)
    predicted = (4 - 1) / 4
    near = abs(even.bubble - predicted) < NEAR
    return Stop(
        key="layers",
        command="hocket schedule --layout pp4 --schedule sequential --microbatches 1",
        verdict=_verdict(near and even.layers == (12, 12, 12, 12), here="true_if"),
        values={
            "predicted": f"{predicted:.0%}",
            "measured": f"{even.bubble:.0%}",
            "even": ", ".join(map(str, even.layers)),
            "balanced": "-".join(map(str, balanced.layers)),
        },
        picture="\n".join(
            f"{rank}  {'·' * 4 * rank}████{'·' * 4 * (3 - rank)}" for rank in range(4)
        ),
    )


def microbatches(guide: Guide) -> Stop:
    """What microbatches do to the idle time of a pipeline."""
    counts = [m for m in (1, 2, 4, 8) if m <= guide.batch]
    found = [guide.way(f"pp2:schedule=gpipe,microbatches={m}").bubble for m in counts]
    theory = [1 / (m + 1) for m in counts]
    falls = found[-1] < found[0] / 2
    near = all(abs(a - b) < NEAR for a, b in zip(found, theory, strict=True))
    rows = []
    for m, here, there in zip(counts, found, theory, strict=True):
        rows += [(f"m={m}", there, f"{there:.0%}"), ("", here, f"{here:.0%}")]
    return Stop(
        key="microbatches",
        command=f"hocket compare {MODEL} --sweep microbatches",
        verdict=_verdict(falls and near, here="true_if"),
        values={
            "predicted": ", ".join(f"{share:.0%}" for share in theory),
            "measured": ", ".join(f"{share:.0%}" for share in found),
        },
        picture=bars(rows),
    )


def columns(guide: Guide) -> Stop:
    """Why the first product is split by columns and the second by rows."""
    generator = np.random.default_rng(0)
    x, first, second = (generator.standard_normal(shape) for shape in ((8, 16), (16, 32), (32, 16)))
    whole = _gelu(x @ first) @ second
    halves = [slice(0, 16), slice(16, 32)]
    by_columns = sum(_gelu(x @ first[:, half]) @ second[half] for half in halves)
    parts = [slice(0, 8), slice(8, 16)]
    by_rows = sum(_gelu(x[:, part] @ first[part]) for part in parts) @ second
    differences = [float(np.abs(found - whole).max()) for found in (by_columns, by_rows)]
    largest = float(np.abs(whole).max())
    return Stop(
        key="columns",
        command=f"hocket check {MODEL} --layout tp2",
        verdict=_verdict(differences[0] < 1e-9 * largest and differences[1] > 0.1 * largest),
        values={
            "columns": f"{differences[0]:.0e}",
            "rows": f"{differences[1]:.2g}",
            "largest": f"{largest:.2g}",
        },
        picture="x ┬─ A[:, left]  ─ f ─ B[left , :] ─┐\n  └─ A[:, right] ─ f ─ B[right, :] ─┴─ sum",
    )


def _gelu(x: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf)
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def half_layers(guide: Guide) -> Stop:
    """How many all-reduces a layer needs under tensor parallelism."""
    few, many = 2, 6
    counts = []
    for depth in (few, many):
        found = guide.way("tp2", depth)
        rows = [
            r
            for r in found.collectives
            if r["name"] == "all-reduce" and r["axis"] == "tp" and r["phase"] == "microbatch"
        ]
        counts.append(sum(r["count"] for r in rows) // 2)
    predicted, measured = 4, (counts[1] - counts[0]) / (many - few)
    hidden = guide.source.dimensions.hidden_size
    return Stop(
        key="half_layers",
        command=f"hocket compare {MODEL} --ways tensor",
        verdict=_verdict(measured == predicted),
        values={
            "predicted": str(predicted),
            "measured": f"{measured:g}",
            "bytes": format_bytes(guide.tokens * hidden * FLOAT),
            "shallow": str(counts[0]),
            "deep": str(counts[1]),
            "few": str(few),
            "many": str(many),
        },
        picture="F  attention ─ all-reduce ─ feed-forward ─ all-reduce\n"
        "B  all-reduce ─ attention ─ all-reduce ─ feed-forward",
    )


def three(guide: Guide) -> Stop:
    """Data, pipeline and tensor parallelism together."""
    one, found = guide.way("dp1"), guide.way("dp2.pp2.tp2:microbatches=4")
    whole = one.fullest["parameters"]
    shares = [row["parameters"] / whole for row in found.memory]
    mean = sum(shares) / len(shares)
    assert found.worst is not None
    return Stop(
        key="three",
        command=f"hocket check {MODEL} --layout dp2.pp2.tp2",
        verdict=_verdict(bool(found.equal) and abs(mean - 0.25) < 0.02),
        values={
            "predicted": "25%",
            "measured": f"{mean:.1%}",
            "fullest": f"{max(shares):.1%}",
            "worst": f"{found.worst:.0%}",
        },
        picture=bars([(str(rank), share, f"{share:.1%}") for rank, share in enumerate(shares)]),
    )


STOPS: dict[str, Callable[[Guide], Stop]] = {
    stop.__name__: stop
    for stop in (threads, processes, layers, microbatches, columns, half_layers, three)
}
"""Every stop by its key, in the order they are walked."""


def told(stop: Stop | None, number: int, language: str, width: int = 100) -> str:
    """A stop as text; without one nothing, if the language is known. Raises OptionError."""
    from hocket.reporting.tour import stop_text, words

    words(language)
    return "" if stop is None else f"\n{stop_text(stop, number, language, width)}\n"


def written(path: str, stops: Sequence[Stop], language: str) -> None:
    """Write the Markdown page of a tour. Raises OSError where it cannot be written."""
    from pathlib import Path

    from hocket.jobs.compare import cores
    from hocket.reporting.tour import page_markdown

    Path(path).write_text(page_markdown(stops, cores(), language), encoding="utf-8")
