"""State copies: ranks' states in the memory of their host and of the next, newer than checkpoints.

    /dev/shm/hocket-UID/RUN/step-000120/rank-00003.safetensors    what rank 3 holds after step 120
                                        rank-00003.json           its records, written last

    rank 3's writer              writes its file on its own host ......... all ranks have
    its holder's, on host + 1    ......................................... reads it over the network

Files in memory outlive every process that wrote them, so that ranks that are started again find
them, and of a host that is lost the next one has all. As in GEMINI (Wang et al. 2023, "GEMINI: Fast
Failure Recovery in Distributed Training with In-Memory Checkpoints", section 4: own memory and a
peer's), with one peer. The ranks of one host have their own copies alone: a host that is lost takes
all of them, and a rank that dies takes none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.runtime.checkpoint import Restored, fill_from_shard
from hocket.runtime.peer_files import PeerServer, fetch_peer_file, own_address
from hocket.runtime.rank_state import CheckpointedParallel, OptimizerState, RankState
from hocket.runtime.save_job import SaveJob
from hocket.spec import checkpoint as words
from hocket.spec.checkpoint import Shard
from hocket.spec.errors import CheckpointError
from hocket.spec.files import MALFORMED, json_crc32, parse_json, write_text

NAMES = re.compile(r"step-[0-9]{6,}/rank-[0-9]{5,}\.(safetensors|json)")
LATEST = "copies/latest"
"""Key of the store: the newest step whose copies are complete."""
KEPT = 2
"""Copies of each state that memory has to hold: one is complete while the next is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyJob:
    """One copy of all ranks' states, for `runtime.background_save`.

    Attributes:
        copies: this rank's.
        step: optimizer steps done.
        layout, model, cursor: as of a checkpoint.
        newest: step of the newest checkpoint by now. A run that is set back to an older one does
            not continue from this copy.
    """

    copies: StateCopies
    step: int
    layout: str
    model: str
    cursor: Mapping[str, Any]
    newest: int = 0
    kind = "copied"

    @property
    def final(self) -> Path:
        return words.step_folder(self.copies.folder, self.step)

    def make(self) -> None:
        """Nothing: each rank makes its host's folder."""

    def phases(
        self, rank: int, state: RankState, buffers: Iterator[Any]
    ) -> list[Callable[[], None]]:
        """What each rank does in turn, each once all ranks have done the one before."""
        copies = self.copies
        write = [lambda: copies.write(self, state, buffers)]
        return [*write, lambda: copies.hold(self.step)] if copies.server else write

    def complete(self, size: int) -> None:
        """Announce it: older ones may go."""
        self.copies.store.set(LATEST, str(self.step))

    def discard(self) -> None:
        """What was written goes with the next copy."""

    def reason(self, error: OSError | CheckpointError) -> str:
        """Why it could not be written, in words."""
        if isinstance(error, CheckpointError):
            return error.message
        return f"{error.filename or self.copies.folder}: {error.strerror or error}"


