"""Applying a tensor plan to a module: parameters become local, layers change their class."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.embedding import vocab_parallel_class
from hocket.runtime.tensor_parallel.experts import sliced_experts_class
from hocket.runtime.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedInput,
    VocabParallelHead,
    close_after,
)
from hocket.runtime.tensor_parallel.sequence import (
    SequenceEntry,
    cut_after,
    gather_before,
    open_block,
    own_positions,
    slice_after,
    whole_positions,
)
from hocket.runtime.tensor_parallel.shards import Shards, take
from hocket.spec.errors import ModelError
from hocket.spec.placement import Placement
from hocket.spec.plan import (
    InputSlice,
    Patch,
    SequencePlan,
    Split,
    TensorPlan,
    WeightSegment,
    matched,
)

# Linear layers under another name: GPT-2's, with its weight stored [in, out], and Falcon's.
_TRANSPOSED = ("Conv1D",)
_LINEAR = ("FalconLinear",)


def apply_tensor_parallel(
    module: nn.Module,
    plan: TensorPlan | None,
    axis: Axis,
    recorder: Recorder,
    sequence: SequencePlan | None = None,
) -> dict[str, Placement]:
    """Split `module` in place over the tensor axis; with `sequence`, what lies between split blocks
    over slices of the sequence.

    Works on a module that holds values (each rank keeps its slices of them) and on one on the
    meta device. Modules the plan does not name, or that a pipeline cut has replaced, stay whole.

    Returns:
        The placement of every parameter, tied names included.

    Raises:
        LayoutError: heads, vocabulary or another count does not divide.
        ModelError: the plan splits a module of a kind that cannot be split that way, or one of
            two tied parameters only.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    if axis.size == 1 or plan is None:
        where = ("tp",) if axis.size > 1 else ()
        first: dict[int, str] = {}
        placements = {}
        for name, parameter in named:
            whole = Placement.whole(name, tuple(parameter.shape))
            owner = first.setdefault(id(parameter), name)
            placements[name] = dataclasses.replace(
                whole, replicated=where, tie=None if owner == name else owner
            )
        return placements
    work = _Splitting(axis, recorder, {id(p): n for n, p in reversed(named)}, sequence)
    for name, child in list(module.named_modules()):
        split = matched(plan.splits, name)
        if split is not None:
            work.split(child, name, split)
        for patch in matched(plan.patches, name) or ():
            _patch(child, patch, axis.size)
        for cut in matched(plan.inputs, name) or ():
            _slice_input(child, cut, axis)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in work.placements:
            kept = work.local.get(id(parameter))
            if kept is not None and kept[1] is not parameter:
                raise ModelError(
                    f"{name} is tied to {work.owners[id(parameter)]}, which the tensor plan "
                    "splits; the plan must split both identically"
                )
            work.whole(name, parameter)
    if sequence is not None:
        work.slice_sequences(module, sequence)
    work.forget_inputs(module)
    return {name: work.placements[name] for name, _ in named}


def copies_needed(plan: TensorPlan | None, degree: int) -> set[int]:
    """How often `degree` ranks hold key/value heads of this plan, besides once."""
    if plan is None:
        return set()
    return {
        degree // s.units
        for s in plan.segments()
        if s.copies and s.units < degree and degree % s.units == 0
    }


