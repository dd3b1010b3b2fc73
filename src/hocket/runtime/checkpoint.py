"""Checkpoints: every rank writes what it holds, and the folder appears only when all is there.

    all ranks   rank-0000R.safetensors and its records, into a folder aside; flushed and read back
    barrier     -------------------------------------------------------------------- (1)
    rank 0      the manifest; the folder gets its name; `latest` moves; old ones go   (2)
    barrier     -------------------------------------------------------------------- (3)

A crash before (2) leaves a folder with a name that nobody reads; a crash after it, a checkpoint.
Nothing is ever unpickled: files are safetensors and JSON, and each tensor carries a checksum.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.generators import set_random_state
from hocket.runtime.rank_state import (
    DTYPES,
    CheckpointedParallel,
    OptimizerState,
    RankState,
    saved_buffers,
)
from hocket.runtime.reshard import Resharded, read_into
from hocket.runtime.save_job import SaveJob
from hocket.spec import checkpoint as words
from hocket.spec.checkpoint import Manifest, Shard, TensorRecord
from hocket.spec.errors import CheckpointError, SaveError
from hocket.spec.tensor_file import TensorFile

_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointWorld:
    """The ranks that save together. The default is one rank alone.

    Attributes:
        rank, size: this rank among all.
        all_agree: whether every rank said True.
    """

    rank: int = 0
    size: int = 1
    all_agree: Callable[[bool], bool] = lambda mine: mine

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_agree(True)  # waiting for a value also waits for the device that carries it

    @classmethod
    def of(cls, mesh: Any) -> CheckpointWorld:
        if mesh.world_size == 1:
            return cls()
        from hocket.runtime import collectives

        axis = mesh.axis("world")

        def all_agree(mine: bool) -> bool:
            vote = torch.tensor([float(mine)], device=mesh.device)
            collectives.all_reduce(vote, axis, mesh.recorder, op="min")
            return bool(vote.item() > 0)

        return cls(rank=mesh.rank, size=mesh.world_size, all_agree=all_agree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gave back; the parameters were filled in place.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        cursor, extra: as given to `save_checkpoint`.
        optimizer_state: of this rank, on the device of its parameter (scalars on the CPU).
        notes: one per newer checkpoint that was damaged and passed over.
        damaged: the names of these, for the saves that follow.
    """

    path: Path
    step: int
    cursor: Mapping[str, Any]
    extra: Mapping[str, Any]
    optimizer_state: dict[str, dict[str, Tensor]]
    notes: list[str]
    damaged: Sequence[str] = ()


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to resume from, or None. Looks at names only; loading verifies."""
    return next(words.resumable_checkpoints(Path(folder)), None)


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    step: int,
    parallel: CheckpointedParallel,
    optimizer_state: OptimizerState,
    layout: str,
    model: str,
    cursor: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    world: CheckpointWorld | None = None,
    keep: int = 2,
    keep_every: int = 0,
    damaged: Sequence[str] = (),
    begin: Callable[[], None] = lambda: None,
) -> Path:
    """Save one step of all ranks into a new folder; every rank calls it.

    Where one rank cannot write, all of them raise, and the older checkpoints stay.

    Args:
        folder: where the checkpoints lie.
        step: optimizer steps done.
        parallel: this rank's parameters and placements.
        optimizer_state: per parameter; a tensor of the parameter's local shape is stored with the
            parameter's blocks.
        layout: text form of the layout.
        model: `spec.checkpoint.config_hash` of the model's configuration.
        cursor, extra: JSON values that loading gives back.
        world: the ranks that save together; None: those of `parallel.mesh`, or this one alone.
        keep: checkpoints that stay, apart from those of multiples of `keep_every` steps (0: none).
            Older ones are deleted once this one is verified.
        damaged: `Restored.damaged`, if a load came before; those are deleted too, and not counted.
        begin: called before anything is written; an OSError of it counts as one of writing.

    Returns:
        The checkpoint's folder.

    Raises:
        SaveError: the disk is full or not writable, or what was written does not read back.
    """
    world = _world(parallel, world)
    job = SaveJob(
        folder=Path(folder), step=step, layout=layout, model=model, cursor=cursor, extra=extra,
        keep=keep, keep_every=keep_every, damaged=damaged,
    )  # fmt: skip
    with _together(world, job):
        if world.rank == 0:
            job.make()  # which frees what an earlier save left
        begin()
    with _together(world, job):
        state = RankState(parallel, optimizer_state)
        job.write(world.rank, state, state.live())
    # (1)
    with _together(world, job):
        if world.rank == 0:
            job.complete(world.size)
    # (3)
    return job.final


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    parallel: CheckpointedParallel,
    layout: str,
    model: str,
    optimizer_state: OptimizerState | None = None,
    world: CheckpointWorld | None = None,
) -> Restored:
    """Fill this rank's parameters and random states from the newest whole checkpoint.

    Every rank calls it and verifies its own file; if any rank finds its file damaged, all of them
    fall back to the checkpoint before. Apart from what is filled, one tensor is held at a time, and
    under ZeRO-3 one block.

    Args:
        optimizer_state: the live state, filled in place; so a checkpoint of another layout is read
            too, by every rank from all files. None: it is given back, in new tensors.

    Raises:
        CheckpointError: there is none, none is whole, or it is of another model, or of another
            layout and `optimizer_state` is None.
    """
    world = _world(parallel, world)
    folder = Path(folder)
    notes: list[str] = []
    damaged: list[str] = []
    for path in words.resumable_checkpoints(folder):
        files: list[TensorFile] = []
        resharded, why = False, ""
        try:
            manifest = words.read_manifest(path)
            resharded = optimizer_state is not None and manifest.layout != layout
            files = _opened(path, manifest, world, resharded)
        except CheckpointError as error:
            why = error.message
        if world.all_agree(not why):
            if not resharded:
                _same_layout(path, manifest, layout, world)
            if manifest.model != model:
                raise CheckpointError(f"{path} is of another model: its configuration differs")
            if resharded:
                assert optimizer_state is not None
                state = _relay(manifest, files, parallel, optimizer_state, world.rank)
            else:
                state = fill_from_shard(
                    files[0], manifest.shards[world.rank], parallel, optimizer_state
                )
            for file in files:
                file.close()
            if resharded:
                notes.append(f"{path} is of {manifest.layout}")
            absent = _absent_buffers(manifest.shards, parallel)
            if not world.all_agree(not absent):
                notes.append(
                    f"{path} was written without buffers: {absent or 'those of other ranks'} "
                    "keep the values that the model was loaded with"
                )
            return Restored(
                path=path,
                step=manifest.step,
                cursor=manifest.cursor,
                extra=manifest.extra,
                optimizer_state=state,
                notes=notes,
                damaged=damaged,
            )
        notes.append(why or f"{path} is damaged on another rank")
        damaged.append(path.name)
    if notes:
        raise CheckpointError(f"no checkpoint in {folder} is whole: " + "; ".join(notes))
    raise CheckpointError(f"{folder} holds no checkpoint", hint="--save-every N saves them")


def _world(parallel: CheckpointedParallel, world: CheckpointWorld | None) -> CheckpointWorld:
    if world is not None:
        return world
    mesh = getattr(parallel, "mesh", None)
    return CheckpointWorld() if mesh is None else CheckpointWorld.of(mesh)


# --- writing ---------------------------------------------------------------------------------


@contextmanager
def _together(world: CheckpointWorld, job: SaveJob) -> Iterator[None]:
    """A part of a save, at whose end all ranks wait for each other. Raises SaveError on all where
    it failed on one; what was written is removed."""
    reason = ""
    try:
        yield
    except (CheckpointError, OSError) as error:
        reason = job.reason(error)
    if not world.all_agree(not reason):
        if world.rank == 0:
            job.discard()
        why = reason or "another rank could not write"
        raise SaveError(f"step {job.step} was not saved: {why}", mine=bool(reason))


# --- reading ---------------------------------------------------------------------------------


def _opened(
    path: Path, manifest: Manifest, world: CheckpointWorld, resharded: bool
) -> list[TensorFile]:
    """This rank's own file; of another layout all, each of them verified by one rank."""
    if resharded:
        return [
            words.open_shard(path, shard, verify=shard.rank % world.size == world.rank)
            for shard in manifest.shards
        ]
    mine = manifest.shards[world.rank : world.rank + 1]
    return [words.open_shard(path, shard) for shard in mine]


