"""A run whose devices are gone continues on those left, as one process would, and grows again."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.jobs import elastic, forecast_policy
from hocket.jobs.prepare import PreparedJob, scheduled
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import request
from hocket.jobs.train import train_model
from hocket.models.source import resolve_model
from hocket.spec.errors import OptionError, RankFailure
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, TrainOptions
from hocket.training.pauses import APART
from tests.ranks import ROOT
from tests.rotation import part
from tests.support.runs import Whole, job, losses, weights

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

CONSTANT: dict[str, Any] = {"lr_schedule": "constant", "lr": 1e-3, "eval_every": 0}


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nothing was measured


def layouts(folder: Path, name: str) -> dict[int, str]:
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["layout"] for row in map(json.loads, rows)}


def equal_to_one_process(folder: Path, name: str, alone: str = "one") -> None:
    found, wanted = losses(folder, name), losses(folder, alone)
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=2e-5)


GONE = [
    {"kind": "kill", "rank": 3, "phase": "step", "step": 7},
    {"kind": "kill", "rank": 3, "phase": "build", "first": 1, "attempts": 99, "step": 1},
]
"""A rank that dies in step 7 and whenever it starts again."""


@pytest.mark.parametrize("layout", part(["dp4", "dp2.tp2"], 2))
def test_a_rank_that_is_gone_for_good_costs_its_device_alone(
    tmp_path: Path, whole: Whole, layout: str
) -> None:
    whole(tmp_path, "one", "dp1", steps=18, **CONSTANT)
    notes: list[str] = []
    summary = job(tmp_path, "run", layout, GONE, notes, elastic=True, **CONSTANT)
    assert summary.steps == 12
    (gone,) = [note for note in notes if "counts as gone" in note]
    assert gone.startswith("rank 3 of 4")
    used = layouts(tmp_path, "run")
    assert used[4].startswith(layout)
    assert Layout.parse(used[12]).world_size <= 3
    assert Layout.parse(used[12]).world_size == 2
    left_out = "1 of 3 ranks is left out: the global batch of 4 does not divide over dp 3"
    assert left_out in notes
    job(tmp_path, "run", layout, elastic=True, steps=18, **CONSTANT)  # its device is back
    assert layouts(tmp_path, "run")[18].startswith(layout)
    equal_to_one_process(tmp_path, "run")


def test_the_planner_chooses_for_the_ranks_that_are_left(tmp_path: Path, whole: Whole) -> None:
    from hocket.jobs import machine
    from hocket.spec.forecast import Forecast
    from tests.jobs.test_forecast import here

    file = tmp_path / "cluster.toml"
    machine.save_machine(machine.measured_cluster(here()), file)
    whole(tmp_path, "one", "dp1", **CONSTANT)
    notes: list[str] = []
    job(tmp_path, "run", "dp4", GONE, notes, elastic=True, cluster=str(file), **CONSTANT)
    forecast = Forecast.from_json((tmp_path / "run" / "forecast.json").read_text())
    assert forecast.layout == layouts(tmp_path, "run")[12]
    assert len(forecast.alternatives) > 1
    assert all(Layout.parse(one.layout).world_size <= 3 for one in forecast.alternatives)
    left_out = [note for note in notes if "left out: " in note]
    assert len(left_out) == (Layout.parse(forecast.layout).world_size < 3)
    equal_to_one_process(tmp_path, "run")


def test_copies_in_memory_are_resharded_too(tmp_path: Path, whole: Whole) -> None:
    whole(tmp_path, "one", "dp1", **CONSTANT)
    notes: list[str] = []
    options = {"elastic": True, "replicate_state": 2, "save_every": 50}
    job(tmp_path, "run", "dp4", GONE, notes, **options, **CONSTANT)
    resumed = [note for note in notes if note.startswith("resumed from")]
    assert resumed[-1].endswith(("checkpoints/step-000004", "checkpoints/step-000006"))
    assert layouts(tmp_path, "run")[7].startswith("dp2")
    equal_to_one_process(tmp_path, "run")


BACK = [
    GONE[0],
    {**GONE[1], "attempts": 2},
    {"kind": "slow", "rank": 0, "phase": "input", "step": 1, "seconds": APART, "attempts": 9},
]
"""A rank that dies in step 7 and once more, and starts at the third attempt; of steps that are long
enough for ranks to agree on a stop within one."""


@pytest.mark.parametrize("layout", part(["dp2.tp2", "dp4"], 2))
def test_a_running_run_grows_again_when_its_device_is_back(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The weights are those of a run that was started on fewer devices, and resumed on all."""
    monkeypatch.setattr(elastic, "RETRY", 0.0)
    whole(tmp_path, "one", "dp1", steps=18, **CONSTANT)
    notes: list[str] = []
    options = {"elastic": True, "steps": 18, "save_every": 2, **CONSTANT}
    summary = job(tmp_path, "run", layout, BACK, notes, **options)
    assert (summary.steps, summary.stopped) == (18, False)
    kept = [n for n in notes if "counts as gone" in n or "grows again" in n]
    assert kept[0].startswith("rank 3 of 4")
    assert kept[1:] == ["4 devices are there: the run grows again"]
    used = layouts(tmp_path, "run")
    few = [step for step, text in used.items() if not text.startswith(layout)]
    first, last = few[0], few[-1]
    assert first == 7
    assert last < 18
    assert few == list(range(first, last + 1))
    assert used[18] == used[6]
    equal_to_one_process(tmp_path, "run")

    options |= {"elastic": False, "save_every": last}
    job(tmp_path, "by-hand", layout, **{**options, "steps": 6, "save_every": 6})
    job(tmp_path, "by-hand", used[first], **{**options, "steps": last})
    job(tmp_path, "by-hand", used[18], **options)
    assert weights(tmp_path, "by-hand") == weights(tmp_path, "run")


