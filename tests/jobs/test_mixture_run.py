"""A run on a mixture is the same run on other data ranks, and after a resume on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.dry_run import dry_run, dry_run_text
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import request
from hocket.jobs.train import train_model
from hocket.spec.checkpoint import read_manifest, resumable_checkpoints
from hocket.spec.errors import CheckpointError, RunFolderError
from hocket.spec.run import RunFolder
from tests.support.runs import losses

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]


def values(folder: Path, name: str, layout: str, **more: Any) -> dict[str, Any]:
    texts = {"a": "a hocket is one melody\n" * 90, "b": "for several voices, in turns\n" * 40}
    for letter, words in texts.items():
        if not (folder / f"{letter}.txt").exists():
            (folder / f"{letter}.txt").write_text(words)
    return {
        "model": "tiny-llama", "data": [f"{folder}/a.txt:0.7", f"{folder}/b.txt:0.3"],
        "run": str(folder / name), "layout": layout, "seq_len": 16, "global_batch": 4, "steps": 6,
        "save_every": 3, "eval_every": 0, "cluster": "none", "device": "cpu", "warmup": 2, **more,
    }  # fmt: skip


def test_it_is_the_same_run_on_other_data_ranks(tmp_path: Path) -> None:
    notes: list[str] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "note":
            notes.append(event["text"])

    train_model(request(values(tmp_path, "one", "dp1")), on_event=hear)
    train_model(request(values(tmp_path, "other", "dp2", steps=3)))
    train_model(request(values(tmp_path, "other", "dp4", steps=6, resume=True)))
    one, other = losses(tmp_path, "one"), losses(tmp_path, "other")
    assert [step for step, _ in other] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in other] == pytest.approx([loss for _, loss in one], rel=1e-4)
    newest = next(resumable_checkpoints(tmp_path / "other" / "checkpoints"))
    cursor = read_manifest(newest).cursor
    taken = cursor["sources"]
    assert sum(taken.values()) == cursor["samples"] == 24
    assert set(taken) == {f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"}
    assert any("a.txt: 70.00% of the samples, " in note for note in notes)
    again = values(tmp_path, "other", "dp4")  # the same command, for a run that is finished
    train_model(request(again))
    again["data"] = [f"{tmp_path}/a.txt:0.6", f"{tmp_path}/b.txt:0.4"]
    with pytest.raises((RunFolderError, CheckpointError), match="already holds a run of the data"):
        train_model(request(again))


@pytest.mark.usefixtures("warm_workers")
def test_a_dry_run_shows_what_is_drawn(tmp_path: Path) -> None:
    asked = request(values(tmp_path, "run", "dp2"))
    found = dry_run(asked, JobRecorder())
    assert "b.txt: 30.00% of the samples, " in dry_run_text(found)
    assert not RunFolder(tmp_path / "run").spec_file.exists()
