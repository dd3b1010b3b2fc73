"""SlotTables: what requests ask of their draws, on the device, a row for each slot.

Legend: R slots, E stop tokens, B biases of the request that has most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.serving.engine.asked import Slot
from hocket.serving.engine.staging import Column
from hocket.serving.engine.truncation import COLD, HOT

Send = Callable[[Sequence[Column]], list[Tensor]]

_NO_TOP_P = 2.0
"""A share that is never reached."""


class SlotTables:
    """Temperature, cuts, penalties, biases and stop tokens of each slot.

    Args:
        max_num_seqs: R. vocab_size: token ids. device: of the tables.

    Attributes:
        temperature, top_p, min_p, repetition, presence, frequency: [R] fp32.
        top_k: [R] int64; `vocab_size` where a request has none.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._numbers = torch.zeros(6, max_num_seqs, device=device)
        (
            self.temperature, self.top_p, self.min_p, self.repetition, self.presence,
            self.frequency,
        ) = self._numbers.unbind()  # fmt: skip
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.long, device=device)
        self._ends = torch.zeros(max_num_seqs, 1, dtype=torch.long, device=device)
        self._bias_tokens = torch.zeros(max_num_seqs, 1, dtype=torch.long, device=device)
        self._bias_values = torch.zeros(max_num_seqs, 1, device=device)
        self._with_ends: set[int] = set()

    def admit(self, slots: Sequence[tuple[int, Slot]], send: Send) -> None:
        """Begin slots, in one copy."""
        numbers: list[list[float]] = [[] for _ in range(6)]
        top_k: list[int] = []
        ends: list[list[int]] = []
        biases: list[dict[int, float]] = []
        for number, slot in slots:
            sampling = slot.sampling
            row = (
                min(max(sampling.temperature, COLD), HOT),
                _NO_TOP_P if slot.top_p is None else slot.top_p,
                sampling.min_p or 0.0,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
            for column, value in zip(numbers, row, strict=True):
                column.append(value)
            top_k.append(self.vocab_size if slot.top_k is None else slot.top_k)
            ends.append(sorted(token for token in sampling.ends if token < self.vocab_size))
            biases.append({} if slot.broken else dict(sampling.logit_bias))
            (self._with_ends.add if ends[-1] else self._with_ends.discard)(number)
        self._ends = _widened(self._ends, max(map(len, ends)))
        width = max(map(len, biases))
        self._bias_tokens = _widened(self._bias_tokens, width)
        self._bias_values = _widened(self._bias_values, width)
        # The first stop token again, and nothing added to token 0: neither changes a row.
        num_ends, num_biases = self._ends.shape[1], self._bias_tokens.shape[1]
        padded = [[*row, *[row[0] if row else 0] * (num_ends - len(row))] for row in ends]
        tokens = [[*row, *[0] * (num_biases - len(row))] for row in biases]
        values = [[*row.values(), *[0.0] * (num_biases - len(row))] for row in biases]
        sent = send(
            [
                ([number for number, _ in slots], torch.long),
                (_flat(numbers), torch.float),
                (top_k, torch.long),
                (_flat(padded), torch.long),
                (_flat(tokens), torch.long),
                (_flat(values), torch.float),
            ]
        )
        where = sent[0]
        self._numbers.index_copy_(1, where, sent[1].view(6, -1))
        self.top_k.index_copy_(0, where, sent[2])
        tables = (self._ends, self._bias_tokens, self._bias_values)
        for table, filled in zip(tables, sent[3:], strict=True):
            table.index_copy_(0, where, filled.view(len(slots), -1))

    def has_ends(self, slot: int) -> bool:
        """Whether tokens end the request of a slot."""
        return slot in self._with_ends

    def ends(self, slots: Tensor) -> Tensor:
        """Stop tokens [N, E] of `slots` [N], some of them twice."""
        return self._ends.index_select(0, slots)

    def biases(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and what is added to them, [N, B] each."""
        return self._bias_tokens.index_select(0, slots), self._bias_values.index_select(0, slots)


def _flat(rows: Iterable[Iterable[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def _widened(table: Tensor, width: int) -> Tensor:
    """At least so wide; columns that are new repeat what changes nothing."""
    have = table.shape[1]
    if width <= have:
        return table
    wide = table.new_zeros(table.shape[0], max(width, 2 * have))
    wide[:, :have] = table
    if table.dtype == torch.long:
        wide[:, have:] = table[:, :1]
    return wide
