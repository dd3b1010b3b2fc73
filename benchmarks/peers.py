"""hocket beside its peers in one run: `python -m benchmarks.peers`.

All contenders of an axis are alive together and take turns of a few steps, A B C A B C ..., so
that a drift of the machine meets all alike. What is compared is the ratio of medians; the losses
are compared too, and a contender that computes something else is flagged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import AXES, REFERENCE, TITLES, contenders
from benchmarks.figures import Measured, best_peer, machine, table
from benchmarks.groups import ROOT, Contender, Group, GroupError, missing_packages
from benchmarks.quiet import DISTURBED, Watch, wait_until_quiet
from benchmarks.workload import WORKLOADS, Workload, quiet

RESULTS = ROOT / "benchmarks" / "results"
ENVIRONMENTS = (".venv-peers", ".venv-automodel")


def measure(
    chosen: list[Contender],
    workload: Workload,
    *,
    rounds: int,
    steps: int,
    warmup: int,
    pythons: list[str],
    patience: float = 0.0,
    timeout: float = 180.0,
    say: Any = print,
) -> list[Measured]:
    """Let contenders take turns: `rounds` times `steps` steps each, after `warmup` steps.

    A turn disturbed by other programs is taken again, as long as `patience` seconds of waiting
    for a quiet machine last.
    """
    found = [Measured(contender) for contender in chosen]
    with contextlib.ExitStack() as stack:
        groups: list[tuple[Measured, Group]] = []
        for measured in found:
            contender = measured.contender
            # A contender without special needs runs on the interpreter that runs this.
            interpreter, missing = sys.executable, []
            for python in pythons if contender.requires else ():
                interpreter, missing = python, missing_packages(python, contender.requires)
                if not missing:
                    break
            if missing:
                measured.absent = f"not installed: {', '.join(missing)}"
                say(f"  {contender.name}: {measured.absent}")
                continue
            log = RESULTS / "logs" / f"{contender.name.replace(' ', '-').replace('/', '-')}.log"
            group = Group(contender, workload, interpreter, log, timeout)
            stack.callback(group.end)
            try:
                ready = group.ready()
                measured.base_bytes = [r["base_bytes"] for r in ready]
                for answer in [group.steps(warmup)[0]] if warmup else []:
                    measured.losses += answer["losses"]
            except GroupError as error:
                _fail(measured, group, error, say)
                continue
            groups.append((measured, group))
            say(f"  {contender.name}: ready")
        for turn in range(rounds):
            # Every other round runs backwards, so that nobody always follows the same neighbour.
            for measured, group in groups if turn % 2 == 0 else groups[::-1]:
                try:
                    patience = _turn(measured, group, steps, patience)
                except GroupError as error:
                    _fail(measured, group, error, say)
    return found


def _turn(measured: Measured, group: Group, steps: int, patience: float) -> float:
    """One turn, taken again while it was disturbed and there is patience; what is left of it."""
    while not measured.failed:
        if patience > 0:
            patience = wait_until_quiet(patience)
        watch = Watch(p.pid for p in group.processes)
        answers = group.steps(steps)
        disturbed = watch.foreign()
        measured.losses += answers[0]["losses"]
        if disturbed > DISTURBED and patience > 0:
            continue
        measured.disturbed.append(disturbed)
        measured.rounds.append(answers[0]["times"])
        measured.processor_seconds.append(sum(a["processor_seconds"] for a in answers))
        measured.peak_bytes = [a["peak_bytes"] for a in answers]
        break
    return patience


def _fail(measured: Measured, group: Group, error: GroupError, say: Any) -> None:
    measured.failed = str(error)
    group.end()
    say(f"  {measured.contender.name}: FAILED, {str(error).strip().splitlines()[-1]}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print one table an axis, write JSON. Exit code 1 if one of ours failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument(
        "--ranks", type=int, default=2, choices=(2, 4, 8), help="of the axes that take any number"
    )
    parser.add_argument("--only", nargs="+", default=[], help="parts of contenders' names")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the first turn")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds per table spent waiting for a quiet machine; disturbed turns are repeated",
    )
    parser.add_argument(
        "--peers-python",
        nargs="+",
        default=[str(ROOT / name / "bin" / "python") for name in ENVIRONMENTS],
        help="interpreters of the environments that hold the optional peers",
    )
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    options = parser.parse_args(arguments)

    quiet()
    RESULTS.mkdir(parents=True, exist_ok=True)
    workloads = {axis: _workload(axis) for axis in options.axis}
    workload = Workload()
    every = contenders(workload.microbatches, options.ranks)
    chosen = [
        c
        for c in every
        if c.axis in options.axis
        and (not options.only or any(part.lower() in c.name.lower() for part in options.only))
    ]
    pythons = [one for one in options.peers_python if Path(one).exists()] or [sys.executable]
    report: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": machine(),
        "rounds": options.rounds,
        "steps": options.steps,
        "warmup": options.warmup,
        "axes": {},
    }
    references: dict[str, list[float]] = {}
    failed = False
    for axis in [a for a in AXES if a in options.axis]:
        of_axis = [c for c in chosen if c.axis == axis]
        if not of_axis:
            continue
        title = TITLES[axis].format(ranks=options.ranks)
        workload = workloads[axis]
        sizes = workload.to_json()
        if axis != "one" and sizes not in references:
            references[sizes] = _reference(every, workload, options)
        print(f"{title}: starting {len(of_axis)} contenders", flush=True)
        before = machine()["load"]
        measured = measure(
            of_axis,
            workload,
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.warmup,
            pythons=pythons,
            patience=options.patience,
        )
        if axis == "one":
            named = {m.contender.name: m for m in measured}
            references[sizes] = named[REFERENCE].losses if REFERENCE in named else []
        reference = references[sizes]
        fastest = best_peer(measured, axis, reference)
        rows = [m.row(workload, fastest, reference) for m in measured]
        failed |= any(m.contender.ours and not m.times for m in measured)
        report["axes"][axis] = {
            "workload": json.loads(sizes) | {"model_dir": Path(workload.model_dir).name},
            "load_before": before,
            "load_after": machine()["load"],
            "rows": rows,
        }
        print("\n" + table(rows, title) + "\n", flush=True)
    path = options.json or RESULTS / f"peers-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"written: {path}")
    return int(failed)


def _workload(axis: str) -> Workload:
    """An axis' workload, its model written."""
    model_dir = RESULTS / ("model" if axis not in WORKLOADS else f"model-{axis}")
    workload = replace(WORKLOADS.get(axis, Workload()), model_dir=str(model_dir))
    if not (model_dir / "model.safetensors").exists():
        workload.write_model(model_dir)
    return workload


def _reference(every: list[Contender], workload: Workload, options: Any) -> list[float]:
    """Losses of one process over as many steps as the others take, when it is not measured."""
    one = [c for c in every if c.name == REFERENCE]
    total = options.warmup + options.rounds * options.steps
    measured = measure(
        one,
        workload,
        rounds=1,
        steps=total,
        warmup=0,
        pythons=[sys.executable],
        say=lambda text: None,
    )
    return measured[0].losses


if __name__ == "__main__":
    sys.exit(main())
