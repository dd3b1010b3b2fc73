"""Runs that save in the background end as those that wait, whatever is killed meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hocket.spec import checkpoint as words
from hocket.spec.errors import TrainingError
from tests.rotation import part
from tests.support.runs import Whole, job, losses, weights

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

BACKGROUND: dict[str, Any] = {"save_mode": "background", "save_every": 2}
LAYOUTS = ["dp2", "dp2:zero=1", "dp2:zero=2", "dp2:zero=3", "pp2:microbatches=2", "tp2"]


@pytest.mark.parametrize("layout", part(LAYOUTS, 3))
def test_checkpoints_and_end_are_those_of_blocking_saves(
    tmp_path: Path, whole: Whole, layout: str
) -> None:
    notes: list[str] = []
    kept = {"keep_checkpoints": 9, "save_every": 2}
    whole(tmp_path, "blocking", layout, save_mode="blocking", **kept)
    job(tmp_path, "later", layout, notes=notes, save_mode="background", **kept)
    assert any("saves are written in the background" in note for note in notes)
    one, other = (words.checkpoints(tmp_path / n / "checkpoints") for n in ("blocking", "later"))
    assert [path.name for path in one] == [path.name for path in other]
    assert len(one) == 6
    for each, its in zip(one, other, strict=True):
        assert words.verify_checkpoint(each) == words.verify_checkpoint(
            its
        )  # every tensor's checksum among it
    assert weights(tmp_path, "later") == weights(tmp_path, "blocking")
    assert losses(tmp_path, "later") == losses(tmp_path, "blocking")


@pytest.mark.parametrize("layout", part(LAYOUTS, 2))
def test_kills_at_any_moment_of_a_save_tear_no_checkpoint(tmp_path: Path, layout: str) -> None:
    """`after_kills` in tests/jobs/kills.py does so a hundred times."""
    from tests.jobs.kills import after_kills

    random.seed(layout)
    assert after_kills(tmp_path, layout, kills=4, seed=random.randrange(99)) == 4


@pytest.mark.parametrize("phase", ["save", "write"])
def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, whole: Whole, phase: str) -> None:
    whole(tmp_path, "whole", "dp2:zero=3")
    notes: list[str] = []
    fault = {"kind": "full", "rank": 1, "phase": phase, "step": 8}
    options = {"save_mode": "background", "keep_checkpoints": 9}
    summary = job(tmp_path, "full", "dp2:zero=3", [fault], notes, **options)
    assert summary.restarts == 0
    (note,) = [text for text in notes if "was not saved" in text]
    assert note.startswith("step 8 was not saved: ")
    assert "No space left on device; training continues" in note
    assert weights(tmp_path, "full") == weights(tmp_path, "whole")
    kept = sorted(path.name for path in (tmp_path / "full" / "checkpoints").iterdir())
    assert kept == ["latest", "step-000004", "step-000012"]
    late = {"kind": "full", "rank": 1, "phase": "save", "step": 12}
    with pytest.raises(TrainingError, match="step 12 was not saved"):
        job(tmp_path, "last", "dp2:zero=3", [late], max_restarts=0, **options)


def test_a_writer_that_fails_restarts_the_run(tmp_path: Path, whole: Whole) -> None:
    whole(tmp_path, "whole", "dp2")
    fault = {"kind": "raise", "rank": 1, "phase": "write", "step": 4}
    summary = job(tmp_path, "cut", "dp2", [fault], **BACKGROUND)
    assert summary.restarts == 1
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")


def test_a_stop_waits_for_what_is_being_written(tmp_path: Path, whole: Whole) -> None:
    whole(tmp_path, "whole", "dp2")
    fault = {"kind": "term", "rank": 0, "phase": "write", "step": 4}
    summary = job(tmp_path, "cut", "dp2", [fault], save_mode="background")
    assert summary.stopped or summary.steps == 12
    newest, _, notes = words.newest_whole(tmp_path / "cut" / "checkpoints")
    assert not notes
    if summary.stopped:
        assert newest.name == f"step-{summary.steps:06d}"
        job(tmp_path, "cut", "dp2", resume=True)
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")
