"""Bucket: parameters side by side in one flat tensor, and the share of it that a rank owns.

    flat    | w9 w8 w7 ........ pad |      the parameters are views of it
    mine    | 1/n   |                      what this rank's optimizer steps, in pieces

What ZeRO's stages have in common. Where parameters are resident, `mine` is a part of `flat`; where
they are gathered for use (stage 3), it is a tensor of its own and `flat` has memory for as long as
its values are needed. The memory is taken from the storage and given back to it, so that whatever
autograd saved of a parameter finds the values again, and keeps none alive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import CollectiveWork
from hocket.runtime.mesh import Axis

ALONE = Axis("replicas")
"""No other rank holds the same share."""


class Owners(NamedTuple):
    """The ranks that share a parameter's state.

    Attributes:
        axis, replicas: of all parameters but those of `others`.
        others: parameter name to the ranks that share its state.
    """

    axis: Axis
    replicas: Axis
    others: Mapping[str, Axis]

    def of(self, name: str) -> tuple[Axis, Axis]:
        """The ranks that share the state of a parameter, and those that hold the same share."""
        other = self.others.get(name)
        return (self.axis, self.replicas) if other is None else (other, ALONE)


@dataclasses.dataclass(frozen=True, eq=False)
class FlatShard:
    """The part of one parameter that this rank steps.

    Attributes:
        name: of the parameter.
        tensor: 1-D, a view of the parameter's values; its `.grad` is the summed gradient's part.
        start, stop: where it lies in the flattened local parameter.
    """

    name: str
    tensor: nn.Parameter
    start: int
    stop: int


@dataclasses.dataclass(eq=False)
class Bucket:
    """Parameters that lie side by side in `flat` and travel together.

    Attributes:
        names, parameters: in their order in `flat`.
        flat: 1-D, the axis's size times `mine`.
        mine: 1-D, this rank's share.
        dtype: of gradients.
        axis: the ranks that share it.
        replicas: ranks that hold the same share (hybrid sharding); of one rank: none.
        late: gradients are summed over other axes before they are reduced.
        offsets: where each parameter begins in `flat`; last, where the padding does.
        resident: `mine` is a part of `flat`, which always has memory.
        pieces: those of this rank, and where each begins in `mine`.
        gradient, views: the whole gradient while it fills, and each parameter's place in it.
        missing: parameters whose gradient has not come.
        share: this rank's share of the summed gradient.
        landing: pinned host memory for it, where the host steps `mine`.
        gathering: values on their way.
        whole: `flat` has memory, and holds values or will once `gathering` is done.
        opened: whole for readers and writers outside of a step: what they leave is taken over.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    flat: Tensor
    mine: Tensor
    dtype: torch.dtype
    axis: Axis
    replicas: Axis
    late: bool
    offsets: list[int]
    resident: bool
    pieces: list[tuple[FlatShard, int]] = dataclasses.field(default_factory=list)
    gradient: Tensor | None = None
    views: list[Tensor] = dataclasses.field(default_factory=list)
    missing: set[int] = dataclasses.field(default_factory=set)
    share: Tensor | None = None
    landing: Tensor | None = None
    gathering: CollectiveWork | None = None
    whole: bool = True
    opened: bool = False

    def view(self, index: int) -> Tensor:
        """The place of one parameter's gradient; the whole gradient is made at the first."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.flat, dtype=self.dtype)
            self.gradient[self.offsets[-1] :].zero_()
            self.views = [
                self.gradient[start : start + parameter.numel()].view(parameter.shape)
                for start, parameter in zip(self.offsets, self.parameters, strict=False)
            ]
        return self.views[index]

    def take(self) -> Tensor:
        """The whole gradient, of which nothing is kept here."""
        assert self.gradient is not None
        whole, self.gradient = self.gradient, None
        self.views = []
        return whole

    def all_missing(self) -> None:
        """No gradient has come."""
        self.missing = set(range(len(self.parameters)))

    @torch.inference_mode(False)
    def part_from_readers(self) -> None:
        """Continue with new, empty storage: a reader that still has the old one (a `state_dict()`)
        keeps its values, else it is freed. Made in inference mode it could not be trained."""
        shapes = [parameter.shape for parameter in self.parameters]
        size, none = self.flat.numel(), self.flat.new_empty(0)
        self.flat = none
        for parameter in self.parameters:
            parameter.data = none
        self.flat = none.new_empty(size)
        for parameter, shape, start in zip(self.parameters, shapes, self.offsets, strict=False):
            parameter.data = self.flat[start : start + shape.numel()].view(shape)
        take_memory(self.flat)

    def part(self) -> Tensor:
        """This rank's share of `flat`, where it has memory."""
        size = self.mine.numel()
        return self.flat[size * self.axis.index : size * (self.axis.index + 1)]


