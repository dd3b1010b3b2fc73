"""What a run may be resumed as: its layout, given, merged or wrong; refused before ranks start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hocket.catalogue import models as catalogue
from hocket.jobs import resume
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import JobRequest, request
from hocket.jobs.train import resumed, train_model
from hocket.schedules.registry import build_schedule
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload

pytestmark = pytest.mark.train

OWN = "dp2.pp2:schedule=gpipe,microbatches=4,zero=1"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def make(path: Path, layout: str = OWN, **options: Any) -> Path:
    """A run folder as a run of 6 steps leaves it that ended after step 3."""
    folder = RunFolder(path)
    spec = RunSpec(
        model="tiny-llama",
        config={**catalogue.config("tiny-llama"), "vocab_size": 257},
        layout=Layout.parse(layout),
        workload=Workload(seq_len=32, global_batch=16),
        options=TrainOptions(**{"steps": 6, "save_every": 3, "device": "cpu", **options}),
    )
    folder.create(spec)
    folder.schedule_file.write_text(str(build_schedule(spec.layout, spec.layout.microbatches or 1)))
    rows = [{"step": step, "loss": 4.0, "layout": layout} for step in (1, 2, 3)]
    folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.memory_file.write_text("[]")
    (path / "report.html").write_text("a page")
    checkpoint = folder.checkpoints / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (folder.checkpoints / "latest").write_text("step-000003\n")
    return path


def asked(run: Path, **values: Any) -> JobRequest:
    return request({"model": run, "run": run, "resume": True, "cluster": "none", **values})


def contents(run: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({}, OWN),
        ({"layout": "tp2"}, "tp2:microbatches=1"),  # whole: no ZeRO, no gpipe, as in a new run
        ({"layout": "dp2.pp2"}, "dp2.pp2:microbatches=4"),
        ({"layout": "pp2"}, "pp2:microbatches=4"),
        ({"layout": "pp4:zero=0", "microbatches": 8}, "pp4:microbatches=8"),
        ({"dp": 4}, "dp4:microbatches=1"),
        ({"schedule": "zero-bubble"}, OWN.replace("gpipe", "zero-bubble")),
        ({"microbatches": 2}, OWN.replace("=4", "=2")),
        ({"zero": 3, "offload": "params"}, OWN.replace("zero=1", "zero=3,offload=params")),
        ({"layout": OWN}, OWN),
        # As in the command that began the run, whose microbatches were chosen.
        ({"layout": "dp2.pp2:schedule=gpipe,zero=1"}, OWN),
        ({"layout": "dp2:data_parallel=threads"}, "dp2:microbatches=1,data_parallel=threads"),
    ],
)
def test_the_layout_that_is_asked_for(tmp_path: Path, given: dict[str, Any], layout: str) -> None:
    found = resume.resume_job(asked(make(tmp_path / "run"), **given))
    assert str(found.job.layout) == layout
    assert found.job.schedule == build_schedule(
        found.job.layout, found.job.layout.microbatches or 1
    )
    assert found.step == 3


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ({"layout": "dp3"}, "global batch of 16 does not divide over dp 3", "--layout dp"),
        ({"layout": "tp3"}, "attention heads do not divide over tp 3", "--layout tp"),
        ({"layout": "pp32"}, "layers cannot be cut into 32 stages", "--layout"),
        ({"layout": "dp1:recompute=norm+moe"}, "unknown recompute 'moe'", ""),
        ({"layout": "pp2", "microbatches": 3}, "does not divide into 3", "--microbatches"),
        ({"layout": "dp2", "offload": "activations"}, "are already in host memory", ""),
        ({"pipeline_split": "1-2-1"}, "names 3 stages", ""),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'", "1f1b"),
        ({"schedule": "interleaved", "microbatches": 3}, "does not divide into 3", ""),
        ({"layout": "dp2", "emulate_links": "nvlink3x4+net100g"}, "domain", ""),
        ({"layout": "dp512", "global_batch": 16}, "at most 256", ""),
        ({"layout": "dp2", "global_batch": 8}, "global_batch is 8", "--global-batch out"),
        ({"layout": "dp2", "seed": 7}, "seed is 7", "leave --seed out"),
        ({"layout": "dp2", "dtype": "bf16"}, "dtype is bf16", "leave --dtype out"),
        ({"layout": "dp2", "steps": 2}, "steps is 2", "--steps 6"),
        ({"layout": "dp2", "steps": 3}, "taken all of its 3 steps", "--steps 6, or hocket export"),
        ({"layout": "auto", "steps": 3}, "taken all of its 3 steps", "--steps 6"),
        ({"device": "cuda"}, "sees no CUDA device", "--device cpu"),
    ],
)
def test_a_resume_that_cannot_be_leaves_the_run_as_it_was(
    tmp_path: Path, given: dict[str, Any], said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.launch.launcher.cuda_shows", lambda: False)
    run = make(tmp_path / "run")
    before = contents(run)
    with pytest.raises(HocketError) as error:
        train_model(asked(run, **given))
    assert said in error.value.message
    assert hint in (error.value.hint or "")
    assert contents(run) == before


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ({}, "the layout dp2.pp2 needs 4 ranks; the launcher started 2", "--layout"),
        ({"layout": "dp4"}, "the layout dp4 needs 4 ranks; the launcher started 2", "--layout dp2"),
        ({"layout": "auto"}, "another launcher has started 2 already", "without torchrun"),
    ],
)
def test_ranks_of_another_launcher_are_as_many_as_the_layout_has(
    tmp_path: Path, given: dict[str, Any], said: str, hint: str
) -> None:
    run = make(tmp_path / "run")
    with pytest.raises(HocketError) as error:
        resume.resume_job(asked(run, **given), world_size=2)
    assert said in error.value.message
    assert hint in (error.value.hint or "")
    assert (
        str(resume.resume_job(asked(run, layout="tp2"), world_size=2).job.layout.axes_text())
        == "tp2"
    )


def test_what_was_recorded_stays_with_its_layout(tmp_path: Path) -> None:
    run = make(tmp_path / "run", timeline_step=2)
    before, files = RunFolder(run).load(), contents(run)
    said: list[str] = []
    record = JobRecorder(lambda event: said.append(event["text"]))
    spec = resume.write_resumed(resume.resume_job(asked(run, layout="tp2", eval_every=7)), record)
    assert (str(spec.layout), spec.options.eval_every) == ("tp2:microbatches=1", 7)
    assert spec.options.timeline_step is None, "step 2 is over: of the new layout another one"
    assert RunFolder(run).load() == spec
    assert "from step 4 on the layout is tp2" in said[0]
    assert not RunFolder(run).memory_file.exists()
    earlier = RunFolder(run / "earlier" / "1")
    assert earlier.load() == before
    assert not (run / "report.html").exists()
    page = earlier.path / "report.html"
    for file in (earlier.metrics_file, earlier.memory_file, earlier.schedule_file, page):
        assert file.read_bytes() == files[run / file.name]
    # In the same layout nothing moves.
    RunFolder(run).memory_file.write_text("[1]")
    resume.write_resumed(resume.resume_job(asked(run, layout="tp2")), record)
    assert len(said) == 1
    assert RunFolder(run).memory_file.read_text() == "[1]"
    resume.write_resumed(resume.resume_job(asked(run, layout="dp2")), record)
    assert RunFolder(run / "earlier" / "2").load().layout == spec.layout
    # Where nothing was recorded, as by a layout that was left before its first step.
    resume.write_resumed(resume.resume_job(asked(run, layout="pp2")), record)
    assert said[2] == "from step 4 on the layout is pp2:microbatches=4"
    assert len(list((run / "earlier").iterdir())) == 2


def test_a_run_that_ends_before_its_next_step_gets_everything_back(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    before = contents(run)
    wish, record = asked(run, layout="tp2"), JobRecorder()

    def ended(*steps: int) -> None:
        with resume.unresumed_is_as_it_was(wish, record):
            resume.write_resumed(resume.resume_job(wish), JobRecorder())
            folder = RunFolder(run)
            folder.forecast_file.write_text("{}")  # as ranks and forecasts would
            folder.metrics_file.write_text("")
            for step in steps:
                record({"event": "step", "step": step})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ended()
    assert contents(run) == before
    assert not (run / "earlier").exists()
    with pytest.raises(KeyboardInterrupt):
        ended(4)
    assert str(RunFolder(run).load().layout) == "tp2:microbatches=1", "it has gone on"


def test_a_layout_is_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the run's own workload, options and model, and what was given beside it."""
    from hocket.jobs import forecast_policy, prepare
    from hocket.spec.forecast import Forecast

    def choose(
        job: prepare.PreparedJob, config: Any, record: JobRecorder, *, launcher: Any = None
    ) -> Any:
        assert (job.request.workload, job.request.model) == (spec.workload, "tiny-llama")
        assert (config, job.request.options.save_every) == (spec.config, 3)
        assert {"layout", "zero"} <= job.request.given
        chosen = dataclasses.replace(job.request.layout, dp=2)
        placed = prepare.job_in_layout(job, chosen)
        return (Forecast.none(str(placed.layout), "nobody asked"), None), placed

    monkeypatch.setattr(forecast_policy, "auto_layout", choose)
    from hocket.training import data
    from hocket.training.tokenizer import byte_tokenizer

    run = make(tmp_path / "run")
    (tmp_path / "text.txt").write_text("some text " * 100)
    sizes = {"seq_len": 32, "global_batch": 16}
    data.prepare_data(run / "data", byte_tokenizer(), [tmp_path / "text.txt"], **sizes)
    spec = RunFolder(run).load()
    found = resume.resume_job(asked(run, layout="auto", zero=2))
    written = resumed(found, JobRecorder(), launcher=None)  # type: ignore[arg-type]
    assert str(written.layout) == "dp2:microbatches=1,zero=2"
    predicted = Forecast.from_json(RunFolder(run).forecast_file.read_text())
    assert predicted.layout == str(written.layout)
    assert RunFolder(run / "earlier" / "1").load() == spec


