"""States of recurrent layers: one fixed-size slot for each running request, and snapshots.

    slots        0 .. max_num_seqs - 1, as the plan's rows name them; one more for padding
    snapshots    states after a prefix that the prefix cache holds; copied to a slot and from it

A row that starts at position 0 begins with zeros; one that continues finds its state in its slot;
one whose prefix was found in the cache is given a snapshot's. Rows that decode run in one call of
the mixer, with their states gathered; each chunk of a prompt runs by itself, in two pieces where a
snapshot is taken in between. A preempted request's state is dropped: it is computed again, or
copied from a snapshot.

Legend: T tokens of a step, R rows that decode, H hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hocket.models.context_scans import replace_scans, splits_state
from hocket.models.recurrent import Call, MixerCache, StateKey, interpose
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.serving.engine.context_exchange import TokenShare
from hocket.serving.engine.staging import Staging
from hocket.serving.engine.states_context import ContextStates
from hocket.serving.scheduling.step import StepPlan
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout

Shapes = dict[StateKey, tuple[tuple[int, ...], torch.dtype]]
"""Of one mixer: by state, the shape of a row's and its dtype."""


@dataclasses.dataclass(slots=True)
class StateChunk:
    """Tokens `first` to `first + count` of a step, of the request in `slot`; `cuts`: after so many
    of them its state is copied to a snapshot."""

    first: int
    count: int
    slot: int
    cuts: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(slots=True)
class StateStep:
    """Whose states the tokens of a step continue.

    Attributes:
        slots: [R] int64, of the rows that decode, which come first.
        chunks: the other rows.
        saved: slots, and the places of snapshots that they are copied to after the step.
        split: where the step's tokens are split over context ranks.
    """

    slots: Tensor
    chunks: list[StateChunk]
    saved: tuple[Tensor, Tensor] | None = None
    split: ContextStates | None = None


