"""A run whose ranks die or hang goes on by itself, and ends as the run that was never disturbed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.jobs.record import JobRecorder
from hocket.jobs.restart import run_with_restarts
from hocket.spec.checkpoint import checkpoints
from hocket.spec.errors import (
    CheckpointError,
    OptionError,
    RankFailure,
    ReplicaError,
    RunFolderError,
    TrainingError,
)
from hocket.spec.run import RunFolder
from tests.rotation import part
from tests.support.runs import STEPS, Whole, job, losses, weights

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

PHASES = [
    ("build", 1), ("step", 1), ("forward", 6), ("collective", 7), ("save", 8), ("save", 4),
    ("evaluate", 6), ("export", 12),
]  # fmt: skip


KILLED = [("dp2", *phase) for phase in PHASES]
KILLED += [("pp2:microbatches=2", *phase) for phase in (*PHASES[1:], PHASES[0])]


@pytest.mark.parametrize(("layout", "phase", "step"), part(KILLED, 4))
def test_a_rank_that_is_killed_anywhere_changes_no_bit(
    tmp_path: Path, whole: Whole, layout: str, phase: str, step: int
) -> None:
    whole(tmp_path, "whole", layout)
    fault = {"kind": "kill", "rank": 1, "phase": phase, "step": step}
    assert job(tmp_path, "cut", layout, [fault]).restarts == 1
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")


@pytest.mark.parametrize("layout", part(["dp2:zero=3", "pp2:microbatches=2"], 2))
def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, whole: Whole, layout: str) -> None:
    whole(tmp_path, "whole", layout)
    notes: list[str] = []
    fault = {"kind": "full", "rank": 1, "phase": "save", "step": 8}
    summary = job(tmp_path, "full", layout, [fault], notes)
    assert summary.restarts == 0
    (note,) = [text for text in notes if "was not saved" in text]
    assert "step 8 was not saved" in note
    assert "No space left on device" in note
    assert weights(tmp_path, "full") == weights(tmp_path, "whole")
    kept = sorted(path.name for path in (tmp_path / "full" / "checkpoints").glob("[!.]*"))
    assert kept == ["latest", "step-000004", "step-000012"]
    with pytest.raises(TrainingError, match="step 12 was not saved"):
        job(tmp_path, "last", layout, [{**fault, "step": 12}], max_restarts=0)


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """As where its file system was unmounted: each save is noted, the last one ends the run."""
    notes: list[str] = []
    run, away = tmp_path / "run", tmp_path / "away"

    def leave(event: dict[str, Any]) -> None:
        if event["event"] == "saved":
            run.rename(away)
            run.mkdir()
        elif event["event"] == "note":
            notes.append(event["text"])

    with pytest.raises(
        TrainingError, match=r"step 12 was not saved: .*run/run\.json: No such file"
    ):
        job(tmp_path, "run", "dp2", save_mode="blocking", heard=leave)
    (note,) = [text for text in notes if "was not saved" in text]
    assert "step 8 was not saved" in note
    assert not list(run.rglob("step-*"))
    assert (away / "checkpoints" / "step-000004" / "manifest.json").exists()


def test_a_failure_that_comes_back_ends_the_run(tmp_path: Path) -> None:
    fault = {"kind": "raise", "rank": 1, "phase": "step", "step": 6, "attempts": 9}
    with pytest.raises(RankFailure, match="the same failure came back after step 5") as caught:
        job(tmp_path, "run", "dp2", [fault])
    assert "injected in step" in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_a_failure_after_a_new_checkpoint_is_another_one(tmp_path: Path, whole: Whole) -> None:
    """Both come after step 8 to the same rank, and the checkpoint of step 8 is between them."""
    whole(tmp_path, "whole", "dp2")
    faults = [
        {"kind": "kill", "rank": 1, "phase": "save", "step": 8},
        {"kind": "kill", "rank": 1, "phase": "step", "step": 9, "attempts": 2},
    ]
    assert job(tmp_path, "cut", "dp2", faults).restarts == 2
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")


def test_restarts_in_a_row_are_bounded(tmp_path: Path) -> None:
    faults = [
        {"kind": "kill", "rank": 0, "phase": "step", "step": 2},
        {"kind": "kill", "rank": 1, "phase": "step", "step": 3, "attempts": 9},
    ]
    with pytest.raises(RankFailure, match="1 restarts in a row reached no new checkpoint"):
        job(tmp_path, "run", "dp2", faults, max_restarts=1, save_every=0)
    with pytest.raises(RankFailure, match=r"^rank 0 of 2 .* was killed by SIGKILL"):
        job(tmp_path, "none", "dp2", faults, max_restarts=0)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, whole: Whole) -> None:
    whole(tmp_path, "whole", "dp2:zero=1")
    for step in (6, 10):  # the only checkpoint, and the newer of two
        fault = {"kind": "damage", "rank": 1, "phase": "step", "step": step}
        summary = job(tmp_path, f"cut-{step}", "dp2:zero=1", [fault])
        assert summary.restarts
        assert weights(tmp_path, f"cut-{step}") == weights(tmp_path, "whole")


def test_a_whole_checkpoint_stays_where_the_newer_one_is_damaged(tmp_path: Path) -> None:
    """The damaged one is of the last step, which no later save has: it is not one of the two."""
    job(tmp_path, "run", "dp2", steps=5, save_every=2)
    saved = tmp_path / "run" / "checkpoints"
    shard = saved / "step-000005" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 16
    shard.write_bytes(data)
    notes: list[str] = []
    job(tmp_path, "run", "dp2", notes=notes, resume=True, steps=6, save_every=3)
    assert any("step-000005" in note for note in notes)
    assert [path.name for path in checkpoints(saved)] == ["step-000006", "step-000004"]


def test_a_fork_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """One that ends in the same way without a step between is not, nor is one that hocket ended."""
    options = SimpleNamespace(
        max_restarts=3, resume=False, elastic=True, replicate_state=None, on_divergence="stop"
    )
    spec: Any = SimpleNamespace(options=options, layout=SimpleNamespace(world_size=2), base=None)
    error = RankFailure("the fork server (process 7) was killed by SIGKILL")
    error.rank, error.cause = None, "was killed by SIGKILL"  # type: ignore[attr-defined]
    for revived, ends, notes in ((True, 1, 1), (True, 2, 1), (False, 1, 0)):
        events: list[dict[str, Any]] = []
        runs = iter([error] * ends)
        launcher: Any = SimpleNamespace(stop_asked=False, revive=lambda revived=revived: revived)

        def run(*given: Any, runs: Any = runs, **limits: Any) -> None:
            for failure in runs:
                raise failure

        launcher.run = run
        record = JobRecorder(events.append)
        failing = ends > 1 or not revived
        with pytest.raises(RankFailure) if failing else contextlib.nullcontext():
            run_with_restarts(launcher, "", RunFolder(tmp_path), spec, record, payload={})
        texts = [event["text"] for event in events if event["event"] == "note"]
        assert len(texts) == notes
        assert all("process 7) was killed by SIGKILL, after step 0; restart 1" in t for t in texts)


HANGS = [("stop", "shm"), ("stop", "gloo"), ("stuck", "gloo"), ("stuck", "shm")]


@pytest.mark.parametrize(("kind", "backend"), part(HANGS, 3))
def test_a_rank_that_hangs_is_named(tmp_path: Path, whole: Whole, kind: str, backend: str) -> None:
    fault = {"kind": kind, "rank": 1, "phase": "forward", "step": 7}
    notes: list[str] = []
    whole(tmp_path, "whole", "pp2:microbatches=2", backend=backend)
    job(tmp_path, "cut", "pp2:microbatches=2", [fault], notes, backend=backend)
    (failure,) = [note for note in notes if "restart 1" in note]
    assert "rank 1" in failure
    failures = (tmp_path / "cut" / "failures.txt").read_text()
    assert "rank 0: step 7, " in failures
    assert "rank 1: step 7, " in failures
    assert "[1RECV_F0]" in failures  # the cell of the schedule that rank 1 was in
    assert 'training/faults.py"' in failures  # its stack
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")
    assert RunFolder(tmp_path / "cut").load().options.resume is False


def test_the_same_command_starts_continues_and_reports_the_end(tmp_path: Path) -> None:
    import shutil

    job(tmp_path, "run", "dp2")
    before, run = weights(tmp_path, "run"), tmp_path / "run"
    files = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    again = job(tmp_path, "run", "dp2")
    assert again.steps == STEPS
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == files
    shutil.rmtree(run / "model")  # ended in its export
    job(tmp_path, "run", "dp2")
    assert weights(tmp_path, "run") == before
    shutil.rmtree(run / "model")  # ended before its first checkpoint
    shutil.rmtree(run / "checkpoints")
    job(tmp_path, "run", "dp2")
    assert weights(tmp_path, "run") == before
    assert [step for step, _ in losses(tmp_path, "run")] == list(range(1, STEPS + 1))
    with pytest.raises(CheckpointError, match="seed is 7"):
        job(tmp_path, "run", "dp2", seed=7)
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(RunFolderError, match="already holds a run of the data"):
        job(tmp_path, "run", "dp2", data=str(tmp_path / "other.txt"))


def test_a_stop_that_takes_longer_than_is_allowed_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kills after 1 s"):
        job(tmp_path, "run", "dp2", grace_seconds=1.0)


@pytest.mark.parametrize("layout", part(["dp2", "dp2:zero=1", "tp2", "pp2:microbatches=2"], 2))
def test_a_gradient_that_is_not_finite_is_skipped_by_all(tmp_path: Path, layout: str) -> None:
    fault = {"kind": "nan", "rank": 1, "phase": "step", "step": 5}
    notes: list[str] = []
    job(tmp_path, "run", layout, [fault], notes)
    (text,) = [note for note in notes if "is skipped" in note]
    assert text.startswith("step 5 is skipped")
    assert "first parameter with such a gradient: model." in text
    if layout in ("tp2", "pp2:microbatches=2"):
        assert "on rank 1" in text
    assert [step for step, _ in losses(tmp_path, "run")] == [1, 2, 3, 4, *range(6, STEPS + 1)]
    with pytest.raises(TrainingError, match="step 5: the loss is"):
        job(tmp_path, "none", layout, [fault], max_skipped_steps=0)


FLIPPED: list[tuple[str, int | None]] = [
    ("dp2", None), ("dp3", 1), ("dp3:zero=1", 1), ("dp2:zero=1", None),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "rank"), part(FLIPPED, 2))
def test_a_flipped_bit_in_a_replica_is_found(
    tmp_path: Path, whole: Whole, layout: str, rank: int | None
) -> None:
    fault = {"kind": "flip", "rank": 1, "phase": "step", "step": 7}
    notes: list[str] = []
    options = {"replica_check_every": 1, "global_batch": 6}
    whole(tmp_path, "whole", layout, **options)
    who = "one of ranks" if rank is None else f"rank {rank} differs in"
    with pytest.raises(ReplicaError, match=f"differ after step 7: {who}.*model.embed_tokens"):
        job(tmp_path, "stop", layout, [fault], **options)
    repaired = job(tmp_path, "run", layout, [fault], notes, on_divergence="repair", **options)
    assert weights(tmp_path, "run") == weights(tmp_path, "whole")
    assert repaired.restarts == (1 if rank is None else 0)
    assert any("differ" in note for note in notes)


@pytest.mark.parametrize("layout", part(["dp2.ep2", "dp4.ep2", "dp2.ep2:zero=1"], 3))
def test_experts_on_other_ranks_are_not_taken_for_differing_replicas(
    tmp_path: Path, layout: str
) -> None:
    job(
        tmp_path, "run", layout, model="tiny-mixtral", steps=2, timeline_step=1, save_every=0,
        replica_check_every=1,
    )  # fmt: skip
    assert len(losses(tmp_path, "run")) == 2


def test_generators_of_all_ranks_begin_with_the_seed_of_the_run(tmp_path: Path) -> None:
    """Not with one of each process, which torch draws: ranks of torchrun are separate processes."""
    from safetensors.numpy import load_file

    job(tmp_path, "run", "dp2", seed=12345)  # without dropout, nothing draws
    last = tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}"
    for rank in range(2):
        state = load_file(last / f"rank-{rank:05d}.safetensors")["random/torch"]
        assert state[:8].tobytes() == (12345).to_bytes(8, "little")
