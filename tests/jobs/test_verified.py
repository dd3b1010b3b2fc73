"""A rank that computes wrongly, and one that is slow, are named in a run; a healthy run is none the
worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.spec.errors import OptionError, RankFailure, ReplicaError
from tests.rotation import part
from tests.support.runs import Whole, job, weights

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]


WRONG = [
    ("dp3", 1, "rank 1 computes"),
    ("dp2", 1, "one of ranks [0, 1] computes"),
    ("dp3:zero=1", 2, "rank 2 computes"),
    ("dp2:zero=3", 0, "one of ranks [0, 1] computes"),
    ("dp2.pp2:microbatches=2", 3, "computes"),
    ("dp2.tp2", 1, "computes"),
]


@pytest.mark.parametrize(("layout", "rank", "who"), part(WRONG, 2))
def test_a_rank_that_computes_wrongly_is_found(
    tmp_path: Path, whole: Whole, layout: str, rank: int, who: str
) -> None:
    options = {"global_batch": 12, "verify_every": 2, "steps": 6, "max_restarts": 0}
    whole(tmp_path, "plain", layout, global_batch=12, steps=6)
    whole(tmp_path, "whole", layout, **options)
    assert weights(tmp_path, "whole") == weights(tmp_path, "plain")
    fault = {"kind": "wrong", "rank": rank, "phase": "step", "step": 3}
    with pytest.raises((ReplicaError, RankFailure)) as caught:
        job(tmp_path, "wrong", layout, [fault], **options)
    assert "step 4 computed twice has two results: " in str(caught.value)
    assert who in str(caught.value)


def test_what_has_no_second_process_is_rejected(tmp_path: Path) -> None:
    with pytest.raises((OptionError, RankFailure), match="verify_every: the layout tp2"):
        job(tmp_path, "run", "tp2", verify_every=2)


@pytest.mark.parametrize(("phase", "cause"), [("forward", "its compute"), ("input", "its input")])
def test_a_slow_rank_is_named_with_its_cause(tmp_path: Path, phase: str, cause: str) -> None:
    fault = {"kind": "slow", "rank": 1, "phase": phase, "step": 40, "seconds": 0.08}
    notes: list[str] = []
    job(tmp_path, "run", "dp2", [fault], notes, steps=201, save_every=0, eval_every=0)
    found = [note for note in notes if "is slow" in note]
    assert found, notes
    assert all(f"rank 1 is slow: {cause}" in note for note in found)