class Machine:
    """Shows a number of devices; `asked`: how often ranks were asked to stop."""

    def __init__(self, shown: int | None) -> None:
        self.shown, self.asked = shown, 0

    def ask_stop(self) -> None:
        self.asked += 1


@pytest.fixture
def machine_of_4(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(4)
    monkeypatch.setattr(elastic, "visible", lambda options: machine.shown)
    return machine


SAVED = {"event": "saved", "step": 4}


def growth(machine: Any, layout: str = "dp4", left: int | None = None) -> elastic.Growth:
    asked = request({"model": "tiny-llama", "layout": layout, "elastic": True})
    return elastic.Growth(machine, asked, Layout.parse(layout), left)


def test_a_device_that_is_shown_again_counts_at_the_next_checkpoint(machine_of_4: Machine) -> None:
    machine_of_4.shown = 2
    found = growth(machine_of_4, left=2)
    found.hear(SAVED)
    assert machine_of_4.asked == 0
    machine_of_4.shown = 4
    found.hear({"event": "step", "step": 5})  # no checkpoint yet
    assert machine_of_4.asked == 0
    found.hear(SAVED)
    found.hear(SAVED)  # asked already
    assert machine_of_4.asked == 1
    asked, count = found.grown(request({"model": "tiny-llama"}))
    assert (count, asked.layout, asked.ranks) == (4, Layout.parse("dp4"), None)
    found.hear(SAVED)
    assert machine_of_4.asked == 1


def test_some_devices_that_are_back_give_a_layout_of_their_number(machine_of_4: Machine) -> None:
    found = growth(machine_of_4, left=1)
    machine_of_4.shown = 3
    found.hear(SAVED)
    assert machine_of_4.asked == 1
    assert found.grown(request({"model": "tiny-llama"}))[0].ranks == 3


def test_a_device_whose_rank_died_is_tried_again_after_a_time_that_doubles(
    machine_of_4: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now)
    found = growth(machine_of_4)
    for wait in (elastic.RETRY, 2 * elastic.RETRY, 4 * elastic.RETRY):
        before = machine_of_4.asked
        found.lost(3)
        now += 0.9 * wait
        found.hear(SAVED)
        assert machine_of_4.asked == before
        now += 0.2 * wait
        found.hear(SAVED)
        assert machine_of_4.asked == before + 1
        assert found.grown(request({"model": "tiny-llama"}))[1] == 4


def test_a_broken_device_that_was_away_counts_when_it_is_back(machine_of_4: Machine) -> None:
    found = growth(machine_of_4)
    found.lost(3)
    found.hear(SAVED)
    machine_of_4.shown = 3
    found.hear(SAVED)
    assert machine_of_4.asked == 0
    machine_of_4.shown = 4
    found.hear(SAVED)
    assert machine_of_4.asked == 1


def test_a_run_that_lost_nothing_does_not_ask(machine_of_4: Machine) -> None:
    found = growth(machine_of_4, "dp2")
    found.hear(SAVED)
    assert machine_of_4.asked == 0


def test_without_elastic_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="the same failure came back"):
        job(tmp_path, "run", "dp4", GONE, **CONSTANT)


