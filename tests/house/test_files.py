"""The house is kept small and tidy: what every file must be."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from tests.house import figures

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hocket"
LARGEST = 500


def test_no_file_is_too_long() -> None:
    long = {
        str(file.relative_to(ROOT)): count
        for file in SOURCE.rglob("*.py")
        if (count := len(file.read_text().splitlines())) > LARGEST
    }
    assert not long


def test_every_module_opens_with_a_sentence() -> None:
    without = [
        str(file.relative_to(ROOT))
        for file in SOURCE.rglob("*.py")
        if not (ast.get_docstring(figures.parsed(file)) or "").strip()
    ]
    assert not without


def test_no_room_or_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "core", "helpers", "helper", "manager", "misc"}
    found = [str(p) for p in SOURCE.rglob("*") if p.stem.lower() in drawers]
    assert not found


def test_nothing_is_left_undone() -> None:
    undone = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [str(file) for file in SOURCE.rglob("*.py") if undone.search(file.read_text())]
    assert not found


def test_nothing_is_unpickled() -> None:
    # What torch.distributed offers for objects pickles them too: gather_object and its kin.
    pickled = re.compile(
        r"pickle\.loads?\(|torch\.load\(|weights_only=False|"
        r"(gather|broadcast|scatter|send|recv)_object(_list)?\("
    )
    found = [str(file) for file in SOURCE.rglob("*.py") if pickled.search(file.read_text())]
    assert not found


def test_one_module_counts_cores() -> None:
    """A container's quota counts wherever cores are counted."""
    counts = re.compile(r"os\.cpu_count|len\(os\.sched_getaffinity|process_cpu_count")
    counting = [file for file in SOURCE.rglob("*.py") if counts.search(file.read_text())]
    assert counting == [SOURCE / "runtime" / "host_cores.py"]


def test_ci_runs_check_and_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "set -euo pipefail"
    assert lines[-2:] == ["make check", "make test"]
