"""Dispatch of tokens to the ranks that hold their experts, and the way back.

    router          index [T, k]: k experts of each of this rank's T tokens
    route           counts by expert -> all-to-all (8 bytes an expert) -> sizes, read by the host
    dispatch        rows of H, sorted by expert -> all-to-all -> [R, H], the rows of my experts
    (my experts)    [R, H] -> [R, H]
    combine         [R, H] -> all-to-all -> [T k, H], in the order of `index`

Backward is the same in the other direction: what combine brought back, its gradient takes there,
and no counts are sent (Lepikhin et al. 2021, GShard, section 3.2; Megatron-Core's `alltoall`
dispatcher). No token is dropped: R is whatever the routers of all ranks chose.

All-to-alls are uneven, and torch takes their sizes from the host: on CUDA that is one read of 2 ep
numbers for each set of experts and forward. Padded to T k rows a pair of ranks no size would be
read, and ep times the bytes would be sent.

Legend: T tokens of this rank, k experts of a token, H hidden, R rows that arrive, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hocket.runtime.collectives import all_to_all
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder


@dataclasses.dataclass(eq=False)
class Routes:
    """Where the rows of one call go, and what arrives.

    Attributes:
        order: [T k] int64, the pairs of token and expert sorted by expert.
        choices: k.
        sent, received: rows to and from each rank of the axis.
        expert_ids: [R] int64, number among this rank's experts of each row that arrives.
        load: [E of this rank] int64, rows of each.
        axis, recorder: of the messages.
    """

    order: Tensor
    choices: int
    sent: list[int]
    received: list[int]
    expert_ids: Tensor
    load: Tensor
    axis: Axis
    recorder: Recorder


@torch.no_grad()
def route(index: Tensor, num_experts: int, axis: Axis, recorder: Recorder) -> Routes:
    """Exchange how many rows go where.

    Args:
        index: [T, k] int64, experts of each token, of all experts of the model.
        num_experts: E of this rank; the rank of index i on the axis holds i E to (i + 1) E - 1.
        axis: the ranks that together hold all experts.
        recorder: of their messages.
    """
    flat = index.reshape(-1)
    counts = flat.new_zeros(axis.size * num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    arriving = all_to_all(counts, axis, recorder).view(axis.size, num_experts)
    sizes = torch.stack([counts.view(axis.size, num_experts).sum(1), arriving.sum(1)])
    sent, received = _on_host(sizes, flat.numel())
    own = torch.arange(num_experts, device=index.device).repeat(axis.size)
    return Routes(
        order=torch.argsort(flat, stable=True),
        choices=index.shape[-1],
        sent=sent,
        received=received,
        expert_ids=torch.repeat_interleave(own, arriving.reshape(-1), output_size=sum(received)),
        load=arriving.sum(0),
        axis=axis,
        recorder=recorder,
    )


def _on_host(sizes: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """The rows to and from each rank: the one read of the device. Tensors without values (of a
    rehearsal or a forecast of memory) stand for tokens that are spread evenly."""
    if isinstance(sizes, FakeTensor):
        count = sizes.cpu().shape[1]
        even = [rows // count + (i < rows % count) for i in range(count)]
        return even, even
    sent, received = sizes.tolist()
    return sent, received


def dispatch(hidden: Tensor, routes: Routes) -> Tensor:
    """[T, H] of tokens to [R, H]: for each choice of any rank's token that is one of this rank's
    experts, its row."""
    found: Tensor = _Dispatch.apply(hidden, routes)  # type: ignore[no-untyped-call]
    return found


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """[R, H] of this rank's experts to [T k, H]: what the experts of each token made of it."""
    found: Tensor = _Combine.apply(rows, routes)  # type: ignore[no-untyped-call]
    return found


def _there(hidden: Tensor, routes: Routes) -> Tensor:
    return all_to_all(
        hidden, routes.axis, routes.recorder, sent=routes.sent, received=routes.received
    )


def _back(rows: Tensor, routes: Routes) -> Tensor:
    """In the order of the choices. Counted by what arrives, as the way there by what leaves: both
    are T k rows, whatever the routers choose."""
    found = all_to_all(
        rows, routes.axis, routes.recorder,
        sent=routes.received, received=routes.sent, count_received=True,
    )  # fmt: skip
    ordered = torch.empty_like(found)
    ordered[routes.order] = found
    return ordered


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routes: Routes) -> Tensor:  # type: ignore[override]
        ctx.routes = routes
        return _there(hidden[routes.order // routes.choices], routes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        each = _back(grad.contiguous(), ctx.routes)
        return each.view(-1, ctx.routes.choices, each.shape[-1]).sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:  # type: ignore[override]
        ctx.routes = routes
        return _back(rows.contiguous(), routes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _there(grad[ctx.routes.order], ctx.routes), None
