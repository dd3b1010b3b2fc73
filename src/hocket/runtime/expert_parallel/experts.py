"""Expert-parallel experts: a module of stacked experts of which this rank holds some.

They are whole or, with etp equal to tp, sliced over tp.

Every rank of the expert group brings tokens of its own. Without sequence parallelism tensor ranks
have the same tokens, and where experts are not sliced over tp each takes a part of them:

    tokens [T, H]  -> own part [T / tp, H] -> dispatch, experts, combine -> all-gather [T, H]

The module's own forward computes its experts, so that each family stays what transformers makes of
it. It is given one expert a row and routing weights of one; the weights are applied where the
token's rows are summed, in the same dtypes (transformers' `grouped_mm_experts_forward`).

Over several nodes a token can cross the network once for each node (`two_level`); on GPUs a library
can move the tokens (`deep_ep`).

Dispatch has one host read for each set of experts and forward. Without one (`gathered`, for the
decode steps of a server), each rank gets all tokens and computes the choices that are its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_gather
from hocket.runtime.expert_parallel.copies import ExpertCopies
from hocket.runtime.expert_parallel.deep_ep import (
    DeepEP,
    DeepRoutes,
    combine_deep,
    dispatch_deep,
)
from hocket.runtime.expert_parallel.dispatch import Routes, combine_experts, dispatch, route
from hocket.runtime.expert_parallel.gathered import (
    GatheredTokens,
    gather_tokens,
    load_of,
    own_choices,
    scatter_outputs,
)
from hocket.runtime.expert_parallel.two_level import (
    NodeAxes,
    NodeRoutes,
    collect,
    collect_weighted,
    route_by_node,
    spread,
)
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.experts import TensorParallelExperts
from hocket.runtime.tensor_parallel.regions import copy_two_to_axis, reduce_from_axis
from hocket.spec.errors import ModelError
from hocket.spec.expert_dispatch import ROWS_AT_ONCE


class ExpertParallelExperts(nn.Module):
    """A module of stacked experts, `forward(hidden_states, top_k_index, top_k_weights)`.

    Shapes: hidden_states [..., H] of T tokens, top_k_index and top_k_weights [T, k]; output as
    hidden_states. Made by class swap.

    Attributes:
        experts_axis: the ranks that together hold all experts.
        tokens_axis: ranks that are given the same tokens, each of which takes a part of them; of
            one rank: this rank's tokens are its own.
        load: [E of this rank] int64, rows of each expert since it was last set to zero.
        gathered: the steps whose tokens are gathered over the experts' ranks instead of dispatched
            to them, so that the host reads nothing; the module's own forward then skips choices of
            `num_experts`. None: none.
        copies: where experts with several copies are; `num_experts` are then this rank's slots, and
            `load` is of them. None: every expert is there once.
    """

    experts_axis: Axis
    tokens_axis: Axis
    node_axes: NodeAxes | None = None
    deep_ep: DeepEP | None = None
    experts_recorder: Recorder
    num_experts: int
    load: Tensor | None = None
    gathered: GatheredTokens | None = None
    copies: ExpertCopies | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        shape, width = hidden_states.shape, hidden_states.shape[-1]
        hidden, index, weights = hidden_states.reshape(-1, width), top_k_index, top_k_weights
        if index.shape != weights.shape or index.ndim != 2 or len(index) != len(hidden):
            raise ModelError(
                f"{type(self).__name__} is given {list(shape)}, choices {list(index.shape)} and "
                f"weights {list(weights.shape)}; ep takes [tokens, hidden size], and [tokens, k] "
                "of both"
            )
        tokens_axis, recorder = self.tokens_axis, self.experts_recorder
        gathered = self.gathered
        if gathered and not gathered.takes(len(hidden), index.shape[1], self.experts_axis.size):
            gathered = None
        if gathered and tokens_axis.size > 1 and tokens_axis.ranks == self.experts_axis.ranks:
            # All ranks have all tokens: each computes its experts, and one all-reduce sums them.
            if self.copies is not None:
                index = self.copies.chosen(index, 0)
            hidden, weights = copy_two_to_axis(hidden, weights, tokens_axis, recorder)
            out = self._of_present(hidden, index, weights)
            return reduce_from_axis(out, tokens_axis, recorder).view(shape)
        sizes = _sizes(len(hidden), tokens_axis.size)
        if tokens_axis.size > 1:
            first, count = sum(sizes[: tokens_axis.index]), sizes[tokens_axis.index]
            index = index.narrow(0, first, count)
            hidden, weights = _Part.apply(  # type: ignore[no-untyped-call]
                hidden, weights, sizes, (tokens_axis, recorder)
            )
        if self.copies is not None:
            index = self.copies.chosen(index, self.experts_axis.index)
        if gathered is not None:
            widest = gathered.rows
            most = sizes[0] if widest is None else -(-widest // tokens_axis.size)
            out = self._of_gathered(hidden, index, weights, most)
        else:
            out = self._own(hidden, index, weights)
        if tokens_axis.size > 1:
            out = _Whole.apply(out, sizes, tokens_axis, recorder)  # type: ignore[no-untyped-call]
        return out.view(shape)

    def _own(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[T, H] of tokens that no other rank has, to the sum of what their experts make."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # backward's messages go all the same
        if self.node_axes is not None:
            return self._own_by_node(hidden, index, weights, self.node_axes)
        if self.deep_ep is not None:
            return self._own_by_library(hidden, index, weights, self.deep_ep)
        routes = route(index, self.num_experts, self.experts_axis, self.experts_recorder)
        self._count(routes.load)
        rows = self._of_rows(dispatch(hidden, routes), routes, weights)
        each = combine_experts(rows, routes) * weights.reshape(-1, 1)
        return each.view(*index.shape, hidden.shape[-1]).sum(1).to(hidden.dtype)

    def _own_by_node(
        self, hidden: Tensor, index: Tensor, weights: Tensor, axes: NodeAxes
    ) -> Tensor:
        """As `_own`, in two levels."""
        if torch.is_grad_enabled() and not weights.requires_grad:
            weights = weights.detach().requires_grad_()
        routes = route_by_node(index, self.num_experts, axes, self.experts_recorder)
        self._count(routes.load)
        staged, staged_weights = spread(hidden, routes.across), spread(weights, routes.across)
        rows = self._of_rows(spread(staged, routes.inside), routes, weights)
        summed = collect_weighted(rows, staged_weights, routes.inside).to(hidden.dtype)
        return collect(summed, routes.across)

    def _own_by_library(
        self, hidden: Tensor, index: Tensor, weights: Tensor, deep: DeepEP
    ) -> Tensor:
        """As `_own`, by DeepEP."""
        if torch.is_grad_enabled() and not weights.requires_grad:
            weights = weights.detach().requires_grad_()
        every = self.num_experts * self.experts_axis.size
        rows, of_rows, routes = dispatch_deep(hidden, index, weights, every, deep)
        self._count(routes.load)
        each = self._of_rows(rows, routes, weights) * of_rows.unsqueeze(-1)
        return combine_deep(each.to(hidden.dtype), routes)

    def _of_rows(
        self, rows: Tensor, routes: Routes | NodeRoutes | DeepRoutes, like: Tensor
    ) -> Tensor:
        """[R, H] of rows of this rank's experts, to what they make of them. `like` has the dtype of
        routing weights."""
        if not len(rows):
            return _NoTokens.apply(rows, *self.parameters(recurse=False))  # type: ignore[no-any-return, no-untyped-call]
        chosen = routes.expert_ids().unsqueeze(-1)
        return super().forward(rows, chosen, like.new_ones(chosen.shape))  # type: ignore[misc, no-any-return]

    def _of_gathered(self, hidden: Tensor, index: Tensor, weights: Tensor, most: int) -> Tensor:
        """As `_own`; `most`: tokens of the rank that has most."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        axis, recorder = self.experts_axis, self.experts_recorder
        every = gather_tokens((hidden, index, weights), most, axis, recorder)
        return scatter_outputs(self._of_present(*every), len(hidden), axis, recorder)

    def _of_present(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[N, H] of tokens, to what those of their experts make that are on this rank."""
        count = self.num_experts
        own = own_choices(index, self.experts_axis.index * count, count)
        self._count(load_of(own, count))
        forward = super().forward  # type: ignore[misc]
        if torch.is_grad_enabled():
            return forward(hidden, own, weights)  # type: ignore[no-any-return]
        # Their arrays are as long as if all tokens chose these experts: no longer than of one rank.
        most = max(len(hidden) // self.experts_axis.size, -(-ROWS_AT_ONCE // index.shape[-1]))
        pieces = zip(*(torch.split(x, most) for x in (hidden, own, weights)), strict=True)
        return torch.cat([forward(*piece) for piece in pieces])

    @torch.no_grad()
    def _count(self, load: Tensor) -> None:
        self.load = load.clone() if self.load is None else self.load.add_(load)


def _sizes(tokens: int, degree: int) -> list[int]:
    """Tokens of each rank that takes a part of them: the first take one more."""
    return [tokens // degree + (i < tokens % degree) for i in range(degree)]


class _Part(torch.autograd.Function):
    """This rank's part of tokens and of their weights; backward gathers the gradients of both."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weights: Tensor, sizes: list[int], among: tuple[Axis, Recorder]
    ) -> tuple[Tensor, Tensor]:
        ctx.sizes, (axis, ctx.recorder) = sizes, among
        ctx.axis = axis
        first, count = sum(sizes[: axis.index]), sizes[axis.index]
        return hidden.narrow(0, first, count).clone(), weights.narrow(0, first, count).clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        both = torch.cat([dx, dy.to(dx.dtype)], -1)  # as `regions._CopyTwo`
        whole = all_gather(both, ctx.axis, ctx.recorder, sizes=ctx.sizes)
        first, second = torch.split(whole, [dx.shape[-1], dy.shape[-1]], -1)
        return first.contiguous(), second.to(dy.dtype), None, None


class _Whole(torch.autograd.Function):
    """All tokens, of which each rank has a part; backward keeps this rank's part."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, part: Tensor, sizes: list[int], axis: Axis, recorder: Recorder
    ) -> Tensor:
        ctx.first, ctx.count = sum(sizes[: axis.index]), sizes[axis.index]
        return all_gather(part, axis, recorder, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.narrow(0, ctx.first, ctx.count), None, None, None


class _NoTokens(torch.autograd.Function):
    """Experts without a row: their gradients are zeros, and come when those of others do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.parameters = parameters
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, *(torch.zeros_like(p) if p.requires_grad else None for p in ctx.parameters)


@functools.cache
def sharded_experts_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The expert-parallel form of a class of stacked experts, sliced over tp or not."""
    if issubclass(kind, TensorParallelExperts):
        bases = (TensorParallelExperts, ExpertParallelExperts, kind.__bases__[-1])
        return type(f"ExpertParallel{kind.__name__}", bases, {})
    return type(f"ExpertParallel{kind.__name__}", (ExpertParallelExperts, kind), {})
