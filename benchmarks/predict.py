"""Predict: what hocket foretells of training on this machine, beside what it then measures.

    each round    probe this machine anew | foretell every layout | train in every layout
    a layout      median over the rounds of predicted and measured: step time, bubble, peak memory

Probe and runs of one round lie next to each other, so that what else the machine does falls on
both. Nothing is fitted to a layout or a model: a forecast knows the probe and the model's shape.

    python -m benchmarks.predict                        # two models, ten layouts each
    python -m benchmarks.predict --models small --rounds 1
    python -m benchmarks.predict --priority             # as root, on a machine that others use
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.quiet import wait_until_quiet
from hocket.catalogue import models
from hocket.jobs import forecast, machine, prepare
from hocket.jobs.background_load import BackgroundLoad
from hocket.jobs.probe import measure_machine
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import request
from hocket.jobs.train import PRELOAD, launch_ranks, prepare_run
from hocket.launch import Launcher
from hocket.spec.ledger import DISTURBED
from hocket.spec.measured import MachineMeasurements
from hocket.spec.timeline import Timeline

MODELS: dict[str, dict[str, Any]] = {
    "small": {},  # tiny-llama: 1.8M parameters with its vocabulary of 4,096
    "medium": {
        "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 2048,
    },
}  # fmt: skip

LAYOUTS = (
    "dp2",
    "tp2",
    "pp2:microbatches=2",
    "pp2:microbatches=4",
    "pp2:microbatches=8,schedule=gpipe",
    "pp2:microbatches=4,schedule=zero-bubble",
    "pp2:microbatches=1,schedule=sequential",
    "dp4",
    "tp4",
    "dp2.tp2",
    "dp2.pp2:microbatches=4",
    "pp2.tp2:microbatches=4",
    "pp4:microbatches=8",
)

WORK = {"seq_len": 128, "global_batch": 16}
WARM = 2
"""Steps of a run that are not counted: the first is counted in bytes, the second still warms."""


@dataclasses.dataclass
class Row:
    """One layout of one model, over the rounds."""

    model: str
    layout: str
    predicted: list[float] = dataclasses.field(default_factory=list)
    measured: list[float] = dataclasses.field(default_factory=list)
    bubbles: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    memory: list[float] = dataclasses.field(default_factory=list)
    others: list[float] = dataclasses.field(default_factory=list)

    @property
    def error(self) -> float:
        """Of the step time, relative: the median of the rounds."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return statistics.median(p / m - 1 for p, m in pairs)

    @property
    def bubble(self) -> tuple[float, float]:
        """Predicted and measured, medians."""
        predicted, measured = zip(*self.bubbles, strict=True)
        return statistics.median(predicted), statistics.median(measured)

    @property
    def worst_memory(self) -> float:
        """Relative error of the peak, of the rank where it is largest."""
        return max(self.memory, key=abs)


def run(arguments: argparse.Namespace) -> list[Row]:
    """All rounds of all models."""
    rows = {
        (name, layout): Row(name, layout)
        for name in arguments.models
        for layout in arguments.layouts
    }
    with tempfile.TemporaryDirectory() as folder, raised(arguments.priority):
        data = Path(folder) / "data.txt"
        data.write_text("\n\n".join(f"line {i} of text, and {i * 7 % 97}" for i in range(40_000)))
        for number in range(arguments.rounds):
            for name in arguments.models:
                wait_until_quiet(arguments.patience)
                measured = measure_machine(device="cpu", quick=not arguments.full)
                with Launcher("cpu", 1, preload=PRELOAD) as launcher:
                    for layout in arguments.layouts:
                        row = rows[name, layout]
                        one(launcher, Path(folder), row, measured, arguments.steps)
                        time.sleep(arguments.rest)  # where this comes first, others get a turn
                        last = f"{row.predicted[-1] * 1e3:.0f} / {row.measured[-1] * 1e3:.0f} ms"
                        print(f"round {number + 1} {name} {layout}: {last}", flush=True)
    return list(rows.values())


