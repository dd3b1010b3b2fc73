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
numbers for each set of experts and forward (none where a layer is recomputed, which has them from
its first run), and what needs no size (the order of the rows, and the rows in that order) is
enqueued before it, so that the device works while the host wakes up. Padded to T k rows a pair of
ranks no size would be read, and ep times the bytes would be sent; `gathered` reads nothing, for
steps of few tokens.

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
from hocket.runtime.recompute import found_once
from hocket.runtime.record import Recorder


@dataclasses.dataclass(eq=False)
class Routes:
    """Where the rows of one call go, and what arrives.

    Attributes:
        order: [T k] int64, the pairs of token and expert sorted by expert.
        choices: k.
        arriving: [ep, E of this rank] int64, rows of each rank for each of this one's experts.
        load: [E of this rank] int64, rows of each.
        axis, recorder: of the messages.
        sizes: on their way to the host.
        sent, received: rows to and from each rank of the axis, once they are settled.
    """

    order: Tensor
    choices: int
    arriving: Tensor
    load: Tensor
    axis: Axis
    recorder: Recorder
    sizes: OnHost
    sent: list[int] = dataclasses.field(default_factory=list)
    received: list[int] = dataclasses.field(default_factory=list)

    def settle(self) -> None:
        """Wait until the host knows the sizes."""
        both = self.sizes.read()
        self.sent, self.received = both[: self.axis.size], both[self.axis.size :]

    def expert_ids(self) -> Tensor:
        """[R] int64, number among this rank's experts of each row that arrives."""
        return experts_of_rows(self.arriving, sum(self.received))


def experts_of_rows(arriving: Tensor, rows: int) -> Tensor:
    """[rows] int64, number among this rank's experts of each row, of `arriving` [ranks, E] rows of
    each rank for each of them: rows come rank after rank, sorted by expert."""
    ranks, count = arriving.shape
    own = torch.arange(count, device=arriving.device).repeat(ranks)
    return torch.repeat_interleave(own, arriving.reshape(-1), output_size=rows)


@torch.no_grad()
def route(index: Tensor, num_experts: int, axis: Axis, recorder: Recorder) -> Routes:
    """Exchange how many rows go where; `Routes.settle` reads it.

    Args:
        index: [T, k] int64, experts of each token, of all experts of the model.
        num_experts: E of this rank; the rank of index i on the axis holds i E to (i + 1) E - 1.
        axis: the ranks that together hold all experts.
        recorder: of their messages.
    """
    flat = index.reshape(-1)
    counts = flat.new_zeros(axis.size * num_experts).scatter_add_(0, flat, torch.ones_like(flat))

    def exchange() -> tuple[Tensor, Tensor, OnHost]:
        arriving = all_to_all(counts, axis, recorder).view(axis.size, num_experts)
        sizes = torch.cat([counts.view(axis.size, num_experts).sum(1), arriving.sum(1)])
        rows, more = divmod(flat.numel(), axis.size)
        even = [rows + (i < more) for i in range(axis.size)]
        return counts, arriving, OnHost(sizes, even + even)

    # A layer that is recomputed knows them: nothing is sent, and the host does not wait.
    (sent, arriving, sizes), again = found_once(exchange)
    if again:
        torch._assert_async((sent == counts).all(), OTHER_CHOICE)
    return Routes(
        order=torch.argsort(flat, stable=True),
        choices=index.shape[-1],
        arriving=arriving,
        load=arriving.sum(0),
        axis=axis,
        recorder=recorder,
        sizes=sizes,
    )


OTHER_CHOICE = "a router chose other experts when its layer was recomputed: it is not deterministic"


class OnHost:
    """Numbers on their way to the host.

    Args:
        sizes: [n] int64.
        assumed: n numbers in place of those of tensors without values (of a rehearsal or a forecast
            of memory).
    """

    def __init__(self, sizes: Tensor, assumed: list[int]) -> None:
        self.assumed = assumed
        self.known: list[int] | None = None
        self.event: Any = None
        self.sizes = sizes
        if sizes.is_cuda:
            self.sizes = sizes.to("cpu", non_blocking=True)  # which is page-locked
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def read(self) -> list[int]:
        """Wait for them: the one read of the device, once."""
        if self.known is None:
            if self.event is not None:
                self.event.synchronize()
            fake = isinstance(self.sizes, FakeTensor)
            self.known = self.assumed if fake else self.sizes.tolist()
        return self.known


def dispatch(hidden: Tensor, routes: Routes) -> Tensor:
    """[T, H] of tokens to [R, H]: for each choice of any rank's token that is one of this rank's
    experts, its row."""
    found: Tensor = _Dispatch.apply(hidden, routes)  # type: ignore[no-untyped-call]
    return found


def combine_experts(rows: Tensor, routes: Routes) -> Tensor:
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
        rows = hidden[routes.order // routes.choices]  # enqueued before the host waits
        routes.settle()
        return _there(rows, routes)

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