class _Splitting:
    """One module being split: what has become local so far."""

    def __init__(
        self,
        axis: Axis,
        recorder: Recorder,
        owners: dict[int, str],
        sequence: SequencePlan | None,
    ) -> None:
        self.axis = axis
        self.recorder = recorder
        self.owners = owners
        self.sequence = sequence
        self.placements: dict[str, Placement] = {}
        self.local: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.entries: dict[str, SharedInput | SequenceEntry] = {}
        self.styles: dict[str, Callable[[nn.Module, str, Split], None]] = {
            "column": self._column,
            "row": self._row,
            "vocab_head": self._head,
            "vocab_embedding": self._embedding,
            "experts": self._experts,
            "sum_grad": lambda child, name, split: None,
        }

    def split(self, child: nn.Module, name: str, split: Split) -> None:
        """Make the parameters of one module local and change its class."""
        parameters = dict(child.named_parameters(recurse=False))
        if not parameters:
            return  # replaced by a pipeline cut
        for key, parameter in parameters.items():
            full = f"{name}.{key}" if name else key
            placement = split.place(
                full, key, tuple(parameter.shape), self.axis.index, self.axis.size
            )
            if self.sequence is not None and split.style == "row" and not placement.sharded:
                placement = dataclasses.replace(placement, grad_sum=("tp",))  # a slice's bias
            self._place(child, key, parameter, placement)
        self.styles[split.style](child, name, split)

    def whole(self, name: str, parameter: nn.Parameter) -> None:
        """Place a parameter that no split names."""
        owner = self.owners[id(parameter)]
        module = name.rpartition(".")[0]
        partial = self.sequence is not None and self.sequence.sees_slices(module)
        self.placements[name] = dataclasses.replace(
            Placement.whole(name, tuple(parameter.shape), grad_sum=("tp",) if partial else ()),
            replicated=("tp",),
            tie=None if owner == name else owner,
        )

    def forget_inputs(self, module: nn.Module) -> None:
        """Let blocks whose split layers read several tensors forget the last of them when they end:
        what an entry holds otherwise ends with the last of its layers."""
        for name, entry in self.entries.items():
            gathered = any(getattr(layer, "gather", None) for layer in entry.layers)
            if gathered and isinstance(entry, SharedInput):
                close_after(module.get_submodule(name), entry)

    def slice_sequences(self, module: nn.Module, plan: SequencePlan) -> None:
        """Gather before what reads whole sequences, and cut what is added to a slice."""
        for name, child in list(module.named_modules()):
            if not any(True for _ in child.parameters()):
                continue  # replaced by a pipeline cut
            entry = self.entries.get(name)
            if name in plan.blocks and isinstance(entry, SequenceEntry):
                open_block(child, next(iter(inspect.signature(child.forward).parameters)), entry)
            elif name in plan.positions:
                if "position_ids" in inspect.signature(child.forward).parameters:
                    whole_positions(child, self.axis)
                cut_after(child, self.axis)
            elif name in plan.embedders:
                own_positions(child, self.axis)
            elif name in plan.replicated:
                gather_before(child, self.axis, self.recorder)
            elif name == plan.embedding and not hasattr(child, "slices"):
                slice_after(child, self.axis, self.recorder)

    def _place(
        self, child: nn.Module, key: str, parameter: nn.Parameter, placement: Placement
    ) -> None:
        owner = self.owners[id(parameter)]
        if owner != placement.name:
            placement = dataclasses.replace(placement, tie=owner)
            other = self.placements.get(owner)
            if other is not None and other.blocks != placement.blocks:
                raise ModelError(
                    f"{placement.name} is tied to {owner}; the plan must split both identically"
                )
        self.placements[placement.name] = placement
        if id(parameter) not in self.local:
            local = parameter
            if placement.local_shape != placement.shape:
                local = nn.Parameter(take(parameter.detach(), placement), parameter.requires_grad)
            # The original is kept, so that its id stays its own until the module is done.
            self.local[id(parameter)] = (parameter, local)
        child._parameters[key] = self.local[id(parameter)][1]

    def _linear(self, child: Any, name: str, kind: type[nn.Linear], style: str) -> None:
        own = type(child)
        transposed = own.__name__ in _TRANSPOSED
        plain = isinstance(child, nn.Linear) and own.forward is nn.Linear.forward
        if not (plain or transposed or own.__name__ in _LINEAR):
            raise ModelError(
                f"{name} is a {own.__name__}; the style {style} splits linear layers only"
            )
        if transposed:
            child.in_features, child.out_features = child.nx, child.nf
        child.__class__ = kind
        child.axis, child.recorder = self.axis, self.recorder
        child.transposed = transposed

    def _column(self, child: Any, name: str, split: Split) -> None:
        if "weight" not in child._parameters:
            return  # bare parameters held by heads, such as attention sinks
        self._linear(child, name, ColumnParallelLinear, split.style)
        self._enter(child, name.rpartition(".")[0])
        child.gather = self._shards(split.segments) if split.gather_output else None

    def _row(self, child: Any, name: str, split: Split) -> None:
        self._linear(child, name, RowParallelLinear, split.style)
        child.slices = self.sequence is not None
        child.scatter = self._shards(split.segments) if split.scatter_input else None

    def _head(self, child: Any, name: str, split: Split) -> None:
        self._linear(child, name, VocabParallelHead, split.style)
        self._enter(child, name)
        shares = [split.segments[0].slice(i, self.axis.size) for i in range(self.axis.size)]
        child.start = shares[self.axis.index][0]
        child.sizes = [rows for _, rows, _ in shares]
        child.shards = self._shards(split.segments)
        child.gather = None

    def _embedding(self, child: Any, name: str, split: Split) -> None:
        if not issubclass(type(child), nn.Embedding):
            raise ModelError(f"{name} is a {type(child).__name__}, not an embedding")
        child.__class__ = vocab_parallel_class(type(child))
        child.axis, child.recorder = self.axis, self.recorder
        child.slices = self.sequence is not None
        child.start = split.segments[0].slice(self.axis.index, self.axis.size)[0]

    def _experts(self, child: Any, name: str, split: Split) -> None:
        child.__class__ = sliced_experts_class(type(child))
        child.axis, child.recorder = self.axis, self.recorder
        child.slices = self.sequence is not None

    def _enter(self, child: Any, parent: str) -> None:
        kind = SharedInput if self.sequence is None else SequenceEntry
        entry = self.entries.setdefault(parent, kind(self.axis, self.recorder))
        entry.layers.append(child)
        child.entry = entry

    def _shards(self, segments: tuple[WeightSegment, ...]) -> Shards:
        return Shards(segments, self.axis.index, self.axis.size)


def _patch(module: nn.Module, patch: Patch, degree: int) -> None:
    value = patch.local(degree)
    if patch.on_config and hasattr(module, "config"):
        module.config = copy.copy(module.config)  # type: ignore[assignment]
        setattr(module.config, patch.attribute, value)
    elif not patch.on_config and hasattr(module, patch.attribute):
        setattr(module, patch.attribute, value)


def _slice_input(module: nn.Module, cut: InputSlice, axis: Axis) -> None:
    """Let the module see only this rank's share of an argument that carries all heads."""
    names = list(inspect.signature(module.forward).parameters)
    position = names.index(cut.argument) if cut.argument in names else None
    first, count, _ = WeightSegment(units=cut.units, what="heads", copies=True).slice(
        axis.index, axis.size
    )

    def share(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        grouped = value.unflatten(cut.dim, (-1, cut.units))  # type: ignore[no-untyped-call]
        dim = cut.dim if cut.dim < 0 else cut.dim + 1
        kept: Tensor = grouped.narrow(dim, first, count)
        return kept.flatten(dim - 1, dim)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cut.argument in kwargs:
            kwargs = {**kwargs, cut.argument: share(kwargs[cut.argument])}
        elif position is not None and position < len(args):
            args = (*args[:position], share(args[position]), *args[position + 1 :])
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)