def one(
    launcher: Launcher, folder: Path, row: Row, measured: MachineMeasurements, steps: int
) -> None:
    """Foretell and train one layout once."""
    model, path = folder / row.model, folder / "run"
    model.mkdir(exist_ok=True)
    config = {**models.config("tiny-llama"), **MODELS[row.model]}
    (model / "config.json").write_text(json.dumps(config))
    shutil.rmtree(path, ignore_errors=True)
    asked = request(
        {
            "model": str(model), "data": str(folder / "data.txt"), "run": str(path),
            "layout": row.layout, "steps": steps + WARM, "tokenizer": "bytes", "device": "cpu",
            "eval_every": 0, "eval_fraction": 0.0, "timeline_step": steps + WARM - 1, **WORK,
        }
    )  # fmt: skip
    job, record = prepare.prepare_job(asked), JobRecorder()
    run_folder = prepare.train_folder(asked)
    spec = prepare_run(job, run_folder, record)
    found, _ = forecast.predicted_run(spec, measured, launcher=launcher, schedule=job.schedule)
    assert found.known, found.why
    background_load = BackgroundLoad()
    summary = launch_ranks(launcher, run_folder, spec, record, cluster="none")
    seconds = [float(event["step_seconds"]) for event in record.steps[WARM:]]
    timeline = Timeline.from_json(run_folder.timeline_file.read_text())
    row.predicted.append(found.step_seconds)
    row.measured.append(statistics.median(seconds))
    row.bubbles.append((found.bubble, timeline.bubble))
    row.memory += [p / m - 1 for p, m in zip(found.peak_bytes, summary.memory_bytes, strict=True)]
    row.others.append(background_load.cores())


def table(rows: list[Row]) -> str:
    """The table, and what the goals come to."""
    lines = [f"{'model':8}{'layout':44}{'predicted':>10}{'measured':>10}{'error':>8}"
             f"{'bubble':>8}{'meas.':>7}{'memory':>8}  others"]  # fmt: skip
    for row in rows:
        bubble = row.bubble
        lines.append(
            f"{row.model:8}{row.layout:44}{statistics.median(row.predicted) * 1e3:8.1f}ms"
            f"{statistics.median(row.measured) * 1e3:8.1f}ms{row.error:+8.1%}"
            f"{bubble[0]:8.1%}{bubble[1]:7.1%}{row.worst_memory:+8.1%}"
            f"{statistics.median(row.others):8.2f}"
        )
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        lines += ["", f"{name}: " + _summary(mine)]
        quiet = [row for row in mine if statistics.median(row.others) <= DISTURBED]
        if quiet and len(quiet) < len(mine):
            lines.append(f"  where others took less than {DISTURBED} cores: " + _summary(quiet))
    return "\n".join(lines)


def _summary(rows: list[Row]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    bubbles = sorted(abs(row.bubble[0] - row.bubble[1]) for row in rows)
    chosen = min(rows, key=lambda row: statistics.median(row.predicted))
    best = min(statistics.median(row.measured) for row in rows)
    regret = statistics.median(chosen.measured) / best - 1
    return (
        f"step time within {statistics.median(errors):.1%} (median of {len(rows)} layouts, worst "
        f"{errors[-1]:.1%}); "
        f"bubble within {100 * statistics.median(bubbles):.1f} points (worst "
        f"{100 * bubbles[-1]:.1f}); peak memory within {max(abs(r.worst_memory) for r in rows):.1%}"
        f" (worst rank); the chosen {chosen.layout} is {regret:.1%} slower than the best"
    )


@contextlib.contextmanager
def raised(wanted: bool) -> Iterator[None]:
    """Within, this program and what it starts come before others of the machine (Linux, root).

    Linux shares processors among sessions first; the launcher's server has a session of its own.
    """
    if not wanted:
        yield
        return
    stop = threading.Event()

    def keep() -> None:
        me = os.getpid()
        while not stop.wait(0.05):
            for folder in (Path("/proc") / str(me), *_children(me)):
                with contextlib.suppress(OSError):
                    (folder / "autogroup").write_text("-20")

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _children(pid: int) -> list[Path]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [Path("/proc") / child for child in found]


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--full", action="store_true", help="the full probe, not the quick one")
    parser.add_argument("--priority", action="store_true", help="before other sessions (root)")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for quiet")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between two runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/predict.json"))
    arguments = parser.parse_args()
    rows = run(arguments)
    print(table(rows))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "host": machine.present_machine("cpu").host.cpu,
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
