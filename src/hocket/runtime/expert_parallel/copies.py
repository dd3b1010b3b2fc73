"""Copies of the experts that most tokens choose, over the ranks that hold all experts.

    load       rows of each expert since the last placement, summed over its copies
    place      `spec.expert_copies.place_copies`
    move       weights that a rank lacks: one all-to-all a tensor

A rank with P slots holds P experts, of which some are copies of what others hold too. A router
names an expert; its tokens take the copies of it in turn, so the ranks' rows are more even, at the
price of memory for the copies. What is computed is the same (redundant experts: DeepSeek-V3, 2024,
section 3.4).

Legend: E experts, P slots of a rank, ep ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_gather, all_to_all
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.expert_copies import most_rows, place_copies


@dataclasses.dataclass(eq=False)
class ExpertCopies:
    """Where the copies of one module's experts are.

    Attributes:
        experts: [ep P] the expert of each slot.
        slots: [E, ep] int64, the slots of each expert, from the first again behind the last.
        counts: [E] int64, copies of each.
    """

    experts: list[int]
    slots: Tensor
    counts: Tensor

    @classmethod
    def of(cls, experts: Sequence[int], num_experts: int, ranks: int) -> ExpertCopies:
        """The tables of a placement, on the CPU."""
        found = cls(list(experts), *(torch.zeros(0, dtype=torch.int64) for _ in range(2)))
        found.slots, found.counts = _tables(found.experts, num_experts, ranks)
        return found

    def place(self, experts: Sequence[int]) -> None:
        """Another placement, in the same tensors: a CUDA graph reads them."""
        ranks = self.slots.shape[1]
        slots, counts = _tables(experts, len(self.counts), ranks)
        self.experts = list(experts)
        self.slots.copy_(slots)
        self.counts.copy_(counts)

    def chosen(self, index: Tensor, first: int) -> Tensor:
        """Choices of experts [T, k] as slots; the tokens of an expert take its copies in turn.

        `first`: of the turns, so that ranks of one token each do not all begin with one copy.
        """
        if self.slots.device != index.device:
            self.slots, self.counts = self.slots.to(index.device), self.counts.to(index.device)
        index = index.long()
        turn = torch.arange(first, first + len(index), device=index.device).unsqueeze(1)
        return self.slots[index, turn % self.counts[index]]


def _tables(experts: Sequence[int], num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    found: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, e in enumerate(experts):
        found[e].append(slot)
    most = ranks
    slots = torch.tensor([[own[i % len(own)] for i in range(most)] for own in found])
    return slots, torch.tensor([min(len(own), most) for own in found])


class ExpertBalancer:
    """Places the copies of a stage's experts again, every so many steps, by the rows since.

    Every rank of the experts' group takes the same steps, so all of them do it at once. One read on
    the host for the rows of all layers.

    Attributes:
        imbalance: rows of the rank with most over the mean, before and after the last placement,
            over all layers; None before it.
    """

    def __init__(self, modules: Sequence[Any], every: int) -> None:
        self._modules, self._every, self._steps = list(modules), every, 0
        self.imbalance: tuple[float, float] | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Count a step that is about to begin."""
        self._steps += 1
        if self._steps % self._every or not self._modules:
            return
        axis: Axis = self._modules[0].experts_axis
        recorder: Recorder = self._modules[0].experts_recorder
        own = torch.stack([_load(module) for module in self._modules], 1)  # [P, modules]
        rows = all_gather(own, axis, recorder).T.tolist()
        before = after = mean = 0.0
        for module, of_slots in zip(self._modules, rows, strict=True):
            copies: ExpertCopies = module.copies
            load = [0.0] * len(copies.counts)
            for e, count in zip(copies.experts, of_slots, strict=True):
                load[e] += count
            if not sum(load):
                continue
            placed = place_copies(load, axis.size, copies.experts)
            before += most_rows(copies.experts, load, axis.size)
            after += most_rows(placed, load, axis.size)
            mean += sum(load) / axis.size
            if placed != copies.experts:
                move_experts(module, placed)
        if mean:
            self.imbalance = before / mean, after / mean


def _load(module: Any) -> Tensor:
    """[P] rows of a module's slots since the last time, which are set to zero."""
    device = next(module.parameters(recurse=False)).device
    if module.load is None:
        return torch.zeros(module.num_experts, dtype=torch.int64, device=device)
    found: Tensor = module.load.clone()
    module.load.zero_()
    return found


@torch.no_grad()
def move_experts(module: Any, experts: Sequence[int]) -> None:
    """Give every rank the weights of its slots in a new placement, in place.

    Call on every rank of the group with equal arguments.
    """
    axis: Axis = module.experts_axis
    count, before = module.num_experts, module.copies.experts
    # What each rank lacks comes from its own slots if they have it, else from the first that has.
    moves: list[tuple[int, int]] = []
    for slot, e in enumerate(experts):
        if before[slot] != e:
            rank = slot // count
            own = range(rank * count, (rank + 1) * count)
            moves.append((next((s for s in own if before[s] == e), before.index(e)), slot))
    mine = range(axis.index * count, (axis.index + 1) * count)
    out = [move for move in moves if move[0] in mine]
    arriving = [move for move in moves if move[1] in mine]
    out.sort(key=lambda move: move[1])  # by the rank that it goes to
    arriving.sort(key=lambda move: (move[0] // count, move[1]))
    sent = [sum(slot // count == r for _, slot in out) for r in range(axis.size)]
    received = [sum(slot // count == r for slot, _ in arriving) for r in range(axis.size)]
    rows = [slot - axis.index * count for slot, _ in out]
    places = [slot - axis.index * count for _, slot in arriving]
    for tensor in _stacks(module, count):
        packed = tensor[rows].flatten(1).view(torch.uint8)
        got = all_to_all(packed, axis, module.experts_recorder, sent=sent, received=received)
        shape = (len(places), *tensor.shape[1:])
        tensor[places] = got.view(tensor.dtype).view(shape)
    module.copies.place(experts)


def _stacks(module: nn.Module, count: int) -> list[Tensor]:
    """The tensors of a module that have an entry for each of its experts, the same on all ranks."""
    both = {**dict(module._parameters), **dict(module._buffers)}
    found = [(name, x) for name, x in both.items() if x is not None and x.ndim and len(x) == count]
    return [x.detach() for _, x in sorted(found, key=lambda one: one[0])]
