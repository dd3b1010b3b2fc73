"""hocket's collectives over shared memory beside Gloo's: `python -m benchmarks.collectives`.

By number of ranks and size, the two backends in turns. One number is the time of one call on
rank 0, the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import machine
from benchmarks.groups import Contender, Group
from benchmarks.peers import RESULTS
from benchmarks.workload import Workload

NAMES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "send and receive")
SIZES = (1_024, 65_536, 1_048_576, 16_777_216)
BACKENDS = ("shm", "gloo")


def measure(
    ranks: int, names: list[str], sizes: list[int], rounds: int, backends: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Rows of name, ranks, bytes and seconds by backend."""
    times: dict[str, list[list[float]]] = {backend: [] for backend in backends}
    with contextlib.ExitStack() as stack:
        groups = {}
        for backend in backends:
            contender = Contender(
                name=f"collectives on {backend}, {ranks} ranks",
                axis="collectives",
                entry="benchmarks.contenders.collectives:build",
                world_size=ranks,
                options={"backend": backend, "names": names, "sizes": sizes},
                ours=True,
            )
            log = RESULTS / "logs" / f"collectives-{backend}-{ranks}.log"
            group = Group(contender, Workload(), sys.executable, log, timeout=180)
            groups[backend] = stack.enter_context(group)
        for group in groups.values():
            group.ready()
        for turn in range(rounds + 1):
            for backend, group in groups.items():
                answer = group.steps(1)[0]
                if turn:  # the first turn warms up
                    times[backend].append(answer["times"])
    cases = [(name, size) for name in names for size in sizes]
    return [
        {
            "name": name,
            "ranks": ranks,
            "bytes": size,
            "seconds": {b: statistics.median(t[i] for t in times[b]) for b in backends},
        }
        for i, (name, size) in enumerate(cases)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as text: milliseconds on each backend, and how many times faster the first is."""
    backends = list(rows[0]["seconds"])
    head = ["collective", "ranks", "bytes", *(f"{b} ms" for b in backends)]
    head += ["ratio"] if len(backends) == 2 else []
    lines = [head]
    for row in rows:
        seconds = list(row["seconds"].values())
        line = [row["name"], str(row["ranks"]), str(row["bytes"])]
        line += [f"{1e3 * s:.3f}" for s in seconds]
        line += [f"{seconds[1] / seconds[0]:.1f}"] if len(seconds) == 2 else []
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "rows": []}
    for ranks in options.ranks:
        rows = measure(ranks, options.names, options.sizes, options.rounds, tuple(options.backends))
        report["rows"] += rows
        print(table(rows) + "\n", flush=True)
    report["load_after"] = machine()["load"]
    path = options.json or RESULTS / f"collectives-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
