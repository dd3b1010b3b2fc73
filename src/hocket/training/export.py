"""Export: an ordinary Hugging Face directory, from any layout.

A whole tensor is assembled from the boxes in the ranks' files, so that one path serves a finished
run's checkpoint (without any rank) and live ranks (which write their parameters aside first).
Only one tensor is in memory at a time, and bytes are moved without knowing what they mean, so
that every dtype comes out bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hocket.spec import checkpoint as words
from hocket.spec.checkpoint import Manifest, TensorRecord
from hocket.spec.errors import CheckpointError, OptionError
from hocket.spec.placement import Placement
from hocket.spec.prediction_layers import prediction_layers
from hocket.spec.tensor_file import ITEM_BYTES, TensorEntry, TensorFile, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.models.saved_names import SavedNames
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.rank_state import CheckpointedParallel

SHARD_BYTES = 5_000_000_000
"""Largest file of weights; what is larger is spread over several, with an index."""

_SAID = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")

Raw = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What an exported directory holds besides weights.

    Attributes:
        config: the Hugging Face configuration.
        directory: where the model came from: its generation_config.json is copied. None: made
            from the configuration.
        tokenizer: directory of the tokenizer. None: the export holds none.
        code: directory of the model's own code, copied if it is trusted.
    """

    config: Mapping[str, Any]
    directory: Path | None = None
    tokenizer: Path | None = None
    code: Path | None = None


