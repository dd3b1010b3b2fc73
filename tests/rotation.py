"""Rotation: of tests that take long, and of many similar cases, a part, chosen by the commit.

One commit always runs the same part, and successive commits run different ones. The commit's number
is printed at the end of a run; `HOCKET_TESTS=N` replays that of N, and `HOCKET_TESTS=all` runs
every test and every case.

    make test-all TESTS=--junitxml=all.xml
    python -m tests.rotation all.xml

updates how long each test takes, in `seconds.json`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TypeVar

Case = TypeVar("Case")

TESTS = Path(__file__).parent
TABLE = TESTS / "seconds.json"
"""Mean seconds of one case, by the test's module and function; of those of more than `FREE`."""
FREE = 1.0
"""Seconds up to which a test runs with every commit."""
ALWAYS = ("tests/house/test_docs.py::test_commands_run_in_their_order[README.md]",)
"""What runs with every commit, however long it takes."""


@functools.cache
def seed() -> int:
    """What chooses the part: HOCKET_TESTS if it is a number, else the hash of the commit."""
    given = os.environ.get("HOCKET_TESTS", "")
    if given.isdigit():
        return int(given)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(head.stdout.strip()[:8] or "0", 16)  # no repository: always the same part


def part(cases: Sequence[Case], share: int) -> list[Case]:
    """Every `share`-th case, from a first one that `seed` and the calling module choose."""
    if os.environ.get("HOCKET_TESTS") == "all":
        return list(cases)
    caller = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
    return list(cases[zlib.crc32(f"{seed()} {caller}".encode()) % share :: share])


def rotates(arguments: Sequence[str]) -> bool:
    """Whether a run of pytest with these arguments leaves tests out: one of the whole suite does,
    and one of a given commit's part. What is named by file or folder runs whole."""
    given = os.environ.get("HOCKET_TESTS", "")
    if given == "all" or given.isdigit():
        return given != "all"
    return all(Path(each).resolve() == TESTS for each in arguments)


def has_turn(name: str) -> bool:
    """Whether a test runs with this commit.

    A test of S seconds does with one of sqrt(S / `FREE`) commits: for a given length of a run, the
    wait until a failure is seen, summed over the tests, is then the shortest.

    Args:
        name: as pytest prints it, `tests/FOLDER/FILE.py::FUNCTION[CASE]`.
    """
    function = name.partition("[")[0].replace("/", ".").replace(".py::", ".").replace("::", ".")
    period = math.ceil(math.sqrt(max(_table().get(function, 0.0) / FREE, 1.0)))
    return name in ALWAYS or zlib.crc32(f"{seed()} {name}".encode()) % period == 0


@functools.cache
def _table() -> dict[str, float]:
    found: dict[str, float] = json.loads(TABLE.read_text())
    return found


def main(report: str) -> None:
    """Update the table from a report of pytest in JUnit's form: what did not run keeps its time."""
    cases: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            function = f"{case.attrib['classname']}.{case.attrib['name']}".partition("[")[0]
            cases[function].append(float(case.attrib["time"]))
    ran = {function: round(mean(times), 1) for function, times in cases.items()}
    known = {function: seconds for function, seconds in _table().items() if _exists(function)}
    table = {function: time for function, time in sorted((known | ran).items()) if time > FREE}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


def _exists(function: str) -> bool:
    """Whether a test of the table is still in its file (`tests.FOLDER.FILE.CLASS.FUNCTION`)."""
    module, names = TESTS.parent, function.split(".")
    while names and module.is_dir():
        module /= names.pop(0)
    file = module.with_suffix(".py")
    return file.exists() and f"def {names[-1]}(" in file.read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
