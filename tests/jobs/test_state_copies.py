"""A run whose ranks die continues from copies in memory, bit by bit as the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.spec.errors import OptionError
from hocket.spec.run import RunFolder
from tests.rotation import part
from tests.support.runs import Whole, job, losses, weights

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

LAYOUTS = ["dp2", "dp2:zero=1", "dp2:zero=3", "pp2:microbatches=2", "tp2"]
COPIED: dict[str, Any] = {"replicate_state": 2, "save_every": 50}


def resumed(notes: list[str]) -> list[str]:
    return [text.rpartition("/")[2] for text in notes if text.startswith("resumed from /dev/shm/")]


@pytest.mark.parametrize("layout", part(LAYOUTS, 2))
def test_a_killed_rank_costs_steps_alone(tmp_path: Path, whole: Whole, layout: str) -> None:
    whole(tmp_path, "whole", layout, save_every=50)
    faults = [
        {"kind": "kill", "rank": 1, "phase": "forward", "step": 8},
        {"kind": "kill", "rank": 0, "phase": "step", "step": 12, "attempts": 2},
    ]
    notes: list[str] = []
    summary = job(tmp_path, "cut", layout, faults, notes, max_restarts=1, **COPIED)
    assert summary.restarts == 2  # not in a row: a copy lies between
    first, second = resumed(notes)
    assert first in ("step-000004", "step-000006")
    assert second in ("step-000008", "step-000010")
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
    assert not RunFolder(tmp_path / "cut").state_copies.exists()


def test_the_newer_of_copy_and_checkpoint_is_taken(tmp_path: Path, whole: Whole) -> None:
    whole(tmp_path, "whole", "dp2")
    fault = {"kind": "kill", "rank": 1, "phase": "step", "step": 10}
    notes: list[str] = []
    job(tmp_path, "cut", "dp2", [fault], notes, replicate_state=3, save_every=4)
    assert resumed(notes) == []  # step 8 is saved, 6 was copied
    assert any("resumed from" in note and "step-000008" in note for note in notes)
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")


def test_replicas_that_differed_do_not_continue_from_their_copies(
    tmp_path: Path, whole: Whole
) -> None:
    options = {"replica_check_every": 1, "save_every": 4}
    whole(tmp_path, "whole", "dp2:zero=1", **options)
    fault = {"kind": "flip", "rank": 1, "phase": "step", "step": 7}
    notes: list[str] = []
    summary = job(
        tmp_path, "cut", "dp2:zero=1", [fault], notes, on_divergence="repair", replicate_state=1,
        **options,
    )  # fmt: skip
    assert summary.restarts == 1
    assert resumed(notes) == []
    assert weights(tmp_path, "cut") == weights(tmp_path, "whole")


def test_memory_that_is_too_small_is_reported(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOCKET_STATE_COPIES", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="which is not a folder that can be written to"):
        job(tmp_path, "run", "dp2", **COPIED)
