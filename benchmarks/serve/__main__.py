"""Serving measured beside its peers: `python -m benchmarks.serve`.

All contenders are started once and stay alive; then they take turns of one load each, forwards and
backwards through the list, so that a drift of the machine meets all alike. Every request of every
turn must be answered with exactly the tokens that were asked for, and these are compared with what
transformers' generate makes of the same prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import machine
from benchmarks.groups import ROOT, missing_packages
from benchmarks.serve.client import ServerError
from benchmarks.serve.contenders import EVERY, REFERENCE, Contender, chosen
from benchmarks.serve.figures import Measured, tables
from benchmarks.serve.processes import ProcessError, Running
from benchmarks.serve.ratios import ratios
from benchmarks.serve.workload import MODELS, Load, Model, loads, prompts

RESULTS = ROOT / "benchmarks" / "results"
DEFAULT = (
    "hocket serve dp1",
    "hocket.LLM dp1",
    "generate_batch",
    "transformers serve",
    "vLLM",
)


@contextlib.contextmanager
def gate(command: str, what: str) -> Iterator[None]:
    """Hold the machine: `command warm-up` or `command measure` prints a line when it may be used,
    and gives it back when its standard input ends. For machines that several measure on."""
    if not command:
        yield
        return
    with subprocess.Popen(
        [*shlex.split(command), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            opened = holder.stdout.readline()
        except BaseException:
            holder.terminate()
            raise
        if not opened:
            raise SystemExit(f"the gate {command!r} did not open")
        try:
            yield
        finally:
            holder.stdin.close()


class Field:
    """The contenders of one model, alive together."""

    def __init__(self, model: Model, folder: Path, stack: contextlib.ExitStack) -> None:
        self.model, self.folder, self.stack = model, folder, stack
        self.running: dict[str, Running] = {}
        self.measured: dict[str, Measured] = {}

    def start(self, contender: Contender, python: str) -> None:
        """Start one contender and wait until it is ready; what goes wrong stands in its figures."""
        measured = self.measured.setdefault(contender.name, Measured(contender))
        missing = missing_packages(python, contender.requires) if python else ["no interpreter"]
        if missing:
            measured.absent = f"not installed: {', '.join(missing)}"
            print(f"  {contender.name}: {measured.absent}", flush=True)
            return
        name = "".join(c if c.isalnum() else "-" for c in contender.name)
        log = RESULTS / "logs" / f"serve-{self.model.name}-{name}.log"
        running = Running(contender, self.model, self.folder, python, log)
        self.stack.callback(running.end)
        try:
            running.ready()
        except ProcessError as error:
            self._fail(contender.name, running, error)
            return
        measured.ready_seconds = running.ready_seconds
        self.running[contender.name] = running
        print(f"  {contender.name}: ready after {running.ready_seconds:.1f} s", flush=True)

    def turns(self, load: Load, number: int) -> None:
        """One turn of every contender; turn 0 warms up and is not counted."""
        if not number:
            load = dataclasses.replace(load, repeats=1)
        asked = prompts(self.model, load, number)
        names = list(self.running)
        expected: list[list[int]] = []
        made: dict[str, list[list[int]]] = {}
        for name in names if number % 2 else names[::-1]:
            running = self.running[name]
            try:
                turn = running.turn(load, asked)
            except (ProcessError, ServerError, OSError) as error:
                self._fail(name, running, error)
                continue
            made[name] = turn.tokens
            if number:
                self.measured[name].turns.setdefault(load, []).append(turn)
        expected = made.get(REFERENCE, [])
        for name, answers in made.items():
            if name not in ("null server", REFERENCE) and expected:
                self._compare(self.measured[name], asked, answers, expected)

    def _compare(
        self,
        measured: Measured,
        asked: list[list[int]],
        answers: list[list[int]],
        expected: list[list[int]],
    ) -> None:
        """Note how many answers differ, and how far the worst token lies from the most probable."""
        different = [n for n, answer in enumerate(answers) if answer != expected[n]]
        measured.compared += len(answers)
        measured.different += len(different)
        if different:
            judge = self.running[REFERENCE]
            gaps = judge.order({"judge": [[asked[n], answers[n]] for n in different]})["gaps"]
            measured.gap = max(measured.gap, *gaps)

    def _fail(self, name: str, running: Running, error: Exception) -> None:
        self.measured[name].failed = str(error)
        self.running.pop(name, None)
        running.end()
        print(f"  {name}: FAILED, {str(error).strip()[-600:]}", flush=True)


def measure(model: Model, contenders: Sequence[Contender], options: Any) -> Field:
    """Start everybody, let them take turns, end everybody."""
    folder = RESULTS / "serve-models" / model.name
    if not (folder / "tokenizer_config.json").exists():
        model.write(folder)
    pythons = {
        "hocket": sys.executable,
        "null": sys.executable,
        "vllm": options.vllm_python,
        "transformers": options.transformers_python,
    }
    every = loads(options.clients, options.prefixes)
    with contextlib.ExitStack() as stack:
        field = Field(model, folder, stack)
        for contender in contenders:
            with gate(options.gate, "warm-up"):
                field.start(contender, pythons[contender.project])
        if REFERENCE not in field.running:
            raise SystemExit(f"{REFERENCE} did not start: there is nothing to compare with")
        for number in range(options.rounds + 1):
            with gate(options.gate, "measure" if number else "warm-up"):
                began = time.perf_counter()
                for load in every:
                    field.turns(load, number)
                took = time.perf_counter() - began
            print(f"  {f'round {number}' if number else 'warm-up'}: {took:.0f} s", flush=True)
    return field


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables, write JSON. Exit code 1 if one of ours failed or differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--only", nargs="+", default=list(DEFAULT), help="beginnings of contenders' names"
    )
    parser.add_argument("--list", action="store_true", help="print every contender's name")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument(
        "--prefixes", nargs="+", choices=["own", "shared"], default=["own", "shared"]
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender and load")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("HOCKET_BENCH_VLLM", ""),
        help="interpreter that has vLLM's CPU build (or HOCKET_BENCH_VLLM)",
    )
    parser.add_argument(
        "--transformers-python",
        default=os.environ.get("HOCKET_BENCH_TRANSFORMERS", sys.executable),
        help="interpreter that has transformers[serving] (or HOCKET_BENCH_TRANSFORMERS)",
    )
    parser.add_argument("--gate", default="", help=gate.__doc__)
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    options = parser.parse_args(arguments)
    # Told to end, it ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.list:
        print(*(contender.name for contender in EVERY), sep="\n")
        return 0
    try:
        contenders = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    report: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": machine(),
        "rounds": options.rounds,
        "models": {},
    }
    path = options.json or RESULTS / f"serve-{time.strftime('%Y%m%d-%H%M%S')}.json"
    failed = False
    for name in options.model:
        model = MODELS[name]
        print(f"{name}, {model.parameters / 1e6:.1f}M parameters: starting", flush=True)
        field = measure(model, contenders, options)
        measured = list(field.measured.values())
        every = loads(options.clients, options.prefixes)
        title = (
            f"{name}: {model.parameters / 1e6:.1f}M parameters, prompts of {model.prompt} tokens "
            f"(shared: the first {model.prefix} alike), {model.new} new ones, {options.rounds} "
            "rounds; columns: clients at the same time"
        )
        print("\n" + tables(measured, every, title))
        pairs = ratios(measured, every)
        print("\n" + pairs.text() + "\n", flush=True)
        report["models"][name] = {
            "contenders": [m.report() for m in measured],
            "ratios": pairs.rows,
        }
        failed |= any(
            m.contender.project == "hocket" and (m.failed or not m.agrees) for m in measured
        )
        # What was measured is kept, whatever becomes of the next model.
        path.write_text(json.dumps(report, indent=1))
        print(f"written: {path}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