def _relay(
    manifest: Manifest,
    files: list[TensorFile],
    parallel: CheckpointedParallel,
    live: OptimizerState,
    rank: int,
) -> dict[str, dict[str, Tensor]]:
    """Fill a rank from a checkpoint of another layout."""
    read_into(parallel, Resharded(manifest, files, _tensor), live)
    like = manifest.shards[rank % len(manifest.shards)]
    for record in like.tensors:
        if record.kind == "random":
            set_random_state(record.name, _tensor(files[like.rank], record))
    for shard, file in zip(manifest.shards, files, strict=True):
        _fill_buffers(file, shard, parallel)
    return {name: dict(states) for name, states in live.items()}


def _same_layout(path: Path, manifest: Manifest, layout: str, world: CheckpointWorld) -> None:
    if manifest.layout != layout or len(manifest.shards) != world.size:
        raise CheckpointError(
            f"{path} was written by the layout {manifest.layout} on {len(manifest.shards)} ranks; "
            f"this run has {layout} on {world.size}",
            hint=f"--layout {manifest.layout}",
        )


def _differences(shard: Shard, parallel: CheckpointedParallel) -> Iterator[str]:
    mine = {name: parallel.placements[name] for name, _ in parallel.named_parameters()}
    for name in sorted(mine.keys() | shard.placements.keys()):
        ours, theirs = mine.get(name), shard.placements.get(name)
        if ours is None:
            yield f"{name} is not in the model"
        elif theirs is None:
            yield f"{name} is not in the checkpoint"
        elif (ours.shape, ours.blocks) != (theirs.shape, theirs.blocks):
            yield f"{name} has another layout"


