"""Resharded: a checkpoint of one layout, read into another, tensor by tensor.

    ranks' files     boxes of each parameter (Placement); of its moments the same boxes, or under
                     ZeRO a run of the flattened box for each of the ranks that share it
    whole            one tensor at a time, assembled from them
    this rank        takes its own boxes, and of a moment its own run

What is read are the bytes that were written, so that values, moments and masters are equal bit for
bit on every layout; steps on another layout differ by the order of their sums alone. Moments in 8
bits are dequantized as they are read and quantized in the blocks of this rank's shard, whose scales
are others. Streams of random numbers are keyed by global coordinates, and go on by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.moments_8bit import SCALES, dequantize_moment, quantize_moment
from hocket.runtime.tensor_parallel.shards import take
from hocket.spec.check import covers
from hocket.spec.checkpoint import Manifest, TensorRecord
from hocket.spec.errors import CheckpointError
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement
from hocket.spec.tensor_file import TensorFile

MASTER = "master"
Part = tuple[TensorFile, TensorRecord, TensorRecord | None]
"""A rank's file, a tensor of it, and the tensor of its scales if it is quantized."""


class Resharded:
    """The whole tensors of a checkpoint, from its open files.

    Args:
        manifest: of the checkpoint. files: of its shards, in their order.
        tensor: reads one tensor of a file.
    """

    def __init__(self, manifest: Manifest, files: Sequence[TensorFile], tensor: Any) -> None:
        self._tensor = tensor
        layout = Layout.parse(manifest.layout)
        alone = [(shard.rank,) for shard in manifest.shards]
        dense: Sequence[Sequence[int]] = layout.shard_groups() or alone
        experts = layout.expert_groups("expert_data") if layout.zero else alone
        self._values: dict[str, list[tuple[Placement, list[Part]]]] = {}
        self._states: dict[tuple[str, str], list[tuple[Placement, list[Part]]]] = {}
        for rank in alone:
            self._collect(manifest, files, rank, "parameter")
        for ranks in dense:
            self._collect(manifest, files, ranks, "optimizer", experts=False)
        for ranks in experts:
            self._collect(manifest, files, ranks, "optimizer", experts=True)

    def _collect(
        self,
        manifest: Manifest,
        files: Sequence[TensorFile],
        ranks: Sequence[int],
        kind: str,
        *,
        experts: bool | None = None,
    ) -> None:
        """What some ranks hold together: runs of the same boxes, one after another.

        `experts`: of the parameters that ep and etp place, or of all others; None: of every one.
        """
        runs: dict[tuple[str, str | None], list[Part]] = {}
        for rank in ranks:
            records = [r for r in manifest.shards[rank].tensors if r.kind == kind]
            known = {(r.name, r.state): r for r in records}
            for record in records:
                if experts in (None, manifest.shards[rank].placements[record.name].is_expert):
                    scales = known.get((record.name, f"{record.state}{SCALES}"))
                    runs.setdefault((record.name, record.state), []).append(
                        (files[rank], record, scales)
                    )
        for (name, state), parts in runs.items():
            placement = manifest.shards[ranks[0]].placements[name]
            if state is None:
                self._values.setdefault(name, []).append((placement, parts))
            else:
                self._states.setdefault((name, state), []).append((placement, parts))

    def names(self) -> set[str]:
        """Of the parameters."""
        return set(self._values)

    def states(self, name: str) -> list[str]:
        return [state for known, state in self._states if known == name]

    def value(self, name: str) -> Tensor:
        """A whole parameter. Raises CheckpointError: no rank holds some part of it."""
        return self._whole(name, self._values[name])

    def state(self, name: str, state: str) -> Tensor:
        """A whole state of a parameter, in its shape; a scalar as it is. Raises CheckpointError."""
        found = self._states[name, state]
        part, *_ = found[0][1]
        if not part[1].shape and found[0][0].shape:
            return self._read(*part)
        return self._whole(f"{state} of {name}", found)

    def _read(self, file: TensorFile, record: TensorRecord, scales: TensorRecord | None) -> Tensor:
        found: Tensor = self._tensor(file, record)
        if scales is None:
            return found
        return dequantize_moment(found, self._tensor(file, scales), str(record.state))

    def _whole(self, said: str, found: list[tuple[Placement, list[Part]]]) -> Tensor:
        whole: Tensor | None = None
        done: set[Any] = set()
        for placement, parts in found:
            boxes = {(b.start, b.size) for b in placement.blocks}
            if boxes <= done:
                continue  # another replica's copy
            local = torch.cat([self._read(*part).reshape(-1) for part in parts])
            if local.numel() != torch.Size(placement.local_shape).numel():
                raise CheckpointError(f"the checkpoint does not hold all of {said}")
            local = local.view(placement.local_shape)
            if whole is None:
                whole = torch.empty(placement.shape, dtype=local.dtype)
            for in_global, in_local in placement.pairs():
                whole[in_global] = local[in_local]
            done |= boxes
        blocks = [b for placement, _ in found for b in placement.blocks]
        if whole is None or not covers(found[0][0].shape, blocks):
            raise CheckpointError(f"the checkpoint does not hold all of {said}")
        return whole


def read_into(parallel: Any, source: Resharded, live: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Fill a rank's parameters and the state of its optimizer; every rank calls it.

    Args:
        parallel: as checkpoints are written from, with `local_part`.
        live: the optimizer's own tensors.

    Raises:
        CheckpointError: a parameter or state that the checkpoint does not hold, or of another
            shape.
    """
    parameters = dict(parallel.named_parameters())
    held = {name: _held(name, parallel.placements[name], source) for name in parameters}
    for group in parallel.groups():
        with parallel.writing(group), torch.no_grad():
            for name in group:
                whole = source.value(held[name])
                parameters[name].copy_(
                    take(_fitting(name, whole, parallel), parallel.placements[name])
                )
    for name, states in live.items():
        part = parallel.local_part(name)
        for key, tensor in states.items():
            if key.endswith(SCALES):
                continue  # made with what they scale
            whole = _state(held[name], key, source)
            if tensor.shape or whole.ndim:
                local = take(_fitting(name, whole, parallel), parallel.placements[name])
                whole = local.reshape(-1)[part].view(tensor.shape)
            with torch.no_grad():
                if key + SCALES in states:
                    quantize_moment(states, key, whole)
                else:
                    tensor.copy_(whole)


def _held(name: str, placement: Placement, source: Resharded) -> str:
    """The name under which the checkpoint holds a parameter: its own, or its tie's."""
    for known in (name, placement.tie):
        if known in source.names():
            return str(known)
    raise CheckpointError(f"the checkpoint holds no {name}")


def _state(name: str, key: str, source: Resharded) -> Tensor:
    if key in source.states(name):
        return source.state(name, key)
    if key != MASTER:
        raise CheckpointError(f"the checkpoint holds no {key} of {name}")
    return source.value(name)  # fp32 values that were stepped themselves


def _fitting(name: str, whole: Tensor, parallel: Any) -> Tensor:
    placement = parallel.placements[name]
    if tuple(whole.shape) != placement.shape:
        raise CheckpointError(
            f"{name} has the shape {list(whole.shape)} in the checkpoint, not "
            f"{list(placement.shape)}"
        )
    return whole
