"""Chaos: faults drawn from a seed are found, named, survived, and change no bit of the end."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs.chaos.draw import (
    FIRST,
    STRETCH,
    ChaosFault,
    ChaosJob,
    chosen_kinds,
    draw_faults,
)
from hocket.jobs.chaos.kinds import ALL, BY_NAME
from hocket.jobs.chaos.result import ChaosResult, FaultResult, fault_table
from hocket.jobs.chaos.run import _disk, _Watched, chaos
from hocket.spec.errors import LayoutError, ModelError, OptionError
from hocket.spec.layout import Layout
from tests import rotation
from tests.ranks import RankPool

pytestmark = [pytest.mark.train, pytest.mark.ranks, pytest.mark.timeout(240)]

LAYOUTS = ("dp2", "dp2:zero=1", "dp2:zero=2", "dp2:zero=3", "tp2", "pp2", "cp2")
QUICK = ("kill", "exception", "cut", "full", "torn", "checkpoint", "tokens", "file", "nan", "term")
CASES = [
    *((layout, kind, 2) for layout in LAYOUTS for kind in QUICK),
    *((layout, "weights", 2) for layout in LAYOUTS[:3]),
    *((layout, kind, 1) for layout in LAYOUTS for kind in ("stop", "stuck")),
]
"""Without `slow`, which compares times: a busy machine hides it."""


@pytest.mark.parametrize(("layout", "kind", "count"), rotation.part(CASES, 24))
def test_faults_of_a_kind_are_survived(ranks: RankPool, layout: str, kind: str, count: int) -> None:
    seed = rotation.seed() % 1000
    found = chaos(
        "tiny-llama", layout=layout, seed=seed, faults=count, kinds=[kind], launcher=ranks.launcher
    )
    rows = "\n".join(map(str, found.faults))
    assert [fault.kind for fault in found.faults] == [kind] * count
    assert found.survived == count, rows
    assert found.equal, rows
    assert all(fault.named is not False for fault in found.faults), rows
    assert all((fault.detected_seconds or 0.0) >= 0.0 for fault in found.faults), rows


def test_a_fault_that_nothing_finds_is_not_survived(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hocket.jobs.chaos.run as module

    asked = module._request

    def without_comparison(*given: object, **options: object) -> object:
        import dataclasses

        job = asked(*given, **options)  # type: ignore[arg-type]
        blind = dataclasses.replace(job.options, replica_check_every=0)
        return dataclasses.replace(job, options=blind)

    monkeypatch.setattr(module, "_request", without_comparison)
    found = chaos(
        "tiny-llama", layout="dp2", seed=1, faults=1, kinds=["weights"], launcher=ranks.launcher
    )
    assert (found.survived, found.equal, found.ok) == (0, False, False)
    assert "NOT FOUND" in str(found.faults[0])


def test_a_restart_is_for_the_fault_that_happened_first(tmp_path: Path) -> None:
    """A rank that is stopped in an evaluation continues to show its stack, and lets another one
    reach its own fault in the export before all are ended: the restart names the first rank."""
    kind = BY_NAME["stop"]
    faults = (
        ChaosFault(0, kind, 0, 60, "export", 0.1),
        ChaosFault(1, kind, 1, 60, "evaluate", 0.1),
    )
    watch = _Watched(tmp_path / "job", 0, ChaosJob(60, "shm", faults))
    for number in (1, 0):
        watch.injected(faults[number])
    watch({"event": "restart", "rank": 1, "cause": "stopped", "step": 59, "time": time.time()})
    watch({"event": "done", "steps": 60})
    export, evaluation = watch.results("")
    assert evaluation.named is True
    assert export.named is None  # not tested on its own
    assert export.survived
    assert evaluation.survived


def test_a_fault_in_a_job_that_a_signal_ends_takes_no_restart_of_another(tmp_path: Path) -> None:
    """Ranks take some steps more until the signal's answer reaches them, up to the next fault."""
    torn = ChaosFault(0, BY_NAME["torn"], 2, 26, "step", 0.5)
    stuck = ChaosFault(1, BY_NAME["stuck"], 1, 35, "collective", 0.5)
    watch = _Watched(tmp_path / "job", 0, ChaosJob(60, "shm", (torn, stuck)))
    watch.submitted()
    watch.injected(torn)
    watch.submitted()
    watch({"event": "step", "step": 12})
    watch.injected(stuck)
    watch({"event": "restart", "rank": 1, "cause": "hung", "step": 34, "time": time.time()})
    watch({"event": "step", "step": 31})
    first, second = watch.results("")
    assert (first.survived, first.named, second.named) == (True, None, True)
    assert "signal" in first.remark


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("cut", "rank 1 of 2 failed: RuntimeError: Connection closed by peer", True),
        ("kill", "rank 1 of 2 failed: RuntimeError: Connection closed by peer", False),
        ("kill", "rank 0 (process 7) was killed by SIGKILL", True),
        ("stop", "rank 0 is stopped (SIGSTOP); no rank gave a sign of life for 4 s", True),
        ("weights", "weight differs on one of ranks [0, 1]", True),
    ],
)
def test_a_name_counts_alike_where_the_run_stops(
    tmp_path: Path, kind: str, text: str, named: bool
) -> None:
    """A rank that fails while the run saves to stop: of a link that was cut, either end counts."""
    fault = ChaosFault(0, BY_NAME[kind], 0, 25, "forward", 0.1)
    watch = _Watched(tmp_path / "job", 0, ChaosJob(60, "gloo", (fault,)))
    watch.injected(fault)
    watch({"event": "note", "text": f"{text}; the run was asked to stop: step-24 is kept"})
    assert [row.named for row in watch.results("")] == [named]


