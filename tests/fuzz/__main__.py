"""The command: fuzz some or all kinds, and print what became of them."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.kinds import KINDS
from tests.fuzz.worker import Outcome, Watch, fuzz


def main() -> int:
    """Returns 0 where no input failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, help="the number of one input to read again")
    given = parser.parse_args()
    if given.replay is not None:
        return _replay(given.kinds[0], given.replay, given.seed)
    failed = 0
    print("| kind | inputs | read | errors | failed | longest, s | most memory, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in given.kinds:
        began = time.monotonic()
        found = fuzz(name, given.inputs, given.seed)
        failed += len(found.failures)
        print(_row(found), flush=True)
        for number, why in found.failures[:20]:
            print(f"  {name} --replay {number}: {why}", file=sys.stderr)
        print(f"  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return int(failed > 0)


def _row(found: Outcome) -> str:
    cells = (
        found.kind, f"{found.inputs:,}", f"{found.right:,}", f"{found.errors:,}",
        f"{len(found.failures):,}", f"{found.seconds:.2f}", f"{found.grown / 1e6:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _replay(name: str, number: int, seed: int) -> int:
    kind = KINDS[name]
    with tempfile.TemporaryDirectory(prefix="hocket-fuzz-") as there:
        folder = Path(there)
        kind.prepare(folder)
        file = folder / kind.file
        rng = random.Random(f"{seed}/{name}/{number}")
        data = kind.mutate(file.read_bytes(), rng)
        file.write_bytes(data)
        print(data[:3000].decode(errors="replace"))
        row = Watch(folder).one(kind, folder, show=True)
    print(row)
    return int(bool(row["failure"]))


if __name__ == "__main__":
    sys.exit(main())
