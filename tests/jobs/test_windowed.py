"""Runs on a window of tokens: as one process, through kills and other data ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.request import request
from hocket.jobs.train import train_model
from hocket.spec.errors import CheckpointError, RankFailure
from hocket.spec.run import RunFolder
from hocket.training.dataset import BatchOrder, open_dataset
from hocket.training.token_manifest import TRAIN, Tokens
from hocket.training.windowed import windows_made
from tests.ranks import ROOT, RankPool
from tests.support.runs import losses

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

STEPS, BATCH, SEQ_LEN = 24, 4, 16
SIZE = 4 * (2 * BATCH * SEQ_LEN + 1) * 2
"""Bytes of four windows of two steps: the run's 24 steps take three times as many."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = [json.dumps({"text": f"{number:05d} " * (number % 5 + 1)}) for number in range(200)]
    path.write_text("\n".join(rows) + "\n")
    return path


class Disk:
    """The listener of a run: the most bytes of its windows, measured at each event."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.most, self.restarts, self.steps = folder, 0, 0, 0

    def __call__(self, event: dict[str, Any]) -> None:
        size = 0
        for path in self.folder.data.glob("*window-*"):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        self.most = max(self.most, size)
        self.steps += event["event"] == "step"
        self.restarts += event["event"] == "restart"


def train(
    ranks: RankPool, text: Path, name: str, layout: str, *faults: dict[str, Any], **options: Any
) -> Disk:
    values = {
        "model": "tiny-llama", "data": str(text), "run": str(text.parent / name), "layout": layout,
        "seq_len": SEQ_LEN, "global_batch": BATCH, "steps": STEPS, "streaming": True,
        "token_window": f"{SIZE}B", "tokenizer": "bytes", "save_every": 4, "eval_every": 0,
        "cluster": "none", "device": "cpu", "lr_schedule": "constant", "lr": 1e-3, "warmup": 2,
        "keep_checkpoints": 2, **options,
    }  # fmt: skip
    disk = Disk(RunFolder(text.parent / name))
    train_model(request(values), on_event=disk, faults=faults, launcher=ranks.launcher)
    return disk


def kill(step: int, rank: int = 0) -> dict[str, Any]:
    return {"kind": "kill", "rank": rank, "phase": "step", "step": step}


def places(folder: RunFolder, data_ranks: int, steps: range) -> list[int]:
    """Where in the stream the samples begin that the data ranks take in some steps."""
    tokens = Tokens.load(folder.data)
    data, found = open_dataset(folder.data, TRAIN, tokens, SEQ_LEN, 0), []
    for step in steps:
        for rank in range(data_ranks):
            indices = BatchOrder(BATCH, data_ranks).rank_indices(step, rank)
            first = indices // tokens.window * tokens.window * SEQ_LEN
            found += (first + data.starts(indices)).tolist()
    return found


def test_kills_and_other_data_ranks_change_nothing(ranks: RankPool, text: Path) -> None:
    """Two data ranks, then four, then one, each killed; a restart in between goes back by more
    windows than are on disk."""
    whole = train(ranks, text, "whole", "dp1")
    assert 0 < whole.most <= SIZE
    disks = []
    with pytest.raises(RankFailure):
        train(ranks, text, "run", "dp2", kill(7, 1), max_restarts=0)
    assert RunFolder(text.parent / "run").checkpoints.is_dir()
    disks.append(
        train(
            ranks,
            text,
            "run",
            "dp4",
            kill(13, 3),
            resume=True,
            steps=16,
            save_every=16,
            max_restarts=1,
        )
    )
    disks.append(train(ranks, text, "run", "dp1", resume=True, save_every=16))
    assert disks[0].restarts == 1
    assert all(0 < disk.most <= SIZE for disk in disks)
    found, wanted = losses(text.parent, "run"), losses(text.parent, "whole")
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=2e-5)
    folder = RunFolder(text.parent / "run")
    taken = [
        *places(folder, 2, range(4)), *places(folder, 4, range(4, 16)),
        *places(folder, 1, range(16, STEPS)),
    ]  # fmt: skip
    assert sorted(taken) == [sample * SEQ_LEN for sample in range(STEPS * BATCH)]
    spec = folder.load()
    with windows_made(folder, spec):
        data = open_dataset(folder.data, TRAIN, Tokens.load(folder.data), SEQ_LEN, 0)
        assert len(data.batch(BatchOrder(BATCH).step_indices(STEPS - 1)).ids) == BATCH


def test_torchrun_makes_windows_too(ranks: RankPool, text: Path) -> None:
    train(ranks, text, "whole", "dp1", steps=8)
    foreign = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in foreign and "SLURM" not in k}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "--", "hocket", "train", "tiny-llama"),
            *("--data", str(text), "--run", "run", "--layout", "dp2", "--seq-len", str(SEQ_LEN)),
            *("--global-batch", str(BATCH), "--steps", "8", "--streaming", "--token-window"),
            *(f"{SIZE}B", "--tokenizer", "bytes", "--save-every", "4", "--eval-every", "0"),
            *("--cluster", "none", "--device", "cpu", "--lr-schedule", "constant", "--lr", "1e-3"),
            *("--warmup", "2"),
        ],
        cwd=text.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, wanted = losses(text.parent, "run"), losses(text.parent, "whole")
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=2e-5)
    assert not list(RunFolder(text.parent / "run").data.glob(".w*"))


def test_the_window_of_a_run_stays_what_it_is(ranks: RankPool, text: Path) -> None:
    train(ranks, text, "run", "dp1", steps=4)
    with pytest.raises(CheckpointError, match=r"token_window is .* and this would change"):
        train(ranks, text, "run", "dp1", steps=8, token_window="1MB")
    more = train(ranks, text, "run", "dp1", steps=8)  # the stream goes on
    assert more.steps == 4
