"""Copies in memory: what is read back is what was written, from this host or from the next."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hocket.spec import checkpoint as words

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]

import torch.distributed as dist  # noqa: E402

from hocket.runtime import peer_files  # noqa: E402
from hocket.runtime.background_save import BackgroundSaver  # noqa: E402
from hocket.runtime.checkpoint import CheckpointWorld  # noqa: E402
from hocket.runtime.rank_state import RankState  # noqa: E402
from hocket.runtime.state_copies import NAMES, CopyJob, StateCopies, complete_steps, holder  # noqa: E402
from tests.checkpoint.test_checkpoint import MODEL, Held, load  # noqa: E402

RUN: dict[str, Any] = {"layout": "tp2", "model": MODEL}


def together(*calls: Any) -> list[Any]:
    """Call all of them at once, each in a thread, as ranks do."""
    found: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


class Hosts:
    """Two ranks, each on a host of its own: a folder in memory for each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt = folder, 0
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(self) -> list[StateCopies]:
        self.attempt += 1
        return together(*(lambda rank=rank: self._one(rank) for rank in (0, 1)))

    def _one(self, rank: int) -> StateCopies:
        store = dist.PrefixStore(str(self.attempt), self.store).clone()
        return StateCopies(
            self.folder / f"host-{rank}" / "run", self.folder / "checkpoints", rank=rank, size=2,
            local_rank=0, store=store, towards="127.0.0.1",
        )  # fmt: skip

    def copy(self, copies: list[StateCopies], held: list[Held], step: int, **more: Any) -> list:
        savers = [
            BackgroundSaver(
                one.rank, 2, dist.PrefixStore(f"s{step}", one.store).clone(), torch.device("cpu")
            )
            for one in copies
        ]
        for saver, one, its in zip(savers, copies, held, strict=True):
            job = CopyJob(copies=one, step=step, cursor={"at": step}, **RUN, **more)
            saver.save(job, RankState(its, its.state), lambda: None)
        for saver in savers:
            saver.wait(60)
        return list(savers[0].finished())

    def restore(
        self, copies: list[StateCopies], held: list[Held], newest: int = 0, **of: Any
    ) -> list:
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        if newest:
            words.step_folder(self.folder / "checkpoints", newest).mkdir(parents=True)
        votes = threading.Barrier(2)
        said: list[bool] = [True, True]

        def agree(rank: int, mine: bool) -> bool:
            said[rank] = mine
            votes.wait(60)
            agreed = all(said)
            votes.wait(60)
            return agreed

        return together(
            *(
                lambda one=one, its=its: one.restore(
                    its, optimizer_state=its.state,
                    all_agree=lambda mine: agree(one.rank, mine), **{**RUN, **of},
                )
                for one, its in zip(copies, held, strict=True)
            )
        )  # fmt: skip


def same(one: Held, other: Held) -> bool:
    mine = [*one.tensors.values(), *(t for s in one.state.values() for t in s.values())]
    theirs = [*other.tensors.values(), *(t for s in other.state.values() for t in s.values())]
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_lost_host_gets_its_state_from_the_next(tmp_path: Path) -> None:
    hosts, held = Hosts(tmp_path), [Held(1), Held(2)]
    copies = hosts.start()
    assert [one.held for one in copies] == [[1], [0]]
    for step in (4, 6):
        assert [r.reason for r in hosts.copy(copies, held, step)] == [None]
    shutil.rmtree(tmp_path / "host-1")
    others = [Held(8), Held(9)]
    found = hosts.restore(hosts.start(), others)
    assert [(r.step, r.cursor) for r in found] == [(6, {"at": 6})] * 2
    assert same(others[0], held[0])
    assert same(others[1], held[1])


def test_a_damaged_copy_is_passed_over_by_all(tmp_path: Path) -> None:
    hosts, held = Hosts(tmp_path), [Held(1), Held(2)]
    copies = hosts.start()
    hosts.copy(copies, held, 4)
    before = [{n: t.clone() for n, t in its.tensors.items()} for its in held]
    for its in held:
        for tensor in its.tensors.values():
            tensor.add_(1)
    hosts.copy(copies, held, 6)
    file = tmp_path / "host-1" / "run" / "step-000006" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    others = [Held(8), Held(9)]
    found = hosts.restore(hosts.start(), others)
    assert [r.step for r in found] == [4, 4]
    assert "is damaged" in found[1].notes[0]
    for its, values in zip(others, before, strict=True):
        assert all(torch.equal(its.tensors[name], value) for name, value in values.items())


