"""Sequence parallelism: between split blocks each tensor rank holds a slice of every sequence.

    slice -gather-> whole -> column, row products -> partial sums -scatter_sum-> slice

    forward         backward        function
    all-gather      reduce-scatter  SequenceEntry     a slice, then whole for layers that are split
    reduce-scatter  all-gather      scatter_sum       partial sums, then a slice of the sum
    all-gather      slice           gather_replicated a slice, then whole: replicated computation
    slice           all-gather      shard_replicated  whole on every rank, then a slice

(The functions g and its conjugate of Korthikanti et al. 2022, section 4.2.2.) The whole input of
split products is not kept for their backward: the slice is, and is gathered once more, as in that
paper. The sequence is the second dim from the end; of tokens in one row, the rows are dealt
instead, which comes to the same wherever the way in and the way out are the same.

In a compiled graph (on CUDA) the collectives are functional ones, which the compiler can move
next to the matmuls; what is kept of an input is the compiler's choice there.

Legend: B batch, S sequence, s = S / tp, H hidden.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import (
    all_gather,
    all_gather_flat,
    reduce_scatter,
    traced_all_gather,
    traced_reduce_scatter,
)
from hocket.runtime.linear import Kept
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel import overlap

IN_GRAPH = "in_graph"
"""Attribute of a hook that a compiled graph can hold."""


def gather_sequence(piece: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """The axis's slices [..., s, H] side by side: [..., S, H]. Of gradients it knows only what a
    compiled graph knows."""
    *lead, rows, width = piece.shape
    if torch.compiler.is_compiling():
        return _gather_in_graph(piece, axis)
    found = all_gather(piece if lead else piece[None], axis, recorder)
    if piece.shape[:-2].numel() == 1:
        return found.view(*lead, axis.size * rows, width)
    found = found.view(axis.size, -1, rows, width).transpose(0, 1)
    return found.reshape(*lead, axis.size * rows, width)


def begin_gather(piece: Tensor, axis: Axis, recorder: Recorder) -> Callable[[], Tensor]:
    """As `gather_sequence`, begun; what is returned waits for it, and gives the result."""
    *lead, rows, width = piece.shape
    flat = piece.detach().contiguous().view(-1)
    whole = flat.new_empty(axis.size * flat.numel())
    start = recorder.mark()
    work = all_gather_flat(whole, flat, axis, recorder)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
            recorder.add(
                start, "communication", "all-gather", f"all-gather {axis.name}", axis=axis.name,
                bytes=whole.numel() * whole.element_size(),
            )  # fmt: skip
        found = whole.view(axis.size, -1, rows, width).transpose(0, 1)
        return found.reshape(*lead, axis.size * rows, width)

    return finish


def scatter_sequence(whole: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """This rank's slice [..., s, H] of the sum over the axis of `whole` [..., S, H]."""
    *lead, rows, width = whole.shape
    assert rows % axis.size == 0, (tuple(whole.shape), axis.size)
    if torch.compiler.is_compiling():
        return _scatter_in_graph(whole, axis)
    dealt = whole.reshape(-1, axis.size, rows // axis.size, width).transpose(0, 1)
    found = reduce_scatter(dealt.contiguous(), axis, recorder)
    return found.view(*lead, rows // axis.size, width)


# Inductor runs a collective and the matmul next to it in chunks (asynchronous tensor parallelism,
# `_inductor.fx_passes.micro_pipeline_tp`) where it finds the collective along dim 0, or with
# nothing but `chunk` and `cat` between the two. Of one sequence the first is a view.


def _gather_in_graph(piece: Tensor, axis: Axis) -> Tensor:
    """`gather_sequence` of a compiled graph, as Inductor recognizes it."""
    *lead, rows, width = piece.shape
    if piece.shape[:-2].numel() == 1:
        found = traced_all_gather(piece.reshape(rows, width), axis)
        return found.view(*lead, axis.size * rows, width)
    return torch.cat(traced_all_gather(piece, axis).chunk(axis.size), piece.ndim - 2)


def _scatter_in_graph(whole: Tensor, axis: Axis) -> Tensor:
    """`scatter_sequence` of a compiled graph, as Inductor recognizes it."""
    *lead, rows, width = whole.shape
    if whole.shape[:-2].numel() == 1:
        found = traced_reduce_scatter(whole.reshape(rows, width), axis)
        return found.view(*lead, rows // axis.size, width)
    return traced_reduce_scatter(torch.cat(whole.chunk(axis.size, whole.ndim - 2)), axis)


def own_slice(whole: Tensor, axis: Axis) -> Tensor:
    """This rank's slice [..., s, H] of `whole` [..., S, H], contiguous."""
    rows = whole.shape[-2]
    assert rows % axis.size == 0, (tuple(whole.shape), axis.size)
    return whole.narrow(-2, axis.index * (rows // axis.size), rows // axis.size).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.recorder = axis, recorder
        return gather_sequence(x, axis, recorder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return scatter_sequence(grad, ctx.axis, ctx.recorder), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.recorder = axis, recorder
        found = scatter_sequence(x, axis, recorder)
        # No view of what is forgotten here: some models add to it in place (Falcon).
        whole: Tensor = torch.ops.aten._unsafe_view.default(found, found.shape)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gather_sequence(grad, ctx.axis, ctx.recorder), None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return gather_sequence(x, axis, recorder)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return own_slice(grad, ctx.axis), None, None


class _ShardReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.recorder = axis, recorder
        return own_slice(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gather_sequence(grad, ctx.axis, ctx.recorder), None, None


def gather_whole(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """The whole [..., S, H] of slices [..., s, H], for layers that are split: its gradients are
    partial sums."""
    if torch.compiler.is_compiling():
        return gather_sequence(x, axis, recorder)
    out: Tensor = _Gather.apply(x, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def scatter_sum(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """A slice [..., s, H] of the sum over the axis of `x` [..., S, H]."""
    if torch.compiler.is_compiling():
        return scatter_sequence(x, axis, recorder)
    out: Tensor = _ScatterSum.apply(x, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def gather_replicated(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """The whole of slices, for replicated computation: its gradients are whole."""
    out: Tensor = _GatherReplicated.apply(x, axis, recorder)  # type: ignore[no-untyped-call]
    return out


def shard_replicated(x: Tensor, axis: Axis, recorder: Recorder) -> Tensor:
    """A slice of what every rank has computed; its gradient is made whole again."""
    out: Tensor = _ShardReplicated.apply(x, axis, recorder)  # type: ignore[no-untyped-call]
    return out


class GatheredAgain:
    """Makes the whole input again of the slice that backward has kept.

    Products that share the input share one gathering: it is freed when the last has read it.
    """

    __slots__ = ("_axis", "_finish", "_left", "_readers", "_recorder", "_whole")

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self._axis, self._recorder = axis, recorder
        self._readers = self._left = 0
        self._whole: Tensor | None = None
        self._finish: Callable[[], Tensor] | None = None

    def promise(self) -> None:
        """One more product will read the input in its backward."""
        self._readers += 1

    def begin(self, piece: Tensor) -> None:
        """Begin to gather, if that was not done; the next call waits."""
        if self._whole is None and self._finish is None:
            self._finish = begin_gather(piece, self._axis, self._recorder)
            self._left = self._readers

    def __call__(self, piece: Tensor) -> Tensor:
        """The input [..., S, H] of its slice [..., s, H]."""
        if self._finish is not None:
            self._whole, self._finish = self._finish(), None
        if self._whole is None:
            self._whole = gather_sequence(piece, self._axis, self._recorder)
            self._left = self._readers
        self._left -= 1
        found = self._whole
        if self._left == 0:
            self._whole = None
        return found


_OPENED = "_opened_block"
"""Attribute of a block that `open_block` opens: its hook, its entry, and the handles of hooks."""


class SequenceEntry:
    """The way of one slice into the split layers that share it: one all-gather for all of them.

    A block whose forward reads the length of its input (attention) is opened by a hook, before it
    runs; elsewhere the first layer that asks gathers. References are dropped when the last of the
    `layers` siblings has asked.
    """

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self.axis = axis
        self.recorder = recorder
        self.layers: list[nn.Module] = []
        self.overlaps = overlap.overlaps
        self.opened_by_block = False
        self._late: dict[int, overlap.Late] = {}
        self._source: Tensor | None = None
        self._whole: Tensor | None = None
        self._kept: Kept | None = None
        self._asked = 0

    def __call__(
        self, x: Tensor, layer: nn.Module
    ) -> tuple[Tensor, Kept | None, overlap.Late | None]:
        """(the whole input, what to keep of it, what the layer runs with where it overlaps); `x`
        is the slice, or what `open` returned."""
        if self.opened_by_block:
            if x is not self._whole:  # changed on the way: autograd keeps it whole
                return x, None, None
        elif self._source is not x:
            self._gather(x)
            self._source = x
        whole, kept = self._whole, self._kept
        assert whole is not None
        late = self._late.pop(id(layer), None) if self._late else None
        self._asked += 1
        if self._asked == len(self.layers):
            self.close()
        return whole, kept, late

    def open(self, x: Tensor) -> Tensor:
        """Gather for the layers of a block that is about to run."""
        self._gather(x)
        assert self._whole is not None
        return self._whole

    def close(self) -> None:
        """Forget the input."""
        self._source = self._whole = self._kept = None
        self._late = {}

    def _gather(self, x: Tensor) -> None:
        self._asked = 0
        self._kept, self._late = None, {}
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = GatheredAgain(self.axis, self.recorder)
            self._kept = (x.detach(), again)
            if self.overlaps(x):
                self._whole, self._late = overlap.begin(
                    x, self.layers, self.axis, self.recorder, gathered=again,
                    whole=lambda piece: gather_sequence(piece, self.axis, self.recorder),
                )  # fmt: skip
                return
        self._whole = gather_whole(x, self.axis, self.recorder)


def open_block(module: nn.Module, name: str, entry: SequenceEntry) -> None:
    """Let a block see whole sequences: its first argument (`name`) is gathered before it runs."""
    entry.opened_by_block = True

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (entry.open(args[0]), *args[1:]), kwargs
        return args, {**kwargs, name: entry.open(kwargs[name])}

    def after(_: nn.Module, args: Any, output: Any) -> None:
        entry.close()

    setattr(before, IN_GRAPH, True)
    setattr(after, IN_GRAPH, True)
    handles = (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    )
    setattr(module, _OPENED, (before, entry, handles))


def forward_from_slice(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module, which gathers a block's input itself, in place of `open_block`'s
    hooks: what runs it again starts from the slice."""
    inner: Callable[..., Any] = module.forward
    opened = vars(module).pop(_OPENED, None)
    if opened is None:
        return inner
    before, entry, handles = opened
    for handle in handles:
        handle.remove()

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(module, args, kwargs)
        try:
            return inner(*args, **kwargs)
        finally:
            entry.close()

    return forward


def gather_before(module: nn.Module, axis: Axis, recorder: Recorder) -> None:
    """Let a module that every rank holds whole see whole sequences."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
        return (gather_replicated(args[0], axis, recorder), *args[1:])

    module.register_forward_pre_hook(before)


def slice_after(module: nn.Module, axis: Axis, recorder: Recorder) -> None:
    """Let a module that every rank holds whole return a slice."""

    def after(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return shard_replicated(output, axis, recorder)

    module.register_forward_hook(after)


def whole_positions(module: nn.Module, axis: Axis) -> None:
    """Let a position embedding that counts the tokens it is given count whole sequences: what it
    returns is cut (`cut_after`). One that gets whole positions already is left alone."""
    at = list(inspect.signature(module.forward).parameters).index("position_ids")

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[at] if at < len(args) else kwargs.get("position_ids")
        length = _length(args, kwargs, given)
        if length is None:
            return None
        if given is not None and given.shape[-1] != length:
            return None
        whole = torch.arange(axis.size * length, device=next(module.parameters()).device)
        return args[:at], {**kwargs, "position_ids": whole}

    module.register_forward_pre_hook(before, with_kwargs=True)


def own_positions(module: nn.Module, axis: Axis) -> None:
    """Tell a module that embeds a slice [B, s, H], and adds what belongs to positions, which
    positions these are. Whole ones [B, S] are cut."""
    at = list(inspect.signature(module.forward).parameters).index("position_ids")

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        length = kwargs["inputs_embeds"].shape[1]
        given = args[at] if at < len(args) else kwargs.get("position_ids")
        if given is not None and given.shape[-1] == axis.size * length:
            own = given.narrow(-1, axis.index * length, length)
        else:
            own = torch.arange(length, device=kwargs["inputs_embeds"].device).unsqueeze(0)
            own = own + axis.index * length
        return args[:at], {**kwargs, "position_ids": own}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _length(args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Tensor | None) -> int | None:
    """Tokens of a slice, as a position embedding hears of them: from the hidden state, one of its
    features, or its size; where no tokens are `given`, from positions counted for it. None where it
    has another input, which is whole."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    if first is None and given is not None:
        return given.shape[-1]
    if isinstance(first, Tensor):
        return first.shape[1] if first.is_floating_point() and first.ndim > 1 else None
    return int(first[1]) if isinstance(first, tuple) else None


def cut_after(module: nn.Module, axis: Axis) -> None:
    """Let a position embedding return this rank's slice; its weight sees no other tokens."""

    def after(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return own_slice(output, axis) if output.ndim > 1 else output

    module.register_forward_hook(after)
