"""The ledger: appended whole by many at once, read whatever has happened to it, summed by group."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs import ledger
from hocket.spec.errors import OptionError, RunFolderError
from hocket.spec.ledger import Figures, LedgerEntry
from tests.reporting.run_folders import make


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "ledger.jsonl"
    monkeypatch.setenv("HOCKET_LEDGER", str(path))
    return path


def entry(layout: str = "dp2", step: float | None = 1.1, **more: object) -> LedgerEntry:
    predicted = None if step is None else Figures(step_seconds=step, memory=90.0, bubble=0.25)
    values: dict[str, object] = {
        "date": "2026-11-20T12:00:00+00:00", "version": "0.1.0", "run": "/runs/a", "model": "m",
        "layout": layout, "machine": "2 cores", "fingerprint": "abcd", "predicted": predicted,
        "measured": Figures(step_seconds=1.0, memory=100.0, bubble=0.2), **more,
    }  # fmt: skip
    return LedgerEntry(**values)  # type: ignore[arg-type]


def test_an_entry_reads_back_and_knows_its_errors() -> None:
    one = entry("dp2.pp2")
    assert LedgerEntry.from_json(one.to_json()) == one
    assert "\n" not in one.to_json()
    assert one.axes == ("dp", "pp")
    assert entry("dp1").axes == ("none",)
    assert one.error("step_seconds") == pytest.approx(0.1)
    assert one.error("memory") == pytest.approx(-0.1)
    assert one.error("bubble") == pytest.approx(0.05)
    assert entry(step=None).error("step_seconds") is None
    later = json.dumps({**json.loads(one.to_json()), "mood": "good"})
    assert LedgerEntry.from_json(later) == one


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "null", "{}", '{"date": 1}',
     entry().to_json().replace('"dp2"', '"xp2"'), entry().to_json().replace("1.0", '"fast"'),
     entry().to_json().replace("1.0", "-1.0"), entry().to_json().replace("100.0", "0")],
)  # fmt: skip
def test_what_is_no_entry_is_refused(line: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  any of those that reading passes over
        LedgerEntry.from_json(line)


def test_a_run_folder_becomes_a_line(tmp_path: Path, file: Path) -> None:
    added = ledger.append(make(tmp_path / "run"))
    assert added is not None
    assert file.read_text() == added.to_json() + "\n"
    assert added.measured.step_seconds == 0.2
    assert added.measured.memory == 9_000_000
    assert added.measured.bubble is not None
    assert added.predicted is not None
    assert added.predicted.step_seconds == 0.18
    assert added.ranks == 8
    assert "cores of" in added.machine
    assert len(added.fingerprint) == 8
    found, torn = ledger.read_ledger()
    assert found == [added]
    assert torn == 0


def test_a_run_without_a_prediction_is_on_record_too(tmp_path: Path) -> None:
    added = ledger.append(make(tmp_path / "run", layout="dp2:microbatches=1", predicted=False))
    assert added is not None
    assert added.predicted is None
    assert added.measured.bubble is None


def test_what_took_no_step_is_left_out(tmp_path: Path, file: Path) -> None:
    assert ledger.append(make(tmp_path / "run", done=0)) is None
    with pytest.raises(RunFolderError):
        ledger.append(tmp_path)
    assert not file.exists()


def test_a_ledger_that_cannot_be_written_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOCKET_LEDGER", str(tmp_path / "file" / "ledger"))
    said: list[str] = []
    ledger.enter(make(tmp_path / "run"), said.append)
    ledger.enter(tmp_path / "nothing", said.append)
    assert len(said) == 2
    assert all(words.startswith("not entered in the ledger: ") for words in said)


def test_a_torn_line_is_ended_and_passed_over(tmp_path: Path, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(entry().to_json() + "\n" + entry().to_json()[:40])
    ledger.append(make(tmp_path / "run"))
    found, torn = ledger.read_ledger()
    assert [one.model for one in found] == ["m", "tiny-llama"]
    assert torn == 1


def _append_some(path: str, letter: str) -> None:
    for _ in range(50):
        ledger._append_whole(Path(path), letter.encode() * 3000 + b"\n")


def test_lines_of_runs_that_end_together_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "many"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_append_some, args=(str(path), c)) for c in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    lines = path.read_text().splitlines()
    assert sorted(lines) == [c * 3000 for c in "abcd" for _ in range(50)]


def test_a_run_that_others_disturbed_is_marked(tmp_path: Path) -> None:
    quiet = ledger.append(make(tmp_path / "quiet"), 0.1)
    loud = ledger.append(make(tmp_path / "loud"), 0.8)
    assert quiet is not None
    assert loud is not None
    assert (quiet.disturbed, loud.disturbed) == (False, True)
    entries, torn = ledger.read_ledger()
    assert torn == 0
    shown = ledger.ledger_text(entries, torn, "axis", 5)
    assert shown.count("0.8 cores") == 1
    assert "0.1 cores" not in shown
    with pytest.raises(TypeError):
        LedgerEntry.from_json(loud.to_json().replace('"others": 0.8', '"others": "much"'))


@pytest.mark.timeout(20)  # short: to read it would fill the memory
def test_what_has_no_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_LEDGER", "/dev/zero")
    assert ledger.read_ledger() == ([], 0)


def test_where_the_ledger_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for off in ("", "0"):
        monkeypatch.setenv("HOCKET_LEDGER", off)
        assert ledger.ledger_file() is None
    assert ledger.append(make(tmp_path / "run")) is None
    monkeypatch.delenv("HOCKET_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert ledger.ledger_file() == Path("/data/hocket/ledger.jsonl")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert ledger.ledger_file() == Path("/home/someone/.local/share/hocket/ledger.jsonl")


def test_errors_by_axis_and_machine() -> None:
    entries = [
        entry("dp2", 1.1),
        entry("pp2", 0.7, machine="4 cores", fingerprint="efgh"),
        entry("dp2.pp2", 1.2),
        entry("dp2", None),
    ]
    rows = {row["group"]: row for row in ledger.ledger_errors(entries, "axis")}
    assert list(rows) == ["dp", "pp", "all"]
    assert rows["dp"]["runs"] == 3
    assert rows["dp"]["predicted"] == 2
    assert rows["dp"]["step_seconds"]["error"] == pytest.approx(0.15)
    assert rows["pp"]["step_seconds"]["error"] == pytest.approx(0.25)
    assert rows["pp"]["step_seconds"]["bias"] == pytest.approx(-0.05)
    assert rows["all"]["memory"] == pytest.approx({"count": 3, "error": 0.1, "bias": -0.1})
    machines = [row["group"] for row in ledger.ledger_errors(entries, "machine")]
    assert machines == ["2 cores (abcd)", "4 cores (efgh)", "all"]
    with pytest.raises(OptionError) as wrong:
        ledger.ledger_errors(entries, "machin")
    assert wrong.value.hint == "did you mean 'machine'?"


def test_the_command(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", "--history"]) == 0
    assert "holds no runs yet" in capsys.readouterr().out
    ledger.append(make(tmp_path / "run", model="mo\x1bdel"))
    assert main(["report", "--history", "--by", "model"]) == 0
    said = capsys.readouterr().out
    assert "10.0%" in said
    assert "\x1b" not in said
    assert main(["report", "--history", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(file)
    assert [row["group"] for row in found["errors"]] == ["dp", "pp", "tp", "all"]
    assert found["entries"][0]["measured"]["step_seconds"] == 0.2
    assert main(["report", "--history", "--by", "moon"]) == 2
    assert main(["report", "--history", "--last", "-1"]) == 2
    monkeypatch.setenv("HOCKET_LEDGER", str(tmp_path))
    assert main(["report", "--history"]) == 2
    assert "cannot be read" in capsys.readouterr().err