@pytest.mark.parametrize("torn", ["", "of another", None])
def test_a_crash_between_two_files_leaves_a_run_that_goes_on(
    tmp_path: Path, torn: str | None
) -> None:
    run = make(tmp_path / "run")
    file = RunFolder(run).schedule_file
    if torn is None:
        file.unlink()
    elif torn:
        file.write_text(str(build_schedule(Layout.parse("pp2:schedule=1f1b"), 4)))
    else:
        file.write_text(torn)
    found = resume.resume_job(asked(run))
    assert found.job.schedule == build_schedule(found.spec.layout, 4)
    resume.write_resumed(found, JobRecorder())
    assert file.read_text() == str(found.job.schedule)


def test_messages_of_an_earlier_version_are_ordered_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "pp2:schedule=1f1b,microbatches=2")
    file = RunFolder(run).schedule_file
    now = file.read_text()
    # A send at once, a receive as late as can be: complete only where sends are buffered.
    early = "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1"
    late = now.replace(early, "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1")
    assert late != now
    file.write_text(late)
    assert str(resume.resume_job(asked(run)).job.schedule) == now


def test_a_schedule_file_is_needed_only_once(tmp_path: Path) -> None:
    written = tmp_path / "mine.txt"
    written.write_text(str(build_schedule(Layout.parse("pp2:schedule=zero-bubble"), 4)))
    run = make(tmp_path / "run", f"pp2:schedule={written},microbatches=4")
    kept = resume.resume_job(asked(run)).job.schedule
    written.unlink()
    assert resume.resume_job(asked(run)).job.schedule == kept
    RunFolder(run).schedule_file.unlink()
    with pytest.raises(HocketError, match="unknown schedule"):
        resume.resume_job(asked(run))
    assert str(resume.resume_job(asked(run, layout="pp2")).job.layout) == "pp2:microbatches=4"
