"""Dispatch in two levels: a token crosses the network once for each node that has experts of its.

    route     which nodes a token goes to, and its choices there; counts across nodes, then inside
              them, and one read of the host
    across    [T, H] -> all-to-all between the ranks of equal place in their nodes -> [R, H], a row
              for each token and node, with its choices and routing weights
    inside    [R, H] -> all-to-all between the ranks of a node -> [P, H], one row for each choice
              (my experts)  [P, H] -> [P, H]
    and back  what the experts of one node make of a token is weighted and summed there, so that one
              row of it returns across the network; the rows of several nodes are summed at home

With `direct` dispatch (`dispatch`) a row crosses for each choice: of k choices spread over N nodes
N (1 - (1 - 1/N)^k) rows remain, and where the router is limited to M nodes, at most M (DeepSeek-V3,
Liu et al. 2024, section 3.2.2). The copies are made inside a node, on its faster links.

Sums run over choices in their order, by gathers alone: no atomic addition, so that a run repeats
bit by bit.

Legend: T tokens of this rank, k experts of a token, H hidden, N nodes, L ranks of a node, E experts
of a rank, R rows that other nodes' and this node's tokens bring, P rows of this rank's experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_to_all
from hocket.runtime.expert_parallel.dispatch import OTHER_CHOICE, OnHost, experts_of_rows
from hocket.runtime.mesh import Axis
from hocket.runtime.recompute import found_once
from hocket.runtime.record import Recorder


@dataclasses.dataclass(frozen=True)
class NodeAxes:
    """The ranks that together hold all experts, as nodes.

    Attributes:
        across: the ranks of equal place, one of each node, in order of the nodes.
        inside: the ranks of this rank's node.
    """

    across: Axis
    inside: Axis


@dataclasses.dataclass(eq=False)
class Level:
    """Rows of tokens that go to several places, and what comes back of each.

    Attributes:
        slots: places that a token may go to (N across nodes, k inside).
        order: [T slots] int64, pairs of token and slot sorted by place; those that go nowhere last.
        axis, recorder: of the messages.
        sent, received: pairs to and from each rank of the axis.
    """

    slots: int
    order: Tensor
    axis: Axis
    recorder: Recorder
    sent: list[int] = dataclasses.field(default_factory=list)
    received: list[int] = dataclasses.field(default_factory=list)

    def pairs(self) -> Tensor:
        """[sum(sent)] int64, the pairs that go somewhere."""
        return self.order[: sum(self.sent)]

    def go(self, tokens: Tensor) -> Tensor:
        """[T, ...] to [sum(received), ...]: a row for each pair."""
        rows = tokens[self.pairs() // self.slots]
        return all_to_all(rows, self.axis, self.recorder, sent=self.sent, received=self.received)

    def come_back(self, rows: Tensor) -> Tensor:
        """[sum(received), ...] to [sum(sent), ...], in the order of `pairs`."""
        return all_to_all(
            rows.contiguous(), self.axis, self.recorder,
            sent=self.received, received=self.sent, count_received=True,
        )  # fmt: skip

    def summed(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """[sum(sent), ...] of pairs to [T, ...] of tokens, in order of their slots.

        Args:
            weights: [T, slots] of each pair. None: ones.
        """
        count = sum(self.sent)
        place = torch.full_like(self.order, count)
        place[self.pairs()] = torch.arange(count, device=place.device)
        place = place.view(-1, self.slots)
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        total: Tensor | None = None
        for slot in range(self.slots):
            each = padded[place[:, slot]]
            if weights is not None:
                each = each * weights[:, slot : slot + 1]
            total = each if total is None else total + each
        assert total is not None
        return total


@dataclasses.dataclass(eq=False)
class NodeRoutes:
    """Where the tokens of one call go.

    Attributes:
        across, inside: the two levels.
        index: [R, k] int64, choices of the rows that arrive across nodes, among the node's experts;
            those of other nodes' experts are L E.
        arriving: [L, E] int64, rows of each rank of the node for each of this rank's experts.
    """

    across: Level
    inside: Level
    index: Tensor
    arriving: Tensor

    @property
    def load(self) -> Tensor:
        """[E] int64, rows of each of this rank's experts."""
        return self.arriving.sum(0)

    def expert_ids(self) -> Tensor:
        """[P] int64, number among this rank's experts of each row that arrives."""
        return experts_of_rows(self.arriving, sum(self.inside.received))