class StateCopies:
    """The copies that one rank writes, and holds of ranks of another host.

    Args:
        folder: of the run in this host's memory. checkpoints: of the run.
        rank, size: of the ranks that copy together.
        local_rank: this rank among those of its host, which are numbered in a row.
        store: a key-value store that they share, with a connection of its own.
        towards: a host that others reach this one by the way to; empty: all ranks share a host.

    Attributes:
        held: ranks of another host whose states this one holds.
        server: where other hosts read them; None: all ranks share a host.
    """

    def __init__(
        self, folder: Path, checkpoints: Path, *,
        rank: int, size: int, local_rank: int, store: Any, towards: str,
    ) -> None:  # fmt: skip
        self._checkpoints = checkpoints
        self.folder, self.rank, self.size, self.store = folder, rank, size, store
        self._first = rank - local_rank
        _private(folder)
        self.server: PeerServer | None = None
        self.held: list[int] = []
        if towards:
            self._meet(towards)

    def _meet(self, towards: str) -> None:
        """Exchange addresses with all ranks."""
        if self.rank == 0:
            self.store.set("copies/token", secrets.token_hex(16))
        self._token = self.store.get("copies/token").decode()
        self.server = PeerServer(self.folder, NAMES, own_address(towards), self._token)
        rows = self._gathered("peers", [self._first, *self.server.address])
        table = self._published("peers", rows)
        self._addresses = [(str(host), int(port)) for _, host, port in table]
        self.held = [rank for rank in range(self.size) if holder(rank, table) == self.rank]

    def _gathered(self, name: str, value: Any) -> list[Any] | None:
        """Every rank's `value` on rank 0."""
        if self.rank:
            self.store.set(f"copies/{name}/{self.rank}", json.dumps(value))
            return None
        others = range(1, self.size)
        return [value, *(json.loads(self.store.get(f"copies/{name}/{r}")) for r in others)]

    def _published(self, name: str, value: Any) -> Any:
        """Rank 0's `value` on all ranks."""
        if self.rank == 0:
            self.store.set(f"copies/{name}/all", json.dumps(value))
        return json.loads(self.store.get(f"copies/{name}/all"))

    # --- writing -------------------------------------------------------------------------------

    def room(self, num_bytes: int) -> str:
        """Why the copies of all ranks do not fit their hosts' memory; empty: they do. Every rank
        calls it.

        Args:
            num_bytes: of this rank's state.
        """
        free = shutil.disk_usage(self.folder).free
        rows = self._gathered("room", [self._first, num_bytes, len(self.held), free, os.uname()[1]])
        short = ""
        for first in {row[0] for row in rows or ()}:
            on_host = [row for row in rows or () if row[0] == first]
            largest = max(row[1] for row in on_host)
            need = KEPT * sum(row[1] + row[2] * largest for row in on_host)
            if need > on_host[0][3]:
                short = f"{self.folder.parent} on {on_host[0][4]} would take {need:,} bytes of "
                short += f"{on_host[0][3]:,} free ones"
        return str(self._published("room", short))

    def write(self, job: CopyJob, state: RankState, buffers: Iterator[Any]) -> None:
        """Write this rank's file, then its records; copies older than the complete one go."""
        if self.rank == self._first and self.store.check([LATEST]):
            done = words.step_folder(self.folder, int(self.store.get(LATEST)))
            found = words.checkpoints(self.folder)
            for path in found[found.index(done) + 1 :] if done in found else ():
                shutil.rmtree(path, ignore_errors=True)
        job.final.mkdir(exist_ok=True)
        shard = state.write(job.final, self.rank, buffers, read_back=False)
        body = {
            "step": job.step, "layout": job.layout, "model": job.model, "size": self.size,
            "cursor": dict(job.cursor), "newest": job.newest, "shard": shard.to_json(),
        }  # fmt: skip
        text = json.dumps({"crc32": json_crc32(body), "copy": body})
        write_text(job.final / records_file(self.rank), text)

    def hold(self, step: int) -> None:
        """Read the states that this rank holds from the ranks that wrote them."""
        path = words.step_folder(self.folder, step)
        for rank in self.held:
            self._fetch(path, rank, self._addresses[rank])

    def _fetch(self, path: Path, rank: int, address: tuple[str, int]) -> None:
        path.mkdir(exist_ok=True)
        for name in (words.shard_file(rank), records_file(rank)):
            fetch_peer_file(address, self._token, f"{path.name}/{name}", path / name)

    # --- reading -------------------------------------------------------------------------------

    def restore(
        self,
        parallel: CheckpointedParallel,
        *,
        optimizer_state: OptimizerState,
        layout: str,
        model: str,
        all_agree: Callable[[bool], bool],
    ) -> Restored | None:
        """Fill this rank from the newest copy of which every rank's state is in some host's memory
        and undamaged, and that is newer than the newest checkpoint. Every rank calls it. A copy of
        another layout becomes a checkpoint instead, which is resharded as it is read.

        Args:
            optimizer_state: the live one, filled in place.
            layout, model: of the run: a copy of another model is not read.
            all_agree: whether every rank said True.

        Returns:
            None: there is no such copy, or it is a checkpoint now.
        """
        mine = self._listed(model) if self.rank == self._first else []
        rows = self._gathered("there", mine)
        notes: list[str] = []
        found = None if rows is None else complete_steps(rows)
        for step, own, where in self._published("there", found):
            path = words.step_folder(self.folder, step)
            if own != layout:
                if self._save(
                    path, step, layout=own, model=model, where=where, all_agree=all_agree
                ):
                    return None
                continue
            why = ""
            try:
                if not (path / records_file(self.rank)).exists():
                    self._fetch(path, self.rank, self._addresses[where[self.rank]])
                body, shard = _file_records(path / records_file(self.rank))
                file = words.open_shard(path, shard)
            except (OSError, AttributeError) as error:
                why = f"{path} cannot be read: {error}"
            except CheckpointError as error:
                why = error.message
            if all_agree(not why):
                state = fill_from_shard(file, shard, parallel, optimizer_state)
                file.close()
                self.store.set(LATEST, str(step))
                return Restored(
                    path=path, step=step, cursor=body["cursor"], extra={}, optimizer_state=state,
                    notes=notes,
                )  # fmt: skip
            notes.append(why or f"{path} is damaged on another rank")
        return None

    def newest(self) -> int:
        """Step of the newest checkpoint; 0: there is none."""
        path = next(words.resumable_checkpoints(self._checkpoints), None)
        return 0 if path is None else int(path.name.removeprefix("step-"))

    def _save(
        self, path: Path, step: int, *, layout: str, model: str, where: list[int],
        all_agree: Callable[[bool], bool],
    ) -> bool:  # fmt: skip
        """Write a copy of another layout as a checkpoint; whether that was done."""
        mine = [rank for rank, at in enumerate(where) if at == self.rank]
        job = SaveJob(folder=self._checkpoints, step=step, layout=layout, model=model)
        parts = (
            lambda: job.make() if self.rank == 0 else None,
            lambda: self._put(path, job.aside, mine),
        )
        if not all([all_agree(_done(act)) for act in parts]):
            return False
        if self.rank == 0:
            cursor = json.loads(self.store.get(f"copies/cursor/{step}"))
            job = dataclasses.replace(job, cursor=cursor)
        return all_agree(self.rank > 0 or _done(lambda: job.complete(len(where))))

    def _put(self, path: Path, aside: Path, ranks: list[int]) -> None:
        for rank in ranks:
            body, shard = _file_records(path / records_file(rank))
            shutil.copyfile(path / words.shard_file(rank), aside / words.shard_file(rank))
            write_text(aside / records_file(rank), json.dumps(shard.to_json()))
            self.store.set(f"copies/cursor/{body['step']}", json.dumps(body["cursor"]))

    def _listed(self, model: str) -> list[tuple[int, str, int, int]]:
        """Step, layout, ranks and rank of the states in this host's memory that a run of this model
        may continue from."""
        found, newest = [], self.newest()
        for path in words.checkpoints(self.folder):
            for file in sorted(path.glob("rank-*.json")):
                try:
                    body, shard = _file_records(file)
                except CheckpointError:
                    continue
                if body["model"] == model and body["step"] > newest >= body["newest"]:
                    found.append((body["step"], body["layout"], body["size"], shard.rank))
        return found

    def clear(self) -> None:
        """Delete all copies of the run on this host."""
        if self.rank == self._first:
            shutil.rmtree(self.folder, ignore_errors=True)
            _private(self.folder)


