"""Published rows of sources that no constant and no mechanism was made with: that their errors are
those that docs/reference/accuracy.md and accuracy-serving.md state."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.planning.table import read_training_table, training_rows
from hocket.planning.validate import price_training_rows
from hocket.planning.validate_serving import validate_serving

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "reference"

LINE = re.compile(r"^\| ([^|]+) \| (?:last|open) \|([^\n]*)\|$", re.M)


def stated(page: str) -> dict[str, list[float]]:
    """Of each source, the numbers of its line."""
    section = (DOCS / page).read_text().split("## Unseen sources")[1].split("\n## ")[0]
    return {
        name: [float(x) for x in re.findall(r"\d+\.?\d*", rest)]
        for name, rest in LINE.findall(section)
    }


def source(name: str) -> str:
    """As the documentation names it."""
    return re.split(r" \(|: | docs| benchmarks/| README", name.removeprefix("NVIDIA "))[0]


def training() -> Iterator[tuple[str, bool, float]]:
    found, left_out = training_rows(read_training_table(HERE / "unseen_training.csv"))
    assert not left_out
    for one in price_training_rows(found):
        assert one.row.measured is not None
        experts = one.row.kind.startswith("experts")
        yield source(one.row.source), experts, abs(one.step / one.row.measured - 1)


def test_step_times_are_off_by_what_is_stated() -> None:
    errors: dict[str, list[float]] = {}
    for name, experts, error in training():
        errors.setdefault(f"{name}, mixtures" if experts else name, []).append(100 * error)
    table = stated("accuracy.md")
    assert set(table) == set(errors)
    for name, values in errors.items():
        rows, *_, mean, median = table[name]
        assert rows == len(values)
        assert statistics.fmean(values) == pytest.approx(mean, abs=0.06), name
        assert statistics.median(values) == pytest.approx(median, abs=0.06), name


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_casts_to_8_bits_cost_what_they_move(gpu: str) -> None:
    """Llama 3 8B with torchao's float8 was measured 1.25 times as fast as in 16 bits on either."""
    table = [r for r in read_training_table(HERE / "unseen_training.csv") if f"8b-{gpu}" in r["id"]]
    wide, narrow = price_training_rows(training_rows(table)[0])
    assert wide.target is not None
    assert narrow.target is not None
    measured = wide.target / narrow.target
    assert measured == pytest.approx(1.25, abs=0.01)
    assert wide.step / narrow.step == pytest.approx(measured, rel=0.03)
    free = dataclasses.replace(narrow.row.constants, cast_bytes=0.0)
    whole = price_training_rows([dataclasses.replace(narrow.row, constants=free)])[0]
    assert wide.step / whole.step > 1.05 * measured


def test_servers_are_off_by_what_is_stated() -> None:
    report = validate_serving(HERE / "unseen_serving.csv")
    table = stated("accuracy-serving.md")
    errors: dict[str, dict[str, list[float]]] = {}
    for one in report.predicted_rows:
        known = errors.setdefault(next(n for n in table if one.row.source.startswith(n)), {})
        for field, measured in (("tpot", one.row.tpot), ("throughput", one.row.throughput)):
            if measured:
                known.setdefault(field, []).append(100 * abs(getattr(one, field) / measured - 1))
    assert set(table) == set(errors)
    for name, by_field in errors.items():
        expected = [
            of(by_field[field])
            for field in ("tpot", "throughput")
            if field in by_field
            for of in (statistics.fmean, statistics.median)
        ]
        assert table[name][-len(expected) :] == pytest.approx(expected, abs=0.06), name
