"""The benchmark of links: its scale is found by a run of its own, beside those it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import links


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_the_run_that_finds_the_scale_is_in_no_rows_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**links.WIDE, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}
    monkeypatch.setattr(links, "WIDE", small)
    out = tmp_path / "rows.json"
    words = ["links", "--emulate-links", "nvlink5", "--steps", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    links.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["links"] == "nvlink5"
    assert all(row[layout]["measured"] > 0 for layout in links.LAYOUTS)
    assert "winners were predicted" in capsys.readouterr().out
