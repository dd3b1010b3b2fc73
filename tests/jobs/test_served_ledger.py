"""Servers in the ledger: beside training runs, and never among them."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs import ledger
from hocket.reporting.table import text_width
from hocket.spec.ledger import SERVED_FIGURES, LedgerEntry, ServedEntry
from tests.jobs.test_ledger import entry
from tests.reporting.run_folders import make
from tests.reporting.test_served import FORECAST, MEASURED, folder


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ledger.jsonl"
    monkeypatch.setenv("HOCKET_LEDGER", str(path))
    return path


def test_a_servers_folder_becomes_a_line(tmp_path: Path, file: Path) -> None:
    added = ledger.append(folder(tmp_path / "run"), 0.4)
    assert isinstance(added, ServedEntry)
    assert file.read_text() == added.to_json() + "\n"
    assert ServedEntry.from_json(added.to_json()) == added
    assert (added.command, added.layout, added.ranks) == ("serve", "dp2", 2)
    assert (added.requests, added.output_tokens, added.seconds) == (40, 1600, 100.0)
    assert added.disturbed
    assert "cores of" in added.machine
    now, then = added.measured, added.predicted
    assert then is not None
    # 400 steps of one request in 11 ms, 100 of five in 20, at 150 tokens; forecast 11 and 15.5.
    assert now.decode_seconds == pytest.approx(0.0128)
    assert then.decode_seconds == pytest.approx(0.0119)
    assert (now.prefill_seconds, then.prefill_seconds) == pytest.approx((0.03, 0.025))
    assert (now.tokens_per_second, then.tokens_per_second) == pytest.approx((250.0, 5 / 0.0155))
    assert (now.cache_tokens, then.cache_tokens) == (4096, 4096)
    assert added.error("prefill_seconds") == pytest.approx(-1 / 6)
    assert added.error("cache_tokens") == 0


def test_what_was_not_predicted_or_not_measured_stays_open(tmp_path: Path) -> None:
    alone = ledger.append(folder(tmp_path / "a", forecast=None))
    assert alone is not None
    assert alone.predicted is None
    silent = dataclasses.replace(
        MEASURED,
        requests=0,
        replicas=tuple(dataclasses.replace(r, decode=(), prefill=()) for r in MEASURED.replicas),
    )
    quiet = ledger.append(folder(tmp_path / "b", measured=silent))
    assert quiet is not None
    assert quiet.measured.decode_seconds is None
    assert quiet.measured.cache_tokens == 4096
    assert quiet.error("decode_seconds") is None
    assert ledger.append(folder(tmp_path / "c", measured=None)) is None
    never = dataclasses.replace(MEASURED, seconds=0.0)
    assert ledger.append(folder(tmp_path / "d", measured=never)) is None


def test_servers_stand_apart_from_training_runs(tmp_path: Path, file: Path) -> None:
    ledger.append(make(tmp_path / "run"))
    ledger.append(folder(tmp_path / "served"))
    off = dataclasses.replace(FORECAST, cache_tokens=8192)
    ledger.append(folder(tmp_path / "other", forecast=off))
    with file.open("a") as lines:
        lines.write('{"command": "serve"}\n')
    runs, servers, torn = ledger.read_all_entries()
    assert ([type(one) for one in runs], len(servers), torn) == ([LedgerEntry], 2, 1)
    assert ledger.read_ledger() == (runs, 1)
    rows = {row["group"]: row for row in ledger.ledger_errors(servers, "axis", SERVED_FIGURES)}
    assert list(rows) == ["dp", "all"]
    assert rows["dp"]["runs"] == 2
    assert rows["dp"]["cache_tokens"] == {"count": 2, "error": 0.5, "bias": 0.5}
    (machine, _) = ledger.ledger_errors(servers, "machine", SERVED_FIGURES)
    assert "cores of" in machine["group"]


def test_the_command_shows_both(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.append(folder(tmp_path / "served", model="/m/mo\x1bdel"), 0.7)
    assert main(["report", "--history"]) == 0
    said = capsys.readouterr().out
    assert "holds no training runs yet" in said
    assert "\x1b" not in said
    assert "servers, medians likewise; on record: 1" in said
    assert "250" in said
    assert "4.1K" in said
    assert "0.7 cores" in said
    ledger.append(make(tmp_path / "run"))
    assert main(["report", "--history", "--last", "0"]) == 0
    said = capsys.readouterr().out
    assert said.index("runs on record: 1") < said.index("servers, medians")
    assert "the last" not in said
    assert main(["report", "--history", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["entries"]) == len(found["served"]) == 1
    assert found["served"][0]["measured"]["cache_tokens"] == 4096
    assert [row["group"] for row in found["served_errors"]] == ["dp", "all"]


def test_columns_stay_under_each_other_whatever_names_are_written_in() -> None:
    names = ["한글모델", "plain", unicodedata.normalize("NFD", "모델"), "модель"]
    said = ledger.ledger_text([entry(model=name) for name in names], 0, "model", 9).splitlines()
    for mark, count in (("10.0%", 5), ("dp2", 4)):
        places = [text_width(line[: line.index(mark)]) for line in said if mark in line]
        assert len(places) == count
        assert len(set(places)) == 1


def test_a_model_of_a_run_folder_is_called_as_the_run(tmp_path: Path) -> None:
    shown = ledger.ledger_text([entry(model="/runs/mine/model")], 0, "axis", 9)
    (line,) = (line for line in shown.splitlines() if line.startswith("20"))
    assert " mine " in line