def bucket_of(
    found: list[tuple[str, nn.Parameter]],
    dtype: torch.dtype,
    axis: Axis,
    *,
    replicas: Axis = ALONE,
    late: bool = False,
    resident: bool = True,
    on_host: bool = False,
    flat: Tensor | None = None,
) -> Bucket:
    """Move parameters (of one dtype, with their names) into a flat tensor that the axis divides.

    Args:
        found: names and parameters.
        dtype: of gradients.
        axis: the ranks that share the bucket. replicas: as in `Bucket`.
        late: as in `Bucket`.
        resident: `mine` is a part of `flat`, which always has memory; else it is a copy.
        on_host: that copy lies in the host's memory.
        flat: what `side_by_side` made of them. None: it is made here.
    """
    names, parameters = [n for n, _ in found], [p for _, p in found]
    if flat is None:
        flat = side_by_side(parameters, axis)
    offsets = _offsets(parameters)
    size = flat.numel() // axis.size
    begin, end = size * axis.index, size * (axis.index + 1)
    mine = flat[begin:end]
    if not resident:
        mine = to_host(mine) if on_host else mine.clone()
    bucket = Bucket(names, parameters, flat, mine, dtype, axis, replicas, late, offsets, resident)
    for name, parameter, start in zip(names, parameters, offsets, strict=False):
        low, high = max(start, begin), min(start + parameter.numel(), end)
        if parameter.requires_grad and low < high:
            piece = nn.Parameter(mine[low - begin : high - begin])
            piece.grad_dtype = dtype
            bucket.pieces.append((FlatShard(name, piece, low - start, high - start), low - begin))
    bucket.all_missing()
    return bucket


def side_by_side(parameters: list[nn.Parameter], axis: Axis) -> Tensor:
    """A flat tensor that the axis divides, of which the parameters are views from now on; what
    they held is copied, and zeros follow."""
    first, offsets = parameters[0], _offsets(parameters)
    size = -(-offsets[-1] // axis.size)
    flat = torch.zeros(size * axis.size, dtype=first.dtype, device=first.device)
    for parameter, start in zip(parameters, offsets, strict=False):
        place = flat[start : start + parameter.numel()].view(parameter.shape)
        place.copy_(parameter.detach())
        parameter.data = place
    return flat


def _offsets(parameters: list[nn.Parameter]) -> list[int]:
    """Where each parameter begins, and where the last one ends."""
    return [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory; pinned where it comes from a GPU, so that copies to and fro need
    not wait. On a CPU it is a copy too: the same memory, the same way."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach())


def give_memory(flat: Tensor) -> None:
    """Let a tensor whose storage is empty hold its elements; what they are is undefined."""
    _resize(flat, flat.numel() * flat.element_size())


def take_memory(flat: Tensor) -> None:
    """Free a tensor's elements; it and its views stay what they are, but must not be read."""
    _resize(flat, 0)


def _resize(flat: Tensor, nbytes: int) -> None:
    # As an operation of torch's it is counted by the memory counter (`training.memory`).
    resize: Any = torch.ops.inductor.resize_storage_bytes_
    resize(flat, nbytes)
