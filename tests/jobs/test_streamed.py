"""A data set larger than the disk is streamed, and continues exactly on other data ranks."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.catalogue import models
from hocket.jobs.request import request
from hocket.jobs.train import train_model
from hocket.spec.errors import CheckpointError, DataError, RankFailure
from hocket.spec.run import RunFolder
from hocket.training.data import stream_quotas
from hocket.training.dataset import BatchOrder, open_dataset
from hocket.training.token_files import write_tokens
from hocket.training.token_manifest import TRAIN, Tokens
from hocket.training.tokenizer import resolve_tokenizer
from tests.hub_server import Repo
from tests.support.runs import losses

pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]

DISK = 12_000_000
STEPS, SAMPLES, SEQ_LEN = 24, 8, 32
CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip
FILES, ROWS, REPEATS = 4, 25_000, 20
"""Of the data set: each document repeats its number, which no other has."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "hocket-test", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def text_of(row: int) -> str:
    return f"{row:06d} " * REPEATS


def dataset() -> Repo:
    """Larger than the disk; as tokens, each a byte of the text, more than twice so."""
    files = {
        f"part-{number}.jsonl": "\n".join(
            json.dumps({"text": text_of(row)}) for row in range(number * ROWS, (number + 1) * ROWS)
        ).encode()
        for number in range(FILES)
    }
    assert sum(map(len, files.values())) > 1.2 * DISK
    return Repo("org/large", files, kind="dataset")


def train(run: Path, layout: str, dies: int = 0, **options: Any) -> RunFolder:
    """A run of 24 steps; `dies`: the step in which a rank does."""
    values = {
        "model": str(run.parent / "model"), "data": "org/large", "run": str(run), "layout": layout,
        "seq_len": SEQ_LEN, "global_batch": SAMPLES, "steps": STEPS, "streaming": True,
        "tokenizer": "bytes", "save_every": 4, "eval_every": 0, "cluster": "none", "device": "cpu",
        "lr_schedule": "constant", "lr": 1e-3, "warmup": 2, "max_restarts": 0, **options,
    }  # fmt: skip
    fault = {"kind": "kill", "rank": 0, "phase": "step", "step": dies}
    with pytest.raises(RankFailure) if dies else contextlib.nullcontext():
        train_model(request(values), faults=[fault] if dies else [])
    return RunFolder(run)


def samples(folder: RunFolder, data_ranks: int, steps: range) -> list[tuple[int, bytes]]:
    """Place and text of every sample that the data ranks take in some steps."""
    tokens = Tokens.load(folder.data)
    data, found = open_dataset(folder.data, TRAIN, tokens, SEQ_LEN, 0), []
    for step in steps:
        for rank in range(data_ranks):
            indices = BatchOrder(SAMPLES, data_ranks).rank_indices(step, rank)
            ids = data.batch(indices).ids
            texts = [bytes(min(255, token) for token in row) for row in ids.tolist()]
            found += zip(data.starts(indices).tolist(), texts, strict=True)
    return found


def test_a_source_larger_than_the_disk(
    loopback: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two data ranks, then four, then one: each dies, and the next continues from a checkpoint."""
    monkeypatch.setenv("HF_HOME", str(disk / "hf"))
    (disk / "model").mkdir()
    config = {**models.config("tiny-llama"), **CONFIG}
    (disk / "model" / "config.json").write_text(json.dumps(config))
    with loopback(dataset()) as server:
        folder = train(disk / "run", "dp2", 10)
        assert not any("part-3" in path for _, path, _ in server.requests)  # so far it never came
        train(disk / "run", "dp4", 19, resume=True)
        train(disk / "run", "dp1", resume=True)
        train(disk / "whole", "dp1")
    tokens = Tokens.load(folder.data)
    assert tokens.partial
    found, wanted = losses(disk, "run"), losses(disk, "whole")
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=2e-5)
    # Steps 9 and 17 are taken again from the checkpoints of 8 and 16 steps.
    taken = [
        *samples(folder, 2, range(8)), *samples(folder, 4, range(8, 16)),
        *samples(folder, 1, range(16, STEPS)),
    ]  # fmt: skip
    assert sorted(taken) == sorted(samples(folder, 1, range(STEPS)))
    assert max(Counter(place for place, _ in taken).values()) == 1
    assert len(taken) == STEPS * SAMPLES
    whole = b"\xff".join(text_of(row).encode() for row in range(tokens.train_documents + 20))
    assert all(text[:8] in whole for _, text in taken)
    with pytest.raises(CheckpointError, match="has streamed its data for"):
        train(disk / "run", "dp1", resume=True, steps=1000)


def test_tokens_that_do_not_fit_are_rejected(
    loopback: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(disk / "hf"))
    (disk / "model").mkdir()
    (disk / "model" / "config.json").write_text(
        json.dumps({**models.config("tiny-llama"), **CONFIG})
    )
    with loopback(dataset()), pytest.raises(DataError, match=r"the disk of .* has .* free"):
        train(disk / "run", "dp1", steps=40_000)


@pytest.mark.parametrize("shares", [[1.0], [3, 1], [1, 2, 3]])
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3])
def test_quotas_leave_what_the_run_takes(shares: list[float], fraction: float) -> None:
    quotas = stream_quotas(1000, SEQ_LEN, shares, fraction)
    for quota, share in zip(quotas, shares, strict=True):
        wanted = 1000 * share / sum(shares)
        assert (quota * (1 - 1.5 * fraction) - 1) / SEQ_LEN >= wanted
    assert sum(quotas) < 1000 * SEQ_LEN / (1 - 1.5 * fraction) * 1.1
    assert stream_quotas(1000, SEQ_LEN, shares, 0.6) == []  # most is held out: all is read


@pytest.mark.parametrize("quotas", [(50, 50), (400, 50), (50, 400), (9999, 1)])
def test_a_source_that_ends_early_is_made_up_by_the_other(
    tmp_path: Path, quotas: tuple[int, int]
) -> None:
    sources = [[text_of(row)[:19] for row in range(first, first + 10)] for first in (0, 100)]
    tokenizer = resolve_tokenizer("bytes")
    lengths, _ = write_tokens(tmp_path / "t", sources, tokenizer, np.dtype("uint16"), quotas=quotas)
    each = int(lengths[0])
    assert min(20 * each, sum(quotas)) <= int(lengths.sum()) < sum(quotas) + 2 * each
    everything, _ = write_tokens(tmp_path / "all", sources, tokenizer, np.dtype("uint16"))
    assert len(everything) == 20