@torch.no_grad()
def route_by_node(
    index: Tensor, num_experts: int, axes: NodeAxes, recorder: Recorder
) -> NodeRoutes:
    """Exchange how many rows go where, and the choices themselves. Reads the device once.

    Args:
        index: [T, k] int64, experts of each token, of all experts of the model.
        num_experts: E of this rank; rank l of node n holds (n L + l) E to (n L + l + 1) E - 1.
        axes: the ranks that together hold all experts.
        recorder: of their messages.
    """
    nodes, ranks = axes.across.size, axes.inside.size
    of_node = ranks * num_experts
    tokens, choices = index.shape
    node = index // of_node
    goes = index.new_zeros(tokens, nodes).scatter_(1, node, 1)

    def exchange() -> tuple[Tensor, Tensor, OnHost]:
        flat = index.reshape(-1)
        counts = flat.new_zeros(nodes * of_node).scatter_add_(0, flat, torch.ones_like(flat))
        asked = torch.cat([goes.sum(0).unsqueeze(1), counts.view(nodes, of_node)], 1)
        brought = all_to_all(asked, axes.across, recorder)
        pairs = brought[:, 1:].sum(0)
        arriving = all_to_all(pairs, axes.inside, recorder).view(ranks, num_experts)
        sizes = torch.cat(
            [asked[:, 0], brought[:, 0], pairs.view(ranks, num_experts).sum(1), arriving.sum(1)]
        )
        crossing = round(tokens * (1 - (1 - 1 / nodes) ** choices))
        inside = [tokens * choices // ranks] * ranks
        assumed = [crossing] * nodes * 2 + inside * 2
        return torch.cat([counts, pairs]), arriving, OnHost(sizes, assumed)

    (known, arriving, sizes), again = found_once(exchange)
    if again:
        flat = index.reshape(-1)
        counts = flat.new_zeros(nodes * of_node).scatter_add_(0, flat, torch.ones_like(flat))
        torch._assert_async((known[: len(counts)] == counts).all(), OTHER_CHOICE)
    places = torch.arange(nodes, device=index.device).expand(tokens, nodes)
    places = torch.where(goes > 0, places, nodes)
    across = Level(nodes, torch.argsort(places.reshape(-1), stable=True), axes.across, recorder)
    parts = sizes.read()
    across.sent, across.received = parts[:nodes], parts[nodes : 2 * nodes]
    arrived = across.go(index)
    first = axes.across.index * of_node
    here = (arrived >= first) & (arrived < first + of_node)
    arrived = torch.where(here, arrived - first, of_node)
    inside = Level(
        choices, torch.argsort(arrived.reshape(-1), stable=True), axes.inside, recorder,
        sent=parts[2 * nodes : 2 * nodes + ranks], received=parts[2 * nodes + ranks :],
    )  # fmt: skip
    return NodeRoutes(across, inside, arrived, arriving)


def spread(tokens: Tensor, level: Level) -> Tensor:
    """[T, ...] to [received, ...]: a row of each token for each place that it goes to."""
    found: Tensor = _Spread.apply(tokens, level)  # type: ignore[no-untyped-call]
    return found


def collect(rows: Tensor, level: Level) -> Tensor:
    """[received, ...] to [T, ...]: what the places of each token made of it, summed."""
    found: Tensor = _Collect.apply(rows, level)  # type: ignore[no-untyped-call]
    return found


def collect_weighted(rows: Tensor, weights: Tensor, level: Level) -> Tensor:
    """[received, H] and weights [T, slots] to [T, H], in the dtype that both promote to."""
    found: Tensor = _CollectWeighted.apply(rows, weights, level)  # type: ignore[no-untyped-call]
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, level: Level) -> Tensor:  # type: ignore[override]
        ctx.level = level
        return level.go(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.level.summed(ctx.level.come_back(grad)), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, level: Level) -> Tensor:  # type: ignore[override]
        ctx.level = level
        return level.summed(level.come_back(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.level.go(grad), None


class _CollectWeighted(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, weights: Tensor, level: Level
    ) -> Tensor:
        back = level.come_back(rows)
        ctx.level = level
        ctx.save_for_backward(back, weights)
        return level.summed(back, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        level: Level = ctx.level
        back, weights = ctx.saved_tensors
        pairs = level.pairs()
        each = grad[pairs // level.slots]
        of_weights = weights.new_zeros(weights.numel())
        of_weights[pairs] = (each * back).sum(-1).to(weights.dtype)
        of_rows = (each * weights.reshape(-1)[pairs].unsqueeze(-1)).to(back.dtype)
        rows = all_to_all(
            of_rows, level.axis, level.recorder, sent=level.sent, received=level.received
        )
        return rows, of_weights.view_as(weights), None