def test_a_failure_of_the_run_itself_is_not_a_device_that_is_gone(tmp_path: Path) -> None:
    """It comes back at the same step, after others."""
    fault = {"kind": "raise", "rank": 1, "phase": "step", "step": 6, "attempts": 9}
    with pytest.raises(RankFailure, match="the same failure came back after step 5"):
        job(tmp_path, "run", "dp2", [fault], elastic=True, save_every=2, **CONSTANT)


def test_torchrun_with_fewer_and_with_more_ranks(
    tmp_path: Path,
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks, then one, then three, of which one is left over: 3 do not share a batch of 4."""
    whole(tmp_path, "one", "dp1", steps=9, **CONSTANT)
    foreign = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in foreign and "SLURM" not in k}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}

    def command(steps: int, *words: str) -> list[str]:
        return [
            *("train", "tiny-llama", "--data", "text.txt", "--run", "run", "--layout", "dp2"),
            *("--seq-len", "16", "--global-batch", "4", "--steps", str(steps), "--save-every", "3"),
            *("--eval-every", "0", "--warmup", "2", "--lr", "1e-3", "--device", "cpu"),
            *("--lr-schedule", "constant", "--cluster", "none", *words),
        ]

    def start(ranks: int, steps: int, *words: str) -> None:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(ranks), "-m", "--", "hocket", *command(steps, *words)),
            ],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    start(2, 3)
    with monkeypatch.context() as patch:  # what torchrun says to one rank alone
        for name, value in zip(foreign, ("0", "1", "127.0.0.1", "1"), strict=True):
            patch.setenv(name, value)
        patch.chdir(tmp_path)
        assert main(command(6)) != 0
    assert "needs 2 ranks; the launcher started 1" in capsys.readouterr().err
    start(1, 6, "--elastic")
    start(3, 9)  # the run is elastic since
    used = layouts(tmp_path, "run")
    assert [used[step].partition(":")[0] for step in (3, 6, 9)] == ["dp2", "dp1", "dp2"]
    start(1, 3, "--elastic", "--run", "few")  # as if a host was lost before the first checkpoint
    assert layouts(tmp_path, "few")[3].startswith("dp1")
    equal_to_one_process(tmp_path, "run")


def test_a_resumed_run_is_elastic_as_its_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices that a cluster's file has to find are those of the run, not of the command."""
    job(tmp_path, "run", "dp2", elastic=True, save_every=2, steps=4, **CONSTANT)
    seen = []

    def reject(cluster: str, options: TrainOptions) -> None:
        seen.append((cluster, options.elastic, options.device))
        raise OptionError("rejected", hint="")

    monkeypatch.setattr(forecast_policy, "reject_cluster", reject)
    run = str(tmp_path / "run")
    again = {"model": run, "run": run, "resume": True, "steps": 6}
    with pytest.raises(OptionError, match="rejected"):
        train_model(request({**again, "cluster": "probed.toml"}))
    with pytest.raises(OptionError, match="rejected"):
        train_model(request({**again, "cluster": "probed.toml", "elastic": False}))
    assert seen == [("probed.toml", True, "cpu"), ("probed.toml", False, "cpu")]
    assert RunFolder(tmp_path / "run").load().options.elastic


def test_hosts_of_a_shared_store_are_warned_that_none_can_join() -> None:
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    found = elastic.shared_store_note(shared) or ""
    assert found.endswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    assert elastic.shared_store_note({**shared, "GROUP_WORLD_SIZE": "1"}) is None
    assert elastic.shared_store_note({**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None


@pytest.mark.parametrize(
    ("chosen", "other", "why"),
    [
        ("dp2", ("dp3", 1.25, True), "1 of 3 ranks is left out: dp3 would be 25% slower"),
        ("dp1", ("dp3", 0.5, False), "2 of 3 ranks are left out: dp3 does not fit"),
        ("dp2", ("dp1", 2.0, True), "1 of 3 ranks is left out: none of the 2 fastest layouts has"),
        ("dp3", ("dp1", 2.0, True), None),
    ],
)
def test_a_layout_that_leaves_ranks_out_has_a_reason(
    chosen: str, other: tuple[str, float, bool], why: str | None
) -> None:
    from hocket.spec.forecast import Alternative, Forecast

    alternatives = tuple(
        Alternative(
            layout=layout, step_seconds=seconds, memory=1, bubble=0.0, fits=fits,
            chosen=layout == chosen,
        )
        for layout, seconds, fits in [(chosen, 1.0, True), other]
    )  # fmt: skip
    forecast = dataclasses.replace(
        Forecast.none(chosen, ""), step_seconds=1.0, alternatives=alternatives
    )
    found = elastic.unused_ranks(prepared("dp4:microbatches=1", 12), forecast, 3)
    assert found is None if why is None else (found or "").startswith(why)


def test_gpus_that_nothing_is_known_of_get_the_nearest_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data parallelism over all of them is illegal where they do not divide the batch."""
    monkeypatch.setattr(forecast_policy, "on_cuda", lambda options: True)
    monkeypatch.setattr(forecast_policy.gpu_run, "gpu_cluster", lambda *args, **more: None)
    monkeypatch.setattr(forecast_policy.prepare, "job_spec", lambda *args: None)
    notes: list[str] = []
    own = prepared("dp4:microbatches=1", 8)
    own = dataclasses.replace(own, request=dataclasses.replace(own.request, ranks=3))
    record = JobRecorder(lambda event: notes.append(event.get("text", "")))
    (forecast, _), _ = forecast_policy.auto_layout(own, {}, record)
    assert forecast.layout == "dp2:microbatches=2"
    assert notes[-1] == "1 of 3 ranks is left out: the global batch of 8 does not divide over dp 3"


def prepared(own: str, batch: int) -> PreparedJob:
    asked = request({"model": "tiny-llama", "layout": own, "global_batch": batch, "seq_len": 16})
    return PreparedJob(
        request=asked, source=resolve_model("tiny-llama"), layout=Layout.parse(own),
        schedule=scheduled(Layout(microbatches=1)),
    )  # fmt: skip


def test_ranks_that_a_layout_is_chosen_for() -> None:
    asked = request({"model": "tiny-llama", "layout": "dp4"})
    options, layout = TrainOptions(elastic=True, device="cpu"), Layout.parse("dp4")
    assert elastic.ranks_there(asked, options, layout, 4) is None
    assert elastic.ranks_there(asked, options, layout, 3) == 3
    assert elastic.ranks_there(asked, options, layout, 8) == 8
    assert elastic.ranks_there(asked, options, layout, None) is None
    assert (
        elastic.ranks_there(asked, dataclasses.replace(options, elastic=False), layout, 3) is None
    )
    left = elastic.chosen_for(asked, 3)
    assert (left.auto, left.ranks) == (True, 3)
    assert not left.given & {"layout", "dp"}


@pytest.mark.parametrize(
    ("own", "count", "wanted"),
    [
        ("dp4:microbatches=1", 3, "dp2:microbatches=2"),
        ("dp4:microbatches=2,zero=1", 3, "dp2:microbatches=4,zero=1"),
        ("dp2.tp2:microbatches=1", 3, "dp1.tp2:microbatches=2"),
        ("pp2.tp2:microbatches=4", 3, "pp3"),
        ("tp2:microbatches=1", 4, "dp2.tp2"),
        ("dp2:microbatches=2", 1, "dp1:microbatches=4"),
    ],
)
def test_without_measurements_the_layout_stays_near_the_run_s_own(
    own: str, count: int, wanted: str
) -> None:
    found = elastic.unmeasured_layout(prepared(own, 8), count)
    kept = Layout.parse(wanted)
    assert found.axes_text() == kept.axes_text()
    assert found.zero == kept.zero
    assert kept.microbatches in (None, found.microbatches)