def fill_from_shard(
    file: TensorFile, shard: Shard, parallel: CheckpointedParallel, live: OptimizerState | None
) -> dict[str, dict[str, Tensor]]:
    """Fill a rank from its own file, open and verified; the optimizer's state. Raises
    CheckpointError: the file holds other parameters or states than the rank has."""
    odd = list(_differences(shard, parallel))
    if live is not None:
        odd += _other_states(shard, live)
    if odd:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise CheckpointError(f"{file.path} does not fit: " + "; ".join(odd[:5]) + more)
    parameters = dict(parallel.named_parameters())
    values = {record.name: record for record in shard.tensors if record.kind == "parameter"}
    for group in parallel.groups():
        with parallel.writing(group), torch.no_grad():
            for name in group:
                parameters[name].copy_(_tensor(file, values[name]))
    state: dict[str, dict[str, Tensor]] = {}
    for record in shard.tensors:
        if record.kind == "optimizer":
            tensor = _tensor(file, record)
            if live is not None:
                tensor = live[record.name][str(record.state)].copy_(tensor)
            else:
                device = parameters[record.name].device if record.placed else torch.device("cpu")
                tensor = tensor.to(device)
            state.setdefault(record.name, {})[str(record.state)] = tensor
        elif record.kind == "random":
            set_random_state(record.name, _tensor(file, record))
    _fill_buffers(file, shard, parallel)
    return state


def _fill_buffers(file: TensorFile, shard: Shard, parallel: CheckpointedParallel) -> None:
    """Fill the buffers of a rank that a file holds. Raises CheckpointError: of another shape."""
    records = {record.name: record for record in shard.tensors if record.kind == "buffer"}
    for name, buffer in saved_buffers(parallel) if records else ():
        if name in records:
            if records[name].shape != tuple(buffer.shape):
                raise CheckpointError(
                    f"{file.path} does not fit: {name} has the shape {list(records[name].shape)}, "
                    f"not {list(buffer.shape)}"
                )
            buffer.copy_(_tensor(file, records[name]))


def _absent_buffers(shards: Sequence[Shard], parallel: CheckpointedParallel) -> str:
    """The names of a rank's buffers that no file of a checkpoint holds, as a text."""
    saved = {record.name for shard in shards for record in shard.tensors if record.kind == "buffer"}
    absent = [name for name, _ in saved_buffers(parallel) if name not in saved]
    return ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")


def _other_states(shard: Shard, live: OptimizerState) -> Iterator[str]:
    """What of an optimizer's state is not there, or of another shape."""
    theirs = {
        (record.name, str(record.state)): record.shape
        for record in shard.tensors
        if record.kind == "optimizer"
    }
    mine = {(name, key): tuple(t.shape) for name, held in live.items() for key, t in held.items()}
    for name, key in sorted(mine.keys() | theirs.keys()):
        one, other = mine.get((name, key)), theirs.get((name, key))
        if one is None or other is None:
            where = "optimizer" if one is None else "checkpoint"
            yield f"the state {key} of {name} is not in the {where}"
        elif one != other:
            yield f"the state {key} of {name} has the shape {list(other)}, not {list(one)}"


def _tensor(file: TensorFile, record: TensorRecord) -> Tensor:
    dtype = _OF_NAME[record.dtype]
    buffer = file.buffer(record.key)
    if not len(buffer):
        return torch.empty(record.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(record.shape)
