"""What is written in the background is what a blocking save writes, or nothing that is read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hocket.spec import checkpoint as words

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]

import torch.distributed as dist  # noqa: E402

from hocket.runtime.background_save import BackgroundSaver  # noqa: E402
from hocket.runtime.rank_state import RankState  # noqa: E402
from hocket.runtime.save_job import SaveJob  # noqa: E402
from tests.checkpoint.test_checkpoint import MODEL, Held, load, save  # noqa: E402


def job(folder: Path, step: int, **more) -> SaveJob:
    return SaveJob(folder=folder, step=step, layout="tp2", model=MODEL, **more)


def saver(**more) -> BackgroundSaver:
    return BackgroundSaver(0, 1, dist.HashStore(), torch.device("cpu"), **more)


def begin() -> None:
    """Nothing happens first."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_are_those_of_a_blocking_save(tmp_path: Path, dtype: torch.dtype) -> None:
    held, one = Held(3, dtype), saver()
    save(tmp_path / "blocking", held, 3, cursor={})
    one.save(job(tmp_path / "later", 3), RankState(held, held.state), begin)
    one.wait()
    (result,) = one.finished()
    assert (result.step, result.reason) == (3, None)
    files = ["manifest.json", "rank-00000.safetensors"]
    assert sorted(path.name for path in result.path.iterdir()) == files
    for name in files:
        blocking = tmp_path / "blocking" / "step-000003" / name
        assert (result.path / name).read_bytes() == blocking.read_bytes()


def test_steps_taken_meanwhile_are_not_in_the_file(tmp_path: Path) -> None:
    held, gate = Held(1), threading.Event()
    before = {name: tensor.clone() for name, tensor in held.tensors.items()}
    one = saver(progress=lambda: gate.wait(60))
    one.save(job(tmp_path, 1), RankState(held, held.state), begin)
    for tensor in held.tensors.values():
        tensor.add_(1)
    assert one.busy
    assert list(one.finished()) == []
    assert words.checkpoints(tmp_path) == []
    gate.set()
    one.save(job(tmp_path, 2), RankState(held, held.state), begin)  # waits for the first
    one.wait()
    assert [result.step for result in one.finished()] == [1, 2]
    words.verify_checkpoint(tmp_path / "step-000002")
    (tmp_path / "latest").write_text("step-000001\n")
    other = Held(9)
    load(tmp_path, other)
    for name, tensor in before.items():
        assert torch.equal(other.tensors[name], tensor)


def test_host_memory_is_kept_between_saves(tmp_path: Path) -> None:
    held, one = Held(1), saver()
    one.copy.reserve(RankState(held, held.state))
    where = one.copy._flat.data_ptr()
    for step in (1, 2, 3):
        one.save(job(tmp_path, step), RankState(held, held.state), begin)
    one.wait()
    assert one.copy._flat.data_ptr() == where
    assert one.copy.num_bytes >= RankState(held, held.state).num_bytes
    assert [path.name[-1] for path in words.checkpoints(tmp_path)] == ["3", "2"]


@pytest.mark.parametrize("where", ["begin", "make", "write", "complete"])
def test_a_disk_that_refuses_costs_this_save_alone(tmp_path: Path, where: str, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    held, one = Held(1), saver()
    save(tmp_path, held, 1)
    if where != "begin":
        monkeypatch.setattr(SaveJob, where, refuse)
    one.save(job(tmp_path, 2), RankState(held, held.state), refuse if where == "begin" else begin)
    one.wait()
    monkeypatch.undo()
    (result,) = one.finished()
    assert "No space left on device" in str(result.reason)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    one.save(job(tmp_path, 3), RankState(held, held.state), begin)
    one.wait()
    assert [result.reason for result in one.finished()] == [None]


def test_what_is_not_the_disk_is_raised(tmp_path: Path) -> None:
    def bug() -> None:
        raise RuntimeError("injected")

    held, one = Held(1), saver(progress=bug)
    one.save(job(tmp_path, 1), RankState(held, held.state), begin)
    one.wait()
    with pytest.raises(RuntimeError, match="injected"):
        list(one.finished())
    assert words.checkpoints(tmp_path) == []


def test_ranks_vote_before_a_checkpoint_has_its_name(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    held = [Held(1), Held(2)]
    gate = threading.Event()
    pair = [
        BackgroundSaver(
            rank, 2, dist.PrefixStore("a", store).clone(), torch.device("cpu"),
            progress=(lambda: gate.wait(60)) if rank else (lambda: None),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for one, its in zip(pair, held, strict=True):
        one.save(job(tmp_path, 1), RankState(its, its.state), begin)
    pair[0].wait(0.3)
    assert pair[0].busy
    assert words.checkpoints(tmp_path) == []
    gate.set()
    for one in pair:
        one.wait()
    assert len(words.verify_checkpoint(tmp_path / "step-000001").shards) == 2
    assert [r.reason for r in pair[0].finished()] == [None]
    assert list(pair[1].finished()) == []

    def full() -> None:
        raise OSError(28, "No space left on device")

    for one, its, first in zip(pair, held, (begin, full), strict=True):
        one.save(job(tmp_path, 2), RankState(its, its.state), first)
    for one in pair:
        one.wait()
    (result,) = pair[0].finished()
    assert "No space left" in str(result.reason)
    assert [path.name for path in words.checkpoints(tmp_path)] == ["step-000001"]


def test_a_writer_without_its_peers_can_be_closed(tmp_path: Path) -> None:
    held = Held(1)
    one = BackgroundSaver(0, 2, dist.HashStore(), torch.device("cpu"))
    one.save(job(tmp_path, 1), RankState(held, held.state), begin)
    one.wait(0.2)
    assert one.busy
    one.close()
    assert not one.busy
    assert words.checkpoints(tmp_path) == []
