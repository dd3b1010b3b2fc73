"""Penalties: logits lowered or raised for tokens that came before, and biases of single tokens.

    repetition   of every distinct token of prompt and answer: logit / penalty if it is positive,
                 logit * penalty if negative           (Keskar et al. 2019, as transformers has it)
    presence     of every distinct token of the answer: logit - penalty         (as OpenAI has it)
    frequency    the same: logit - penalty * times that it occurs in the answer (as OpenAI has it)

Each row has a list of its distinct tokens with how often the answer holds them, so that a step
costs what was said before and not the vocabulary. Legend: N rows, V vocabulary, D distinct tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.serving.engine.staging import Column

_FIRST = 64
"""Distinct tokens a row has room for at first; doubled as needed."""


class TokenHistory:
    """The distinct tokens of each slot.

    Args:
        max_num_seqs: slots.
        device: where the logits are.
        send: brings columns to the device. None: as tensors are made.
    """

    def __init__(
        self,
        max_num_seqs: int,
        device: torch.device | str = "cpu",
        send: Callable[[Sequence[Column]], list[Tensor]] | None = None,
    ) -> None:
        self._send = send or self._made
        self.max_num_seqs = max_num_seqs
        self.device = torch.device(device)
        self._tokens = torch.zeros(0, 0, dtype=torch.long, device=self.device)
        self._times = torch.zeros(0, 0, device=self.device)
        self._length = torch.zeros(max_num_seqs, dtype=torch.long, device=self.device)
        # no fewer than the tokens of each slot, known without asking the device
        self._most = [0] * max_num_seqs

    def admit(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Begin a slot with what its sequence holds already."""
        times = dict.fromkeys(prompt, 0)
        for token in generated:
            times[token] = times.get(token, 0) + 1
        self._make_room(len(times))
        count = len(times)
        if count:
            columns: list[Column] = [
                (list(times), torch.long), (list(times.values()), torch.float)
            ]  # fmt: skip
            tokens, counts = self._send(columns)
            self._tokens[slot, :count] = tokens
            self._times[slot, :count] = counts
        self._length[slot].fill_(count)
        self._most[slot] = count

    def note(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Add one token to each of some different slots."""
        if not slots:
            return
        rows = torch.tensor(slots, device=self.device)
        self.note_rows(slots, rows, torch.tensor(tokens, device=self.device))

    def note_rows(self, slots: Sequence[int], rows: Tensor, tokens: Tensor) -> None:
        """As `note`, of `rows` [N] and `tokens` [N] that are on the device; `slots` are the rows
        as the host knows them."""
        self._make_room(1 + max(self._most[slot] for slot in slots))
        for slot in slots:
            self._most[slot] += 1
        new = tokens.unsqueeze(1)
        held = self._held(rows)
        same = (self._tokens[rows] == new) & held
        known = same.any(-1)
        at = torch.where(known, same.int().argmax(-1), self._length[rows])
        self._tokens[rows, at] = new.squeeze(1)
        self._times[rows, at] = torch.where(known, self._times[rows, at], 0) + 1
        self._length[rows] += ~known

    def apply(
        self,
        logits: Tensor,
        slots: Sequence[int],
        repetition: Sequence[float],
        presence: Sequence[float],
        frequency: Sequence[float],
    ) -> None:
        """Penalize rows of `logits` [N, V], fp32, in place; row i belongs to slots[i]."""
        rows = torch.tensor(slots, device=self.device)
        columns = [
            torch.tensor(column, dtype=logits.dtype, device=self.device)
            for column in (repetition, presence, frequency)
        ]
        self.apply_rows(logits, slots, rows, (columns[0], columns[1], columns[2]))

    def apply_rows(
        self,
        logits: Tensor,
        slots: Sequence[int],
        rows: Tensor,
        penalties: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """As `apply`, of `rows` [N] and `penalties` (repetition, presence, frequency: [N] each)
        that are on the device; `slots` are the rows as the host knows them."""
        width = max(self._most[slot] for slot in slots)
        if width == 0:
            return
        factor, flat, each = (one.unsqueeze(1) for one in penalties)
        held = self._held(rows)[:, :width]
        # Where a row has fewer tokens, its first is repeated: it gets the same value again.
        tokens = self._tokens[rows, :width]
        tokens = torch.where(held, tokens, tokens[:, :1])
        times = self._times[rows, :width]
        before = logits.gather(1, tokens)
        after = torch.where(before < 0, before * factor, before / factor)
        after -= times * each + (times > 0) * flat
        after = torch.where(held, after, after[:, :1])
        nothing = ~held[:, :1]
        logits.scatter_(1, tokens, torch.where(nothing, before, after))

    def _made(self, columns: Sequence[Column]) -> list[Tensor]:
        return [torch.tensor(values, dtype=kind, device=self.device) for values, kind in columns]

    def _held(self, rows: Tensor) -> Tensor:
        """Which places [N, D] hold a token."""
        places = torch.arange(self._tokens.shape[1], device=self.device)
        return places < self._length[rows].unsqueeze(1)

    def _make_room(self, distinct: int) -> None:
        have = self._tokens.shape[1]
        if distinct <= have:
            return
        room = _FIRST
        while room < distinct:
            room *= 2
        for name in ("_tokens", "_times"):
            old = getattr(self, name)
            new = old.new_zeros(self.max_num_seqs, room)
            new[: old.shape[0], :have] = old
            setattr(self, name, new)


class TokenBiases:
    """What is added to the logits of some tokens of a row.

    Args:
        biases: token id and bias; of a token given twice the last counts.
        device: where the logits are.
    """

    def __init__(
        self, biases: Sequence[tuple[int, float]], device: torch.device | str = "cpu"
    ) -> None:
        last = dict(biases)
        self.tokens = torch.tensor(list(last), dtype=torch.long, device=device)
        self.values = torch.tensor(list(last.values()), dtype=torch.float, device=device)


def add_biases(logits: Tensor, rows: Sequence[int], biases: Sequence[TokenBiases]) -> None:
    """Add biases[i] to row rows[i] of `logits` [N, V], in place; the rows are different."""
    counts = torch.tensor([len(one.tokens) for one in biases], device=logits.device)
    where = torch.tensor(rows, device=logits.device).repeat_interleave(counts)
    tokens = torch.cat([one.tokens for one in biases])
    logits[where, tokens] += torch.cat([one.values for one in biases])


def forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[Tensor]) -> None:
    """Set some tokens of row rows[i] of `logits` [N, V] to -inf, in place."""
    counts = torch.tensor([len(one) for one in tokens], device=logits.device)
    where = torch.tensor(rows, device=logits.device).repeat_interleave(counts)
    logits[where, torch.cat(list(tokens))] = -torch.inf