def records_file(rank: int) -> str:
    """The name of the file that holds the records of one rank's state."""
    return f"rank-{rank:05d}.json"


def _file_records(path: Path) -> tuple[dict[str, Any], Shard]:
    """What a file of records holds. Raises CheckpointError if it is missing or damaged."""
    try:
        head = parse_json(path.read_text())
        body = head["copy"]
        if json_crc32(body) != head["crc32"]:
            raise ValueError("its checksum differs")
        return body, Shard.from_json(body["shard"])
    except (OSError, *MALFORMED, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def holder(rank: int, table: list[Any]) -> int:
    """The rank of the next host that holds a copy of `rank`'s state.

    Args:
        table: of every rank, the first rank of its host, and more.
    """
    firsts = sorted({row[0] for row in table})
    first = table[rank][0]
    after = firsts[(firsts.index(first) + 1) % len(firsts)]
    there = [r for r, row in enumerate(table) if row[0] == after]
    return there[(rank - first) % len(there)]


def complete_steps(rows: list[list[tuple[int, str, int, int]]]) -> list[tuple[int, str, list[int]]]:
    """Steps of which all states are somewhere, the newest first, each with its layout and, by rank,
    a rank of a host that has them.

    Args:
        rows: of the host of each rank, as `StateCopies` lists them.
    """
    places: dict[tuple[int, str, int], dict[int, int]] = {}
    for at, found in enumerate(rows):
        for step, layout, size, rank in found:
            places.setdefault((step, layout, size), {}).setdefault(rank, at)
    return [
        (step, layout, [held[rank] for rank in range(size)])
        for (step, layout, size), held in sorted(places.items(), reverse=True)
        if held.keys() >= set(range(size))
    ]


def _done(act: Callable[[], object]) -> bool:
    """Whether it could be done."""
    try:
        act()
    except (OSError, CheckpointError):
        return False
    return True


def _private(folder: Path) -> None:
    """Make a folder that no other user reads. Raises CheckpointError: it is another user's."""
    while True:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a run that ended has just removed it
            if folder.parent.is_symlink() or folder.parent.stat().st_uid != os.getuid():
                raise CheckpointError(
                    f"{folder.parent} is another user's", hint="--replicate-state 0"
                )
            folder.mkdir(mode=0o700, exist_ok=True)
            return
