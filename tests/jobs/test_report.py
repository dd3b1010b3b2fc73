"""`hocket report`: where each form is written, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs import report
from hocket.spec.install import install_line
from tests.reporting.run_folders import make


def test_the_page_lies_in_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    other = make(tmp_path / "other")
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == f"{run}/report-beside-other.html\n"
    assert main(["report", str(run), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()


def test_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", model="mo\x1b[31mdel")
    assert main(["report", str(run), "--format", "text"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "20 of 20 steps" in said
    for words in ("predicted step: ", "measured step: ", "part of the step", "imbalance",
                  "shared memory", "layout (predicted)", "does not fit", "-10.0%"):  # fmt: skip
        assert words in said, words
    assert main(["report", str(run), "--format", "text", "--out", str(tmp_path / "x.txt")]) == 0
    assert (tmp_path / "x.txt").read_text() == said
    other = make(tmp_path / "b", layout="dp4")
    assert main(["report", str(run), str(other), "--format", "text"]) == 0
    comparison = capsys.readouterr().out.splitlines()
    assert any(line.startswith("measured") and "run" in line and "b" in line for line in comparison)


def test_in_words_where_only_ascii_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["report", str(make(tmp_path / "run", model="modèle")), "--format", "text"]) == 0
    assert b"mod\\xe8le" in out.getvalue()
    assert b"forward" in out.getvalue()


def test_a_trace(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    assert main(["report", str(run), "--format", "trace"]) == 0
    trace = json.loads((run / "trace.json").read_text())
    assert len({e["pid"] for e in trace["traceEvents"]}) == 16


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make(tmp_path / "run$x^2", model="$\\frac")
    assert main(["report", str(run), "--format", "png"]) == 0
    assert (run / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["report", str(run), "--format", "png", "--out", str(tmp_path / "x.svg")]) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()
    died = make(tmp_path / "died", done=0, predicted=False)
    for name in ("timeline.json", "memory.json"):
        (died / name).unlink()
    assert main(["report", str(died), "--format", "png"]) == 0


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(make(tmp_path / "run")), "--format", "png"]) == 2
    assert install_line("report") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which run?"),
        (["RUN", "RUN", "RUN"], "3 runs were given"),
        (["RUN/nothing"], "there is no folder"),
        (["RUN/run.json"], "is a file"),
        (["EMPTY"], "holds no run"),
        (["RUN", "--out", "EMPTY"], "is a folder"),
        (["RUN", "--out", "EMPTY/a/b.html"], "is not a folder"),
        (["DIED", "--format", "trace"], "no timeline"),
        (["RUN", "--format", "png", "--out", "EMPTY/x.doc"], "x.doc"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    if "png" in arguments and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    make(tmp_path / "run")
    died = make(tmp_path / "died", predicted=False)
    (died / "timeline.json").unlink()
    (tmp_path / "empty").mkdir()
    names = {"RUN": "run", "EMPTY": "empty", "DIED": "died"}
    for word, name in names.items():
        arguments = [a.replace(word, str(tmp_path / name)) for a in arguments]
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_schedule_that_cannot_be_played_costs_only_its_own_bubble(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    schedule = (run / "schedule.txt").read_text()
    (run / "schedule.txt").write_text(schedule.replace("0F0,", ""))
    (found,) = report.report_records([run])
    assert report.own_bubble(found) is None
    assert "<main" in report.html([found])


def test_a_run_that_has_ended_does_not_fail_of_its_report(tmp_path: Path) -> None:
    said: list[str] = []
    run = make(tmp_path / "run")
    assert report.of_ended(run, said.append) == run / "report.html"
    assert not said
    assert report.of_ended(tmp_path / "gone", said.append) is None
    assert "no report was written" in said[0]
