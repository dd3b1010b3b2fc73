"""SaveJob: the folder of one save: made aside, filled by all ranks, then completed or removed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hocket.runtime.rank_state import RankState
from hocket.spec import checkpoint as words
from hocket.spec.checkpoint import Manifest, Shard
from hocket.spec.errors import CheckpointError
from hocket.spec.files import named, write_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One save.

    Attributes:
        folder: where the checkpoints are.
        step: optimizer steps done.
        layout: text form of the layout.
        model: `spec.checkpoint.config_hash` of the model's configuration.
        cursor, extra: JSON values that loading gives back.
        keep: checkpoints that stay, in addition to those of multiples of `keep_every` steps (0:
            none). Older ones are deleted once this one is verified.
        damaged: `Restored.damaged` of the load before; those are deleted too, and not counted.
    """

    folder: Path
    step: int
    layout: str
    model: str
    cursor: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None
    keep: int = 2
    keep_every: int = 0
    damaged: Sequence[str] = ()
    kind = "saved"

    @property
    def final(self) -> Path:
        return words.step_folder(self.folder, self.step)

    @property
    def aside(self) -> Path:
        return self.folder / f".{self.final.name}.partial"

    def make(self) -> None:
        """Make the folder aside, without what an earlier attempt left there. Rank 0."""
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.mkdir(parents=True)

    def phases(
        self, rank: int, state: RankState, buffers: Iterator[Any]
    ) -> list[Callable[[], None]]:
        """What each rank does in the background before `complete`."""
        return [lambda: self.write(rank, state, buffers)]

    def write(self, rank: int, state: RankState, buffers: Iterator[Any]) -> None:
        """Write one rank's file and its records."""
        shard = state.write(self.aside, rank, buffers)
        write_text(self.aside / f"rank-{rank:05d}.json", json.dumps(shard.to_json()))

    def complete(self, size: int) -> None:
        """Write the manifest, give the folder its name, delete older checkpoints. Rank 0, once all
        `size` ranks have written.

        Raises:
            OSError: it could not be written. CheckpointError: it does not read back as written.
        """
        manifest = Manifest(
            step=self.step,
            layout=self.layout,
            model=self.model,
            cursor=dict(self.cursor or {}),
            extra=dict(self.extra or {}),
            versions={"torch": str(torch.__version__)},
            shards=tuple(_shards(self.aside, size)),
        )
        _commit(self.folder, self.aside, self.final, manifest)
        words.delete_old(self.folder, self.step, self.keep, self.keep_every, self.damaged)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def reason(self, error: OSError | CheckpointError) -> str:
        """Why it could not be written, in words."""
        if isinstance(error, CheckpointError):
            return error.message
        return f"{error.filename or self.folder}: {error.strerror or error}"


def _shards(aside: Path, size: int) -> Iterator[Shard]:
    """What each rank wrote, from its own file, which goes."""
    for rank in range(size):
        part = aside / f"rank-{rank:05d}.json"
        yield Shard.from_json(json.loads(part.read_text()))
        part.unlink()


def _commit(folder: Path, aside: Path, final: Path, manifest: Manifest) -> None:
    """Give the finished folder its name, move `latest` there."""
    target = aside / words.MANIFEST
    with named(target), target.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    words.sync_folder(aside)
    written = words.read_manifest(aside)
    if written.to_json() != manifest.to_json():
        raise CheckpointError(f"{target} does not read back as it was written")
    replaced = folder / f".{final.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.rename(final, replaced)
    os.rename(aside, final)  # (2)
    words.sync_folder(folder)
    write_text(folder / words.LATEST, final.name + "\n")
    words.sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)
