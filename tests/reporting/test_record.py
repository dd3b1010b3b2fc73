"""What a report can read from a run folder that is whole, torn, or none."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.reporting.payload import run_figures, run_payload
from hocket.reporting.record import on_all_ranks, read_run
from hocket.reporting.run_text import report_text
from hocket.schedules import build_schedule
from hocket.simulation import simulate
from hocket.spec.errors import RunFolderError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder
from tests.reporting.run_folders import gpus, make


def test_a_whole_run(tmp_path: Path) -> None:
    record = read_run(make(tmp_path / "run"))
    assert record.notes == ()
    assert record.finished
    assert record.step_seconds == 0.2
    assert record.measured is not None
    assert record.forecast is not None
    assert len(record.memory) == 8
    assert record.schedule is not None


@pytest.mark.parametrize(
    ("said", "shown"), [('{"cores": 0.8}', 1), ('{"cores": 0.1}', 0), ("", 0), (None, 0)]
)
def test_a_run_that_others_disturbed_says_so(
    tmp_path: Path, said: str | None, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run")
    if said is not None:
        RunFolder(run).background_load_file.write_text(said)
    assert main(["report", str(run), "--format", "text"]) == 0
    assert capsys.readouterr().out.count("other programs took 0.8 cores") == shown
    found = read_run(run)
    assert sum("other programs took" in note for note in found.notes) == shown
    assert any("background_load.json is damaged" in note for note in found.notes) == (said == "")


def test_a_run_that_died(tmp_path: Path) -> None:
    path = make(tmp_path / "run", done=7, predicted=False)
    for name in ("timeline.json", "communication.json"):
        (path / name).unlink()
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 8, "lo')
    record = read_run(path)
    assert not record.finished
    assert record.steps_done == 7
    said = " ".join(record.notes)
    assert "7 of 20 steps" in said
    assert "line 8 is torn" in said
    assert "no timeline was recorded" in said
    assert "holds no forecast.json" in said


@pytest.mark.parametrize(
    "name",
    ["run.json", "timeline.json", "timeline.predicted.json", "forecast.json", "memory.json",
     "communication.json", "schedule.txt", "topology.json"],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["cut", "empty", "other", "bytes"])
def test_a_damaged_file_is_named_and_left_out(tmp_path: Path, name: str, damage: str) -> None:
    path = make(tmp_path / "run", machine=gpus())
    whole = (path / name).read_text()
    wrong = {"cut": whole[: len(whole) // 2], "empty": "", "other": "[1, 2]"}
    (path / name).write_bytes(wrong[damage].encode() if damage in wrong else b"\xff\xfe\x00{")
    notes = read_run(path).notes
    assert any(name in note for note in notes), notes


@pytest.mark.parametrize("number", ["1e999", "NaN", '"x"', "[]", "1" + "0" * 400])
@pytest.mark.parametrize(
    ("name", "key"),
    [("run.json", "steps"), ("run.json", "seq_len"), ("forecast.json", "step_seconds"),
     ("forecast.json", "total"), ("forecast.json", "memory"), ("memory.json", "total"),
     ("communication.json", "bytes"), ("metrics.jsonl", "step")],
)  # fmt: skip
def test_a_number_that_is_none_is_named_and_left_out(
    tmp_path: Path, name: str, key: str, number: str
) -> None:
    path = make(tmp_path / "run")
    whole = (path / name).read_text()
    torn, count = re.subn(rf'("{key}": )[0-9][0-9.e]*', rf"\g<1>{number}", whole, count=1)
    assert count == 1
    (path / name).write_text(torn)
    record = read_run(path)
    said = [note for note in record.notes if name in note]
    assert len(said) == 1, record.notes
    assert said[0].count(name) == 1
    assert report_text(record)


@pytest.mark.parametrize("key", ["links", "exposed"])
@pytest.mark.parametrize("value", ["7", '"x"', "[]", '{"tp": []}'])
def test_a_table_that_is_none_is_named_and_left_out(tmp_path: Path, key: str, value: str) -> None:
    path = make(tmp_path / "run")
    data = json.loads((path / "forecast.json").read_text())
    (path / "forecast.json").write_text(json.dumps({**data, key: json.loads(value)}))
    record = read_run(path)
    assert any(f"forecast.json cannot be read: {key} is" in note for note in record.notes)
    assert run_payload(record)


def test_a_schedule_with_a_stage_that_it_lacks_is_left_out(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    file = RunFolder(path).schedule_file
    file.write_text(file.read_text().replace("0F0", "70F0", 1))
    assert main(["report", str(path)]) == 0
    assert any("70F0 is of a stage beyond its 2" in note for note in read_run(path).notes)


def test_an_event_of_no_kind_is_drawn(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    file = path / "timeline.json"
    data = json.loads(file.read_text())
    data["events"][0]["kind"] = ""
    file.write_text(json.dumps(data))
    assert "idle" in report_text(read_run(path))


def test_why_nothing_was_predicted_is_reported(tmp_path: Path) -> None:
    path = make(tmp_path / "run", predicted=False)
    (path / "forecast.json").write_text(Forecast.none("dp1", "no probe").to_json())
    record = read_run(path)
    assert record.forecast is None
    assert record.notes == ("nothing was predicted: no probe",)


def test_numbers_that_are_none_leave_gaps(tmp_path: Path) -> None:
    path = make(tmp_path / "run", metrics={"loss": float("nan")})
    assert read_run(path).column("loss") == []


@pytest.mark.parametrize(
    ("ranks", "note"),
    [(2, "rank 2 cannot be"), (10**6, "num_ranks is 1000000; with "), (-1, "num_ranks is -1; ")],
)
def test_events_that_cannot_be_are_refused(tmp_path: Path, ranks: int, note: str) -> None:
    path = make(tmp_path / "run")
    file = path / "timeline.json"
    file.write_text(file.read_text().replace('"num_ranks": 8', f'"num_ranks": {ranks}'))
    record = read_run(path)
    assert record.measured is None
    assert any(note in found for found in record.notes)


def test_what_is_no_run_is_an_error_with_the_nearest_one(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "first")
    with pytest.raises(RunFolderError, match="there is no folder") as missing:
        read_run(tmp_path / "runs" / "frist")
    assert missing.value.hint is not None
    assert missing.value.hint.endswith("first?")
    with pytest.raises(RunFolderError, match="holds no run") as outer:
        read_run(tmp_path / "runs")
    assert str(outer.value.hint).endswith("first")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="holds no run"):
        read_run(tmp_path / "empty")
    with pytest.raises(RunFolderError, match="is a file"):
        read_run(tmp_path / "runs" / "first" / "run.json")


def test_a_prediction_of_the_pipeline_alone_goes_to_every_rank() -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    pipeline = simulate(build_schedule(layout, 2))
    spread = on_all_ranks(pipeline, layout)
    assert spread.num_ranks == 8
    for rank in range(8):
        place = layout.coordinate(rank)["pp"]
        mine = [e.name for e in spread.events if e.rank == rank]
        assert mine == [e.name for e in pipeline.events if e.rank == place]


@pytest.mark.parametrize("load", [0.0, 1.2])
def test_a_disturbed_probe_is_reported(tmp_path: Path, load: float) -> None:
    made = gpus()
    machine = dataclasses.replace(made, host=dataclasses.replace(made.host, load=load))
    notes = read_run(make(tmp_path / "run", machine=machine)).notes
    assert any("1.2 of the 16 cores" in note for note in notes) == bool(load)


def test_times_are_of_the_layout_that_the_run_has_now(tmp_path: Path) -> None:
    from hocket.jobs.ledger import run_line

    run = make(tmp_path / "run", metrics={"mfu": 0.5})
    folder = RunFolder(run)
    plain = read_run(run)
    now = str(plain.layout)
    rows = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    last = len(rows)

    def laid(until: int, then: str = now) -> None:
        """Steps up to one in another layout, slower."""
        for row in rows:
            early = row["step"] <= until
            row.update({"layout": "dp9", "step_seconds": 3.0, "mfu": 0.1} if early else
                       {"layout": then, "step_seconds": 0.2, "mfu": 0.5})  # fmt: skip
        folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    laid(0)
    assert read_run(run).notes == ()
    laid(4)
    record = read_run(run)
    assert record.stretches == (("dp9", 1, 4), (now, 5, last))
    assert record.step_seconds == 0.2
    assert {row["title"]: row["measured"] for row in run_figures(record)}["MFU"] == 0.5
    assert len(record.column("loss")) == last
    assert record.notes == (
        f"steps 1 to 4 in dp9, steps 5 to {last} in {now}: times and memory are of the last",
    )
    (run / "earlier").mkdir()
    assert "in dp9 (recorded in earlier/), steps 5" in report_text(read_run(run))
    entry = run_line(record)
    assert entry is not None
    assert (entry.steps, entry.measured.step_seconds) == (last - 4, 0.2)
    laid(last)  # ended before the first step in the new layout
    record = read_run(run)
    assert record.step_seconds is None
    assert run_line(record) is None
    assert record.notes[0] == f"no step was taken in {now} yet; steps 1 to {last} in dp9"


def test_attention_kernels_are_in_the_report_and_on_the_page(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    assert read_run(path).attention == ()
    rows = [
        {"layer": "full", "layers": 2, "kernel": "cudnn", "reason": "causal, no mask"},
        {"layer": "sliding (window 5)", "layers": 10, "kernel": "flash-varlen", "reason": "window"},
    ]
    file = RunFolder(path).attention_file
    file.write_text(json.dumps(rows))
    record = read_run(path)
    assert [dict(row) for row in record.attention] == [
        {key: row[key] for key in ("layer", "kernel", "reason", "layers")} for row in rows
    ]
    text = report_text(record)
    assert re.search(r"sliding \(window 5\) +10 +flash-varlen +window", text)
    facts = dict(map(tuple, run_payload(record)["facts"]))
    assert facts["Attention, full"] == "cudnn (2 layers; causal, no mask)"
    file.write_text('[{"layer": "full"}]')
    damaged = read_run(path)
    assert damaged.attention == ()
    assert any("attention.json" in note for note in damaged.notes)