def test_a_disk_that_is_filled_stays_full_while_ranks_delete(tmp_path: Path) -> None:
    """No save finds the space of an old checkpoint that another rank deletes, at any moment, until
    the file that fills the disk is deleted."""
    from hocket.training.faults import fill_disk

    with _disk(disk := tmp_path / "checkpoints", small=True):
        old = [disk / f"step-{number}" / "rank-0" for number in range(50)]
        for path in old:
            path.parent.mkdir()
            path.write_bytes(bytes(1 << 16))
        fill_disk(filler := disk / ".filler")
        for number, path in enumerate(old):
            path.unlink()
            path.parent.rmdir()
            with pytest.raises(OSError, match="No space left on device"):
                (disk / f"new-{number}").write_bytes(bytes(1))
        filler.unlink()
        end = time.monotonic() + 60
        while shutil.disk_usage(disk).free < 50 << 16:
            assert time.monotonic() < end
            time.sleep(0.01)
        (disk / "new").write_bytes(bytes(1 << 20))


def test_faults_follow_from_the_seed_and_have_a_stretch_each() -> None:
    layout = Layout.parse("dp2.tp2")
    kinds = chosen_kinds((), layout)
    assert kinds == list(ALL)
    jobs = draw_faults(3, 200, kinds, layout)
    assert jobs == draw_faults(3, 200, kinds, layout)
    assert jobs != draw_faults(4, 200, kinds, layout)
    faults = [fault for job in jobs for fault in job.faults]
    assert sorted(fault.number for fault in faults) == list(range(200))
    assert {fault.kind for fault in faults} == set(ALL)
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    for job in jobs:
        phases = [fault.phase for fault in job.faults]
        assert phases.count("build") <= 1
        assert phases.count("export") <= 1
        within = [f for f in job.faults if f.phase not in ("build", "export")]
        stretches = [(fault.step - 1) // STRETCH for fault in within]
        assert len(set(stretches)) == len(stretches)
        if len(job.faults) > 1:
            assert min(stretches) >= FIRST
        assert all(fault.step <= job.steps for fault in job.faults)


def test_kinds_follow_from_the_layout() -> None:
    names = {kind.name for kind in chosen_kinds((), Layout.parse("dp1"))}
    assert names == {kind.name for kind in ALL} - {"cut", "weights", "slow"}
    assert "weights" not in {kind.name for kind in chosen_kinds((), Layout.parse("pp2"))}
    with pytest.raises(LayoutError, match=r"slow needs 2 ranks; the layout .* has 1"):
        chosen_kinds(("slow",), Layout.parse("dp1"))
    with pytest.raises(LayoutError, match="weights needs two data-parallel replicas"):
        chosen_kinds(("weights",), Layout.parse("dp2:zero=3"))
    with pytest.raises(OptionError, match="unknown kind of fault 'kil'") as caught:
        chosen_kinds(("kil",), Layout.parse("dp2"))
    assert caught.value.hint == "did you mean 'kill'?"


def test_what_cannot_be_run_is_rejected() -> None:
    with pytest.raises(OptionError, match="--faults is 0; it is at least 1"):
        chaos("tiny-llama", layout="dp2", faults=0)
    with pytest.raises(ModelError, match="million parameters; chaos starts a model again"):
        chaos("llama-3-8b", layout="dp2")
    with pytest.raises(LayoutError):
        chaos("tiny-llama", layout="dp3x")
    assert main(["chaos", "tiny-llama", "--kinds", "kills"]) == 2


def test_the_table_counts_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    moment = {"job": 0, "step": 3, "phase": "step"}
    good = FaultResult(
        kind="kill", injected_at=moment, rank=1, detected_by="end of the process",
        detected_seconds=0.5, named=True, recovered_seconds=1.0, steps_lost=2, survived=True,
    )  # fmt: skip
    bad = FaultResult(kind="kill", injected_at=moment, rank=0, remark="nothing has found it")
    found = ChaosResult(model="m", layout="dp2", seed=0, faults=[good, bad], jobs_equal=[True])
    assert not found.ok
    assert found.to_json()["survived"] == 1
    assert set(json.loads(json.dumps(found.to_json()))["faults"][0]) == {
        "kind", "injected_at", "rank", "detected_by", "detected_seconds", "named",
        "recovered_seconds", "steps_lost", "survived", "remark",
    }  # fmt: skip
    assert fault_table(found.faults)[1].split()[:4] == ["kill", "2", "1", "1/1"]
