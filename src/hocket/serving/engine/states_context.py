"""States of recurrent layers over context ranks: a prompt's tokens continue from rank to rank.

    rows that decode    their tokens are gathered, and every rank runs all of them
    a prompt            a rank runs its tokens from the state in which those of the rank before end,
                        and hands on its own; scans run at once on all ranks, each from zero, and
                        what the state before adds is added then (`models.context_scans`)
    after the step      the states of prompts, and snapshots inside them, go from the rank that has
                        the last token before them to all ranks

So every rank has every state whole, as it has every row that decodes. A rank sends to the next and
receives from the one before, so no order of these can deadlock.

Legend: T tokens of a step, R rows that decode, W last inputs of a convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.context_scans import continuing
from hocket.models.recurrent import STATE, Call, MixerCache, StateKey
from hocket.runtime.collectives import all_gather, broadcast
from hocket.runtime.context_parallel.state import Line
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.serving.engine.staging import Staging

Pools = dict[StateKey, Tensor]
"""Of one mixer: states by slot and snapshot."""


class HandedCache(MixerCache):
    """The states of one prompt while a mixer runs this rank's tokens of it.

    Args:
        states: [1, ...] each, of its slot. They are where it begins, unless `takes`.
        line: to the ranks before and after.
        takes: whether the state before its tokens is the end of the rank before.
        gives: whether the rank after continues it.
    """

    chunks = 1

    def __init__(self, states: Pools, line: Line, *, takes: bool, gives: bool) -> None:
        super().__init__(states)
        self.line, self.axis = line, line.axis
        self.takes, self.gives = takes, gives

    def run(self, call: Call, tokens: Tensor) -> Tensor:
        """A mixer over some tokens [1, S, H]."""
        if tokens.shape[1] > 1:
            with continuing(self if self.takes else None):
                return call(tokens, self)
        if self.takes:  # the mixers update by one token, and ask for the states first
            for state in self.states.values():
                state.copy_(self._taken(state))
        out = call(tokens, MixerCache(self.states))
        for state in self.states.values():
            self._give(state)
        return out

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None where it is on its way: the scan begins at zero."""
        return None if self.takes else super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the cache's; the last W inputs are sent before earlier ones are waited for, if this
        rank has as many."""
        key = next(key for key in self.states if key[0] != STATE)
        assert sum(key[0] != STATE for key in self.states) == 1
        state, early = self.states[key], conv_states.shape[-1] >= self.states[key].shape[-1]
        if early:
            self._give(conv_states[..., -state.shape[-1] :].to(state.dtype))
        if self.takes:
            state.copy_(self._taken(state))
        full = super().update_conv_state(conv_states, *args, **kwargs)
        if not early:
            self._give(state)
        return full

    def previous_states(self, ends: Tensor, decay: Tensor, *, matrix: bool = False) -> Tensor:
        """The state before this rank's tokens, [1, 1, ...] as `ends` (`models.context_scans`)."""
        (state,) = (state for (kind, _), state in self.states.items() if kind == STATE)
        return self._taken(state).to(ends.dtype).unsqueeze(0)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """As the cache's, and to the rank after."""
        found = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **options)
        self._give(found)
        return found

    def _taken(self, like: Tensor) -> Tensor:
        return self.line.take(like, self.axis.index - 1)

    def _give(self, state: Tensor) -> None:
        if self.gives:
            self.line.give(state.clone(), self.axis.index + 1)


class ContextStates:
    """The states of a step whose tokens are split over context ranks.

    Args:
        count: tokens of the step. each: tokens that a rank computes, the last rank's padded.
        slots: [R], of the rows that decode, the step's first tokens.
        prompts: of each chunk of a prompt its first token, its tokens, its slot, and after how many
            of them its state is copied to which other place of the pools.
        axis: the context ranks. recorder: of their collectives.
        staging: brings places of the pools to where they are.
    """

    def __init__(  # noqa: PLR0917
        self,
        count: int,
        each: int,
        slots: Tensor,
        prompts: list[tuple[int, int, int, tuple[tuple[int, int], ...]]],
        axis: Axis,
        recorder: Recorder,
        staging: Staging,
    ) -> None:
        self.each, self.slots, self.prompts = each, slots, prompts
        places: dict[int, list[int]] = {}
        for first, tokens, slot, cuts in prompts:
            for cut, place in ((tokens, slot), *cuts):
                places.setdefault((first + cut - 1) // each, []).append(place)
        owners = sorted(places)
        sent = staging.send([(places[owner], torch.long) for owner in owners])
        self._spread = list(zip(owners, sent, strict=True))
        self.axis, self.recorder = axis, recorder
        self.first = min(count, each * axis.index)
        self.end = min(count, self.first + each)
        rows = slots.shape[0]
        bounds = [min(rows, each * rank) for rank in range(axis.size + 1)]
        self._rows = [b - a for a, b in itertools.pairwise(bounds)]
        self._own_rows = slice(bounds[axis.index], bounds[axis.index + 1])

    def run(self, pools: Pools, call: Call, hidden: Tensor) -> Tensor:
        """A mixer over this rank's tokens [1, t, H]."""
        line, parts = Line(self.axis, self.recorder), []
        own = self._rows[self.axis.index]
        if self.slots.shape[0]:
            tokens = all_gather(hidden[0, :own], self.axis, self.recorder, sizes=self._rows)
            states = {key: pool.index_select(0, self.slots) for key, pool in pools.items()}
            out = call(tokens.unsqueeze(1), MixerCache(states)).transpose(0, 1)
            for key, pool in pools.items():
                pool.index_copy_(0, self.slots, states[key])
            parts.append(out[:, self._own_rows])
        for prompt in self.prompts:
            parts += self._prompt(pools, call, hidden, line, *prompt)
        line.end()
        whole = torch.cat(parts, 1) if parts else hidden[:, :0]
        return nn.functional.pad(whole, (0, 0, 0, hidden.shape[1] - whole.shape[1]))

    def _prompt(  # noqa: PLR0917
        self, pools: Pools, call: Call, hidden: Tensor, line: Line,
        first: int, count: int, slot: int, cuts: tuple[tuple[int, int], ...],
    ) -> Iterator[Tensor]:  # fmt: skip
        """A mixer over this rank's tokens of a prompt, in pieces that end where a copy is taken."""
        begin, end = max(first, self.first), min(first + count, self.end)
        states = {key: pool[slot : slot + 1] for key, pool in pools.items()}
        ends = [(first + cut, place) for cut, place in cuts if begin < first + cut <= end]
        at = begin
        for until, place in (*ends, (end, -1)):
            if until > at:
                takes = at == begin > first
                gives = until == end < first + count
                cache = HandedCache(states, line, takes=takes, gives=gives)
                yield cache.run(call, hidden[:, at - self.first : until - self.first])
                at = until
            if place >= 0:
                for pool in pools.values():
                    pool[place].copy_(pool[slot])

    def spread(self, pools: list[Pools]) -> None:
        """Bring the states of prompts to every rank."""
        every = [pool for one in pools for pool in one.values()]
        for owner, rows in self._spread:
            sent = [pool.index_select(0, rows) for pool in every]
            flat = torch.cat([one.flatten(1).view(torch.uint8) for one in sent], 1)
            broadcast(flat, self.axis, self.recorder, source=owner)
            begin = 0
            for pool, one in zip(every, sent, strict=True):
                size = one[0].numel() * one.itemsize
                bytes_ = flat[:, begin : begin + size].contiguous()
                pool.index_copy_(0, rows, bytes_.view(one.dtype).view(one.shape))
                begin += size