class RecurrentStates:
    """The states of one stage's recurrent layers.

    Args:
        module: the stage's; its mixers run through this object from now on.

    Attributes:
        shapes: of each mixer, once a forward was watched (`watching`).
    """

    def __init__(self, module: nn.Module) -> None:
        self.shapes: list[Shapes] = []
        self.mixers = interpose(module, self._run)
        self.shapes = [{} for _ in self.mixers]
        self._pools: list[dict[StateKey, Tensor]] = []
        self._slots = 0
        self._step: StateStep | None = None

    def __len__(self) -> int:
        return len(self.mixers)

    @property
    def bytes_per_slot(self) -> int:
        return sum(
            math.prod(shape) * dtype.itemsize
            for shapes in self.shapes
            for shape, dtype in shapes.values()
        )

    def allocate(self, max_num_seqs: int, num_snapshots: int, device: torch.device) -> None:
        """Make the pools: slots, one for padding, snapshots."""
        self._slots = max_num_seqs + 1
        count = self._slots + num_snapshots
        self._pools = [
            {
                key: torch.zeros(count, *shape, dtype=dtype, device=device)
                for key, (shape, dtype) in shapes.items()
            }
            for shapes in self.shapes
        ]
        self._beginning = Staging(64, device, grows=True)
        self._ending = Staging(64, device, grows=True)

    def free(self) -> None:
        """Give the pools back."""
        self._pools = []

    def over_ranks(self, layout: Layout) -> None:
        """Let the mixers continue from other context ranks of a layout.

        Raises:
            ModelError: a scan cannot.
        """
        for mixer in self.mixers:
            if not splits_state(mixer):
                raise ModelError(
                    f"{type(mixer).__name__} keeps a recurrent state by a scan of its own, which "
                    "cannot continue from another rank's: its prompts are not split over cp",
                    hint=layout.flag_with(cp=1),
                )
            replace_scans(mixer)

    # --- a step --------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, slots: Tensor | None = None) -> StateStep:
        """Make the states of a plan's rows what they start from.

        Args:
            slots: of the plan's rows on the device, those that decode first. None: made here.
        """
        rows = plan.rows
        first = dict.fromkeys(row.slot for row in rows if row.start == 0)
        loads = [(self._slots + s.load, rows[s.row].slot) for s in plan.snapshots if s.load >= 0]
        cuts: dict[int, list[tuple[int, int]]] = {}
        for one in plan.snapshots:
            if one.save >= 0:
                cuts.setdefault(one.row, []).append((one.cut, one.save))
        num_decode = next((i for i, row in enumerate(rows) if row.count != 1), len(rows))
        if slots is None:
            slots = torch.tensor([row.slot for row in rows[:num_decode]], dtype=torch.long)
        chunks: list[StateChunk] = []
        saved: list[tuple[int, int]] = []
        at = 0
        for index, row in enumerate(rows):
            taken = cuts.get(index, [])
            saved += [(row.slot, self._slots + save) for cut, save in taken if cut == row.count]
            if index >= num_decode:
                inner = tuple(sorted(pair for pair in taken if pair[0] < row.count))
                chunks.append(StateChunk(at, row.count, row.slot, inner))
            at += row.count
        step = StateStep(slots[:num_decode], chunks)
        if first or loads or saved:  # in one copy, which the host does not wait for
            pairs = [*zip(*loads, strict=True)] or [(), ()], [*zip(*saved, strict=True)] or [(), ()]
            fresh, *sent = self._beginning.send(
                [(one, torch.long) for one in (list(first), *pairs[0], *pairs[1])]
            )
            for pool in self._every():
                pool.index_fill_(0, fresh, 0)
            self._copy(sent[0], sent[1])
            step.saved = sent[2], sent[3]
        return step

    def split(self, step: StateStep, share: TokenShare, axis: Axis, recorder: Recorder) -> None:
        """Have the tokens of a step continue from rank to rank, each of which has its share."""
        slots = self._slots
        prompts = [
            (a.first, a.count, a.slot, tuple((cut, slots + save) for cut, save in a.cuts))
            for a in step.chunks
        ]
        step.split = ContextStates(
            share.count, share.each, step.slots, prompts, axis, recorder, self._ending
        )

    def end(self, step: StateStep) -> None:
        """Take the snapshots of rows' last states."""
        if step.split is not None:
            step.split.spread(self._pools)
        if step.saved is not None:
            self._copy(*step.saved)

    @contextmanager
    def running(self, step: StateStep | None) -> Iterator[None]:
        """Within, mixers continue the states of a step. None: they keep nothing."""
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        if sources.numel():
            for pool in self._every():
                pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _every(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(pools.values() for pools in self._pools)

    # --- a mixer -------------------------------------------------------------------------------

    def _run(self, number: int, call: Call, hidden: Tensor) -> Tensor:
        step = self._step
        if step is None:
            cache = MixerCache(None)
            out = call(hidden, cache)
            self.shapes[number] = cache.shapes
            return out
        pools = self._pools[number]
        if step.split is not None:
            return step.split.run(pools, call, hidden)
        parts: list[Tensor] = []
        count = step.slots.shape[0]
        if count:
            states = {key: pool.index_select(0, step.slots) for key, pool in pools.items()}
            out = call(hidden[0, :count].unsqueeze(1), MixerCache(states))
            for key, pool in pools.items():
                pool.index_copy_(0, step.slots, states[key])
            parts.append(out.transpose(0, 1))
        for chunk in step.chunks:
            states = {key: pool[chunk.slot : chunk.slot + 1] for key, pool in pools.items()}
            cache, at = MixerCache(states), 0
            for cut, save in (*chunk.cuts, (chunk.count, -1)):
                first = chunk.first + at
                if cut > at:
                    parts.append(call(hidden[:, first : chunk.first + cut], cache))
                at = cut
                if save >= 0:
                    for pool in pools.values():
                        pool[self._slots + save].copy_(pool[chunk.slot])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