def test_what_is_older_than_a_checkpoint_or_of_another_run_is_not_read(tmp_path: Path) -> None:
    hosts, held = Hosts(tmp_path), [Held(1), Held(2)]
    hosts.copy(hosts.start(), held, 6, newest=4)
    assert hosts.restore(hosts.start(), held, newest=6) == [None, None]
    assert hosts.restore(hosts.start(), held, newest=2) == [None, None]  # step 4 was taken back
    assert [r.step for r in hosts.restore(hosts.start(), held, newest=4)] == [6, 6]
    (tmp_path / "host-0" / "run" / "step-000006" / "rank-00000.json").unlink()
    (tmp_path / "host-1" / "run" / "step-000006" / "rank-00000.json").unlink()
    assert hosts.restore(hosts.start(), held, newest=4) == [None, None]


def test_a_copy_of_another_layout_becomes_a_checkpoint(tmp_path: Path) -> None:
    hosts, held = Hosts(tmp_path), [Held(1), Held(2)]
    hosts.copy(hosts.start(), held, 6)
    shutil.rmtree(tmp_path / "host-1")
    assert hosts.restore(hosts.start(), [Held(8), Held(9)], layout="dp2") == [None, None]
    saved = tmp_path / "checkpoints" / "step-000006"
    manifest = words.verify_checkpoint(saved)
    assert (manifest.layout, manifest.model, manifest.cursor) == ("tp2", MODEL, {"at": 6})
    assert len(manifest.shards) == 2
    one = Held(9)
    assert load(tmp_path / "checkpoints", one, world=CheckpointWorld(rank=0, size=2)).step == 6
    assert all(torch.equal(one.tensors[n], t) for n, t in held[0].tensors.items())


def test_memory_holds_two_copies_at_most(tmp_path: Path) -> None:
    hosts, held = Hosts(tmp_path), [Held(1), Held(2)]
    copies = hosts.start()
    for step in (1, 2, 3, 4):
        hosts.copy(copies, held, step)
    for rank in (0, 1):
        folder = tmp_path / f"host-{rank}" / "run"
        assert [path.name for path in words.checkpoints(folder)] == ["step-000004", "step-000003"]
        assert folder.stat().st_mode & 0o077 == 0
    copies[0].clear()
    assert words.checkpoints(tmp_path / "host-0" / "run") == []


def test_room_is_compared_with_what_all_ranks_of_a_host_need(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    found = together(*(lambda one=one: one.room(1 << 60) for one in hosts.start()))
    assert found[0] == found[1]
    assert "would take" in found[0]
    assert together(*(lambda one=one: one.room(10) for one in hosts.start())) == ["", ""]


def test_the_holder_is_on_the_next_host() -> None:
    table = [[0], [0], [2], [2], [4]]
    assert [holder(rank, table) for rank in range(5)] == [2, 3, 4, 4, 0]


def test_a_step_counts_once_every_state_is_somewhere() -> None:
    rows = [
        [(2, "tp2", 2, 0), (2, "tp2", 2, 1), (4, "tp2", 2, 0)],
        [],
        [(2, "tp2", 2, 0), (4, "tp2", 2, 1), (6, "tp2", 2, 1), (8, "dp1", 1, 0)],
    ]
    assert complete_steps(rows) == [(8, "dp1", [2]), (4, "tp2", [0, 2]), (2, "tp2", [0, 0])]


def test_a_server_gives_what_is_named_to_those_who_know_the_token(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "rank-00000.json").write_text("{}")
    (tmp_path / "secret").write_text("x")
    server = peer_files.PeerServer(folder.parent, NAMES, "127.0.0.1", "token")
    target = tmp_path / "got"
    peer_files.fetch_peer_file(server.address, "token", "step-000001/rank-00000.json", target)
    assert target.read_text() == "{}"
    for token, name in (
        ("other", "step-000001/rank-00000.json"), ("token", "../secret"),
        ("token", "step-000001/rank-00001.json"),
    ):  # fmt: skip
        with pytest.raises(OSError, match="does not have"):
            peer_files.fetch_peer_file(server.address, token, name, tmp_path / "none")
        assert not (tmp_path / "none").exists()
    server.close()
    with pytest.raises(OSError, match="refused"):
        peer_files.fetch_peer_file(server.address, "token", "step-000001/rank-00000.json", target)