def export_checkpoint(
    checkpoint: Path, to: Path, files: ModelFiles, *, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a Hugging Face directory from one checkpoint's folder, without any rank.

    Args:
        checkpoint: a folder as `save_checkpoint` wrote it, of any layout.
        to: the directory to make; it appears when it is complete.
        files: what it holds besides weights.
        shard_bytes: largest file of weights.

    Raises:
        CheckpointError: the checkpoint is damaged, does not hold all of a parameter, or none of the
            model's buffers.
        OptionError: `to` exists and holds something else than an export.
    """
    from hocket.models.saved_names import SavedNames

    refuse_occupied(to)
    with appearing(to) as aside:
        with checkpoint_opened(checkpoint) as whole:
            names = SavedNames(dict(files.config), code=files.code)
            _require_buffers(checkpoint, whole, names)
            dtype = _write_weights(aside, whole, names, shard_bytes)
        _write_files(aside, files, names.skeleton, dtype)
    return to


def export_ranks(parallel: CheckpointedParallel, to: Path, files: ModelFiles) -> Path:
    """Write a Hugging Face directory from live ranks; every rank calls it.

    The ranks of the first replica write their parameters aside; rank 0 assembles them.
    """
    mesh = getattr(parallel, "mesh", None)
    return of_ranks(
        parallel,
        mesh,
        to,
        refuse=lambda: refuse_occupied(to),
        assemble=lambda written: export_checkpoint(written, to, files),
    )


def refuse_occupied(to: Path) -> None:
    """Raise OptionError where `to` holds something that an export would destroy."""
    refuse_other(to, "config.json", "model")


# --- what every export does ------------------------------------------------------------------


def refuse_other(to: Path, mark: str, what: str) -> None:
    """Raise OptionError where `to` is a file, or a directory that is not empty and does not hold
    the file `mark`, by which a `what` is known."""
    hint = f"--to {to.with_name(f'{to.name}-{what}')}"
    if to.is_file():
        raise OptionError(f"{to} is a file, and a {what} is a directory", hint=hint)
    if to.is_dir() and any(to.iterdir()) and not (to / mark).exists():
        raise OptionError(f"{to} is not empty and holds no {what}", hint=hint)


@contextlib.contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """A folder aside, which takes the name `to` when the block has ended without an error."""
    aside = to.with_name(f".{to.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if to.exists():
            shutil.rmtree(to)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def checkpoint_opened(checkpoint: Path) -> Iterator[Whole]:
    """A checkpoint's whole parameters, for as long as its files are open."""
    manifest = words.read_manifest(checkpoint)
    with contextlib.ExitStack() as stack:
        shards = [stack.enter_context(words.open_shard(checkpoint, s)) for s in manifest.shards]
        yield Whole(manifest, shards)


def of_ranks(
    parallel: Any,
    mesh: Mesh | None,
    to: Path,
    *,
    refuse: Callable[[], None],
    assemble: Callable[[Path], Path],
) -> Path:
    """Export live ranks: those of the first replica write their parameters aside, and rank 0
    assembles the files. Every rank calls it.

    Args:
        parallel: whose parameters are written.
        mesh: the ranks. None: this one alone.
        to: what is made.
        refuse: called by rank 0 before anything is written.
        assemble: called by rank 0 with the checkpoint's folder.
    """
    from hocket.runtime.checkpoint import CheckpointWorld, save_checkpoint

    world = CheckpointWorld() if mesh is None else CheckpointWorld.of(mesh)
    folder = to.with_name(f".{to.name}.ranks")
    if world.rank == 0:
        refuse()
    written = save_checkpoint(
        folder,
        step=0,
        parallel=Held(parallel, mesh),
        optimizer_state={},
        layout="",
        model="",
        world=world,
    )
    if world.rank == 0:
        try:
            assemble(written)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    return to


class Held:
    """The parameters that a rank writes: those of the first replica and, of experts that lie on
    ranks of several, those of their first copy."""

    def __init__(self, parallel: Any, mesh: Mesh | None) -> None:
        self.groups, self.reading, self.writing = (
            parallel.groups, parallel.reading, parallel.writing,
        )  # fmt: skip

        def writes(placement: Placement) -> bool:
            if mesh is None:
                return True
            if placement.is_expert:
                return mesh.axis("expert_data").index == 0
            return mesh.coordinate["dp"] == 0 and mesh.coordinate["cp"] == 0

        if mesh is None or (mesh.coordinate["dp"] == 0 and mesh.coordinate["cp"] == 0):
            self.stages = getattr(parallel, "stages", ())  # whose buffers belong to it
        self._parameters = {
            name: parameter
            for name, parameter in parallel.named_parameters()
            if writes(parallel.placements[name])
        }
        self.placements = {name: parallel.placements[name] for name in self._parameters}

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._parameters.items()


# --- assembling ------------------------------------------------------------------------------


class Whole:
    """The whole parameters and buffers of a checkpoint, assembled one at a time from its open
    files. A buffer is replicated."""

    def __init__(self, manifest: Manifest, files: list[TensorFile]) -> None:
        self.placements: dict[str, Placement] = {}
        self.dtypes: dict[str, str] = {}
        self._parts: dict[str, list[tuple[TensorFile, TensorRecord, Placement]]] = {}
        for shard, file in zip(manifest.shards, files, strict=True):
            for record in shard.tensors:
                placement = shard.placements.get(record.name)
                if record.kind == "buffer":
                    placement = Placement.whole(record.name, record.shape)
                elif record.kind != "parameter" or placement is None:
                    continue
                known = self.placements.setdefault(record.name, placement)
                dtype = self.dtypes.setdefault(record.name, record.dtype)
                if (known.shape, dtype) != (placement.shape, record.dtype):
                    raise CheckpointError(f"{file.path}: {record.name} differs between ranks")
                self._parts.setdefault(record.name, []).append((file, record, placement))

    def names(self) -> list[str]:
        """Every parameter that owns its values; a tied one is written once, by its owner."""
        return [n for n, p in self.placements.items() if p.tie not in self.placements]

    def tensor(self, name: str) -> Raw:
        """One whole tensor as unsigned integers of its element's width.

        Raises:
            CheckpointError: no rank holds some part of it.
        """
        placement = self.placements[name]
        raw = _RAW[ITEM_BYTES[self.dtypes[name]]]
        blocks = [b for *_, p in self._parts[name] for b in p.blocks]
        if not _covers(placement, blocks):
            raise CheckpointError(f"the checkpoint does not hold all of {name}")
        whole = np.empty(placement.shape, raw)
        done = set()
        for file, record, part in self._parts[name]:
            if all((b.start, b.size) in done for b in part.blocks):
                continue  # another replica's copy
            local = np.frombuffer(file.buffer(record.key), raw).reshape(record.shape)
            for in_global, in_local in part.pairs():
                whole[in_global] = local[in_local]
            done |= {(b.start, b.size) for b in part.blocks}
        return whole


def _covers(placement: Placement, blocks: list[Any]) -> bool:
    from hocket.spec.check import covers

    return covers(placement.shape, blocks)


def _write_weights(to: Path, whole: Whole, names: SavedNames, shard_bytes: int) -> str:
    """Write the weight files and, if there are several, their index; returns the dtype."""
    plan: list[tuple[str, list[TensorEntry]]] = []
    for name in whole.names():
        shapes = names.entries(name, whole.placements[name].shape)
        dtype = whole.dtypes[name]
        plan.append((name, [TensorEntry(name=k, dtype=dtype, shape=s) for k, s in shapes.items()]))
    groups: list[list[tuple[str, list[TensorEntry]]]] = [[]]
    size = 0
    for name, entries in plan:
        more = sum(e.num_bytes for e in entries)
        if groups[-1] and size + more > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append((name, entries))
        size += more
    index: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = "model.safetensors"
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        flat = [e for _, entries in group for e in entries]
        buffers = _buffers(whole, names, [name for name, _ in group])
        write_tensors(to / file, flat, buffers, {"format": "pt"})
        index |= {e.name: file for e in flat}
    if len(groups) > 1:
        total = sum(e.num_bytes for _, entries in plan for e in entries)
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (to / "model.safetensors.index.json").write_text(json.dumps(text, indent=2))
    return max(whole.dtypes.values(), key=list(whole.dtypes.values()).count)


def _require_buffers(checkpoint: Path, whole: Whole, names: SavedNames) -> None:
    """Raise CheckpointError where a checkpoint holds none of the buffers that the model's files
    have, so that its reader would take initial values for trained ones."""
    from hocket.runtime.rank_state import persistent_buffers

    wanted = [name for name, _ in persistent_buffers(names.skeleton)]
    if wanted and not any(name in whole.placements for name in wanted):
        raise CheckpointError(
            f"{checkpoint} was written without buffers; the model has {len(wanted)}: {wanted[0]}",
            hint="hocket train --resume --run RUN, with more --steps: it takes them from the "
            "model's files, and the checkpoint that it writes holds them",
        )


def _buffers(whole: Whole, names: SavedNames, wanted: list[str]) -> Iterator[Raw]:
    for name in wanted:
        tensor = whole.tensor(name)
        if names.is_identity:
            yield tensor
            continue
        import torch

        # Splitting and stacking moves elements whole: their bytes may stay unsigned integers.
        signed = torch.from_numpy(tensor.view(tensor.dtype.str.replace("u", "i")))
        for part in names.convert(name, signed).values():
            yield part.contiguous().numpy()


# --- the other files -------------------------------------------------------------------------


def _write_files(to: Path, files: ModelFiles, skeleton: Any, dtype: str) -> None:
    config = {**files.config, "architectures": [type(skeleton).__name__], "dtype": _SAID[dtype]}
    config.pop("torch_dtype", None)
    config |= dict.fromkeys(prediction_layers(config), 0)
    _write_json(to / "config.json", config)
    generation = files.directory / "generation_config.json" if files.directory else None
    if generation is not None and generation.is_file():
        shutil.copyfile(generation, to / generation.name)
    else:
        of_model = skeleton.generation_config.to_dict()  # the ids that the class has as defaults
        known = {k: of_model[k] for k in _GENERATION if of_model.get(k) is not None}
        _write_json(to / "generation_config.json", {"_from_model_config": True, **known})
    if files.tokenizer is not None:
        from hocket.training.tokenizer import Tokenizer

        Tokenizer.load(files.tokenizer).save(to)
    if files.code is not None:
        for module in files.code.glob("*.py"):
            shutil.copyfile(module, to / module.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
