"""Tests that wait for another process or thread give it a minute, however busy the machine is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = re.compile(
    r"(?:\.(?:wait|join|result|settimeout)\(|\btimeout(?:=|\()|\bmonotonic\(\) \+ |"
    r"\bwait_for\(.*, )(\d+(?:\.\d+)?)\b"
)
"""A limit in seconds that is given as a number."""
MINUTE, MOMENT = 60, 1
"""A wait of less than a moment is to end: a test looks that nothing happens meanwhile."""
MARK = "# short: "
"""Begins the reason on a line whose limit is to be shorter, as one that is to be reached."""


def short(source: str) -> list[str]:
    return [
        line.strip()
        for line in source.splitlines()
        if MARK not in line
        and any(MOMENT <= float(seconds) < MINUTE for seconds in LIMIT.findall(line))
    ]


def test_no_wait_for_what_is_to_come_is_shorter_than_a_minute() -> None:
    """Where it comes, the limit costs nothing; where all cores are busy, seconds pass."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    found = {str(file.relative_to(ROOT)): short(file.read_text("utf-8")) for file in files}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "thread.join(20)",
        "run(command, timeout=5.0)",
        "await asyncio.wait_for(task, 20)",
        "end = time.monotonic() + 10",
        "async with asyncio.timeout(2):",
    ],
)
def test_a_short_limit_is_found(line: str) -> None:
    assert short(f"first\n    {line}\n") == [line]
    assert short(f"first\n    {line}  {MARK}it expires\n") == []
