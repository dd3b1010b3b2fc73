"""Checkpoints: every rank writes what it holds, and the folder appears only when all is there.

    all ranks   rank-0000R.safetensors and its records, into a folder aside; flushed and read back
    barrier     -------------------------------------------------------------------- (1)
    rank 0      the manifest; the folder gets its name; `latest` moves; old ones go   (2)
    barrier     -------------------------------------------------------------------- (3)

A crash before (2) leaves a folder with a name that nobody reads; a crash after it, a checkpoint.
Nothing is ever unpickled: files are safetensors and JSON, and each tensor carries a checksum.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hocket.runtime.generators import random_states, set_random_state
from hocket.runtime.reshard import Resharded, read_into
from hocket.spec import checkpoint as words
from hocket.spec.checkpoint import Manifest, Shard, TensorRecord
from hocket.spec.errors import CheckpointError, SaveError
from hocket.spec.files import named
from hocket.spec.placement import Placement
from hocket.spec.run import write_text
from hocket.spec.tensor_file import TensorEntry, TensorFile, write_tensors

DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}

OptimizerState = Mapping[str, Mapping[str, Tensor]]
"""Global name of a parameter, to name of a state (`exp_avg`), to its tensor on this rank."""


class CheckpointedParallel(Protocol):
    """What is saved: a rank's parameters by global name, and where each lies in the whole."""

    @property
    def placements(self) -> Mapping[str, Placement]: ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...

    def groups(self) -> Iterable[Sequence[str]]:
        """The names, by what is made whole at once; also those that other ranks alone write."""

    def reading(self, group: Sequence[str]) -> AbstractContextManager[None]:
        """Within the block those of a group have their values. Every rank enters it."""

    def writing(self, group: Sequence[str]) -> AbstractContextManager[None]:
        """Within the block those of a group may be written, and all are."""


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
        """The world of a mesh."""
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
    """

    path: Path
    step: int
    cursor: Mapping[str, Any]
    extra: Mapping[str, Any]
    optimizer_state: dict[str, dict[str, Tensor]]
    notes: list[str]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to resume from, or None. Looks at names only; loading verifies."""
    return next(words.candidates(Path(folder)), None)


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
        keep: checkpoints that stay, beside those of multiples of `keep_every` steps (0: none).
            Older ones are deleted once this one is verified.
        begin: called first; an OSError of it counts as one of writing.

    Returns:
        The checkpoint's folder.

    Raises:
        SaveError: the disk is full or not writable, or what was written does not read back.
    """
    world = _world(parallel, world)
    folder = Path(folder)
    final = words.step_folder(folder, step)
    aside = folder / f".{final.name}.partial"
    with _together(world, step, aside):
        begin()
        if world.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    with _together(world, step, aside):
        shard = _write_shard(aside, world.rank, parallel, optimizer_state)
        write_text(aside / f"rank-{world.rank:05d}.json", json.dumps(shard.to_json()))
    # (1)
    with _together(world, step, aside):
        if world.rank == 0:
            manifest = Manifest(
                step=step,
                layout=layout,
                model=model,
                cursor=dict(cursor or {}),
                extra=dict(extra or {}),
                versions={"torch": str(torch.__version__)},
                shards=tuple(_shards(aside, world.size)),
            )
            _commit(folder, aside, final, manifest)
            words.delete_old(folder, step, keep, keep_every)
    # (3)
    return final


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
    fall back to the checkpoint before. Beside what is filled, one tensor is held at a time, and
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
    for path in words.candidates(folder):
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
                state = _restore(files[0], manifest.shards[world.rank], parallel, optimizer_state)
            for file in files:
                file.close()
            return Restored(
                path=path,
                step=manifest.step,
                cursor=manifest.cursor,
                extra=manifest.extra,
                optimizer_state=state,
                notes=[*notes, *([f"{path} is of {manifest.layout}"] if resharded else [])],
            )
        notes.append(why or f"{path} is damaged on another rank")
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
def _together(world: CheckpointWorld, step: int, aside: Path) -> Iterator[None]:
    """A part of a save, at whose end all ranks wait for each other. Raises SaveError on all where
    it failed on one; what was written is removed."""
    reason = ""
    try:
        yield
    except CheckpointError as error:
        reason = error.message
    except OSError as error:
        reason = f"{error.filename or aside.parent}: {error.strerror or error}"
    if not world.all_agree(not reason):
        if world.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        why = reason or "another rank could not write"
        raise SaveError(f"step {step} was not saved: {why}", mine=bool(reason))


def _shards(aside: Path, size: int) -> Iterator[Shard]:
    """What each rank wrote, from its own file, which goes."""
    for rank in range(size):
        part = aside / f"rank-{rank:05d}.json"
        yield Shard.from_json(json.loads(part.read_text()))
        part.unlink()


def _write_shard(
    aside: Path, rank: int, parallel: CheckpointedParallel, optimizer_state: OptimizerState
) -> Shard:
    parameters = dict(parallel.named_parameters())
    placements = {name: parallel.placements[name] for name in parameters}
    tensors: list[tuple[str, str, str | None, Tensor]] = []
    groups = [list(group) for group in parallel.groups()]
    for name in (n for group in groups for n in group if n in parameters):
        placement, tensor = placements[name], parameters[name]
        assert tuple(tensor.shape) == placement.local_shape, (name, tensor.shape, placement)
        tensors.append(("parameter", name, None, tensor))
    assert len(tensors) == len(parameters), "parameters that no group holds"
    for name, states in optimizer_state.items():
        assert name in parameters, name
        tensors += [("optimizer", name, key, tensor) for key, tensor in states.items()]
    tensors += [("random", name, None, tensor) for name, tensor in random_states().items()]

    entries = [
        TensorEntry(
            name="/".join(filter(None, (kind, state, name))),
            dtype=DTYPES[tensor.dtype],
            shape=tuple(tensor.shape),
        )
        for kind, name, state, tensor in tensors
    ]

    def buffers() -> Iterator[Any]:
        for group in groups:
            with parallel.reading(group):
                for name in group:
                    if name in parameters:
                        yield _bytes(parameters[name])
        for _, _, _, tensor in tensors[len(parameters) :]:
            yield _bytes(tensor)

    path = aside / words.shard_file(rank)
    remaining = buffers()
    try:
        sums = write_tensors(path, entries, remaining)
    finally:
        list(remaining)  # other ranks gather with this one, whatever its disk does
    records = [
        TensorRecord(
            key=entry.name,
            kind=kind,
            name=name,
            state=state,
            dtype=entry.dtype,
            shape=entry.shape,
            crc32=crc32,
            placed=kind != "random" and entry.shape == placements[name].local_shape,
        )
        for (kind, name, state, _), entry, crc32 in zip(tensors, entries, sums, strict=True)
    ]
    shard = Shard(rank=rank, file=path.name, placements=placements, tensors=tuple(records))
    _forget_cached(path)
    with words.open_shard(aside, shard):
        pass
    return shard


def _bytes(tensor: Tensor) -> Any:
    """The bytes of one tensor, copied to the CPU where they are not there already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    # Not `numpy()`: what that was called on can never be freed again, as ZeRO-3 does.
    raw: Any = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    raw.tensor = flat  # stays as long as its memory is looked at
    return np.ctypeslib.as_array(raw)


def _forget_cached(path: Path) -> None:
    """Let the next read come from the disk and not from the memory of what was written."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


def _restore(
    file: TensorFile, shard: Shard, parallel: CheckpointedParallel, live: OptimizerState | None
) -> dict[str, dict[str, Tensor]]:
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
    return state


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
