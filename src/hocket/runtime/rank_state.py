"""RankState: the tensors that one rank writes into its file of a checkpoint, live or copied.

parameters   by group: under ZeRO-3 one is gathered, written and freed at a time
optimizer    moments, masters, steps
buffer       those that the model's own files hold: a router's correction bias
random       the states of the generators
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hocket.runtime.generators import random_states
from hocket.spec import checkpoint as words
from hocket.spec.checkpoint import Shard, TensorRecord
from hocket.spec.placement import Placement
from hocket.spec.tensor_file import TensorEntry, write_tensors

DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
PLACED = ("parameter", "optimizer")
"""Kinds of tensors that may have a parameter's shape, and then lie as it does."""
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


def saved_buffers(parallel: Any) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of the persistent buffers of a rank's stages, where it has stages."""
    for stage in getattr(parallel, "stages", ()):
        yield from persistent_buffers(stage.module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the buffers that a module's `state_dict` has."""
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


class RankState:
    """What one rank holds at one step: names, dtypes and shapes, and where the tensors are.

    Args:
        parallel: this rank's parameters and placements.
        optimizer_state: per parameter; a tensor of the parameter's local shape is stored with the
            parameter's blocks.

    Attributes:
        tensors: all of them, in the order of the file; parameters first, by group.
        entries: of the file, in the same order.
        num_bytes: of all tensors.
        gathers: parameters have memory only within their group (ZeRO-3).
    """

    def __init__(self, parallel: CheckpointedParallel, optimizer_state: OptimizerState) -> None:
        self._parallel = parallel
        parameters = dict(parallel.named_parameters())
        self._placements = {name: parallel.placements[name] for name in parameters}
        self._groups = [list(group) for group in parallel.groups()]
        self._rows: list[tuple[str, str, str | None]] = []
        self.tensors: list[Tensor] = []
        for name in (n for group in self._groups for n in group if n in parameters):
            placement, tensor = self._placements[name], parameters[name]
            assert tuple(tensor.shape) == placement.local_shape, (name, tensor.shape, placement)
            self._add("parameter", name, None, tensor)
        assert len(self.tensors) == len(parameters), "parameters that no group holds"
        self._num_parameters = len(parameters)
        self.gathers = any(t.numel() and not t.untyped_storage().size() for t in self.tensors)
        for name, states in optimizer_state.items():
            assert name in parameters, name
            for key, tensor in states.items():
                self._add("optimizer", name, key, tensor)
        for name, tensor in saved_buffers(parallel):
            self._add("buffer", name, None, tensor)
        # Of a model with dropout they differ between data ranks, and no resumed step depends on
        # them: each layer is seeded by its place in the run (`runtime.random`), on any layout.
        for name, tensor in random_states().items():
            self._add("random", name, None, tensor)
        self.entries = [
            TensorEntry(
                name="/".join(filter(None, (kind, state, name))),
                dtype=DTYPES[tensor.dtype],
                shape=tuple(tensor.shape),
            )
            for (kind, name, state), tensor in zip(self._rows, self.tensors, strict=True)
        ]
        self.num_bytes = sum(entry.num_bytes for entry in self.entries)

    def _add(self, kind: str, name: str, state: str | None, tensor: Tensor) -> None:
        self._rows.append((kind, name, state))
        self.tensors.append(tensor)

    def readable(self) -> Iterator[range]:
        """Indices of tensors that have their values until the next is asked for. Every rank goes
        through all of it, since ranks gather parameters together."""
        at = 0
        held = {name for kind, name, _ in self._rows[: self._num_parameters]}
        for group in self._groups:
            size = sum(name in held for name in group)
            with self._parallel.reading(group):
                yield range(at, at + size)
            at += size
        yield range(self._num_parameters, len(self.tensors))

    def live(self) -> Iterator[Any]:
        """The bytes of each tensor in turn, copied to the CPU where they are not there already."""
        for indices in self.readable():
            for index in indices:
                yield raw_bytes(self.tensors[index])

    def write(
        self, aside: Path, rank: int, buffers: Iterator[Any], *, read_back: bool = True
    ) -> Shard:
        """Write the rank's file of `buffers` (one a tensor), flush it, and read it back.

        Raises:
            OSError: it could not be written. CheckpointError: it does not read back as written.
        """
        path = aside / words.shard_file(rank)
        try:
            sums = write_tensors(path, self.entries, buffers)
        finally:
            for _ in buffers:  # other ranks gather with this one, whatever its disk does
                pass
        rows = zip(self._rows, self.entries, sums, strict=True)
        records = [
            TensorRecord(
                key=entry.name,
                kind=kind,
                name=name,
                state=state,
                dtype=entry.dtype,
                shape=entry.shape,
                crc32=crc32,
                placed=kind in PLACED and entry.shape == self._placements[name].local_shape,
            )
            for (kind, name, state), entry, crc32 in rows
        ]
        shard = Shard(
            rank=rank, file=path.name, placements=self._placements, tensors=tuple(records)
        )
        if read_back:
            _forget_cached(path)
            with words.open_shard(aside, shard):
                pass
        return shard


def raw_bytes(tensor: Tensor) -> Any:
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
