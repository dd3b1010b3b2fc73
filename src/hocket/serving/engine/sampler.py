"""Sampler: the next token of each row that asks for one, chosen once, on one rank.

    every tensor rank                                        index 0
    rows that only want their largest logit: one value  ->   the largest of all
    and id a row
    all other rows, some at a time: their logits        ->   biases, penalties, stop tokens barred,
                                                             structure; then the largest, or a draw
    prompt positions: a few numbers each                ->   log-probabilities

The others learn the tokens from the next plan. The order of what is done to logits is that of
transformers' list of processors: bias, repetition penalty, (presence and frequency penalty, which
it does not have,) stop tokens barred before `min_new_tokens`, structure, temperature, top-k, top-p,
min-p. Log-probabilities are those of the logits as the model gave them.

A row whose logits are NaN or infinite, or whose structure fails, fails alone.

Legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.runtime.record import Recorder
from hocket.serving.engine.asked import (
    DRAWN,
    LARGEST,
    NUCLEUS,
    RANKED,
    PromptRow,
    TokenRequest,
    asked_of,
)
from hocket.serving.engine.draw import Choices, draw_tokens, uniform
from hocket.serving.engine.logprobs import token_logprobs
from hocket.serving.engine.penalties import TokenBiases, TokenHistory, add_biases, forbid
from hocket.serving.engine.token_sampler import TokenSampler
from hocket.serving.engine.top_logits import top_token
from hocket.serving.engine.truncation import Scratch
from hocket.serving.engine.vocabulary import Vocabulary
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import StepPlan, StepResult

if TYPE_CHECKING:
    from hocket.serving.engine.structure import Structures, StructureState

_SLICE_BYTES = 2**21
"""Logits taken at once: what a CPU's cache holds."""


class Sampler(TokenSampler):
    """As `TokenSampler`, with `max_num_seqs` slots; it computes where its caller waits."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        device: torch.device | str,
        recorder: Recorder,
        max_num_seqs: int,
        *,
        structures: Structures | None = None,
    ) -> None:
        super().__init__(
            vocabulary, vocab_size, device, recorder,
            slice_bytes=_SLICE_BYTES, structures=structures,
        )  # fmt: skip
        self._history = TokenHistory(max_num_seqs, device)
        self._scratch = Scratch()

    def begin(self, plan: StepPlan) -> None:
        """Release and admit what the plan says. Call before the plan's forward pass, so that
        structures are compiled meanwhile."""
        for slot in plan.released:
            self.release(slot)
        for admission in plan.admitted:
            self.admit(admission)

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        """Take a request, or take one up again after a preemption."""
        slot = self._admit(admission)
        if not self.samples:
            return
        slot.ends = torch.tensor(self._ends(admission), dtype=torch.long, device=self.device)
        if admission.sampling.logit_bias and slot.broken is None:
            slot.biases = TokenBiases(admission.sampling.logit_bias, self.device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult | None:
        """Choose the tokens of a plan. Collective over the tensor axis.

        Args:
            logits: [N, V of this rank]; one row per row of the plan with LAST, as many as its
                positions per row with ALL, in order. Not changed.
            plan: the step; `begin` was called with it.

        Returns:
            None on tensor indices above 0.
        """
        assert logits.shape[0] == plan.num_logits, (logits.shape, plan.num_logits)
        asked, prompts = asked_of(plan, self._slots)
        result = StepResult(plan.number, [0] * len(asked))
        plain = [one for one in asked if one.plain]
        if plain:
            self._take_largest(logits, plain, result)
        rest = [one for one in asked if not one.plain]
        rest.sort(key=lambda one: one.slot.kind)  # stable
        for first in range(0, len(rest), self._rows_at_once):
            self._take_slice(logits, rest[first : first + self._rows_at_once], result)
        if prompts:
            self._read_prompts(logits, prompts, result)
        if not self.samples:
            return None
        for one in asked:
            if one.slot.broken is not None:
                result.failed[one.place] = one.slot.broken
                result.tokens[one.place] = 0
                result.logprobs.pop(one.place, None)
        self._remember(asked, result)
        return result

    # --- rows that want their largest logit ---------------------------------------------------

    def _take_largest(self, logits: Tensor, asked: list[TokenRequest], result: StepResult) -> None:
        logits = _rows(logits, [one.at for one in asked])
        pairs = self._largest(logits, self._slices(logits))
        if pairs is None:
            return
        for one, (value, token) in zip(asked, pairs.tolist(), strict=True):
            self._settle(one, int(token), abs(value) < torch.inf, result)

    def _slices(self, logits: Tensor) -> Sequence[Tensor]:
        """Parts whose fp32 copies are small; fp32 logits need none."""
        if logits.dtype == torch.float:
            return (logits,)
        return torch.split(logits, self._rows_at_once)

    # --- all other rows -----------------------------------------------------------------------

    def _take_slice(self, logits: Tensor, asked: list[TokenRequest], result: StepResult) -> None:
        rows = self._gathered(_rows(logits, [one.at for one in asked]))
        if rows is None:
            return
        rows = rows.float()
        with_logprobs = [i for i, one in enumerate(asked) if one.slot.sampling.logprobs is not None]
        raw = _rows(rows, with_logprobs) if with_logprobs else None
        edited = [i for i, one in enumerate(asked) if one.edited]
        if edited:
            rows = rows.clone()  # they may be the model's own, and log-probabilities are theirs
            self._edit(rows, asked, edited)
        tokens = torch.zeros(len(asked), dtype=torch.long, device=rows.device)
        good = torch.zeros(len(asked), dtype=torch.bool, device=rows.device)
        first = 0
        for kind in (LARGEST, DRAWN, NUCLEUS, RANKED):
            last = first + sum(one.slot.kind == kind for one in asked)
            if first == last:
                continue
            these = slice(first, last)
            if kind == LARGEST:
                values, tokens[these] = top_token(rows[these])
                good[these] = values.isfinite()
            else:
                tokens[these], good[these] = _draw(rows[these], asked[these], self._scratch)
            first = last
        for one, token, fine in zip(asked, tokens.tolist(), good.tolist(), strict=True):
            self._settle(one, token, fine, result)
        if raw is None:
            return
        chosen = [result.tokens[asked[i].place] for i in with_logprobs]
        counts = [asked[i].slot.sampling.logprobs or 0 for i in with_logprobs]
        found = token_logprobs(
            raw, chosen, counts, self._whole, self.recorder, rows_at_once=self._rows_at_once
        )
        assert found is not None
        for i, logprobs in zip(with_logprobs, found, strict=True):
            result.logprobs[asked[i].place] = logprobs

    def _edit(self, rows: Tensor, asked: list[TokenRequest], edited: list[int]) -> None:
        """Biases, penalties, barred stop tokens and structure, in place. A structure bars stop
        tokens by itself, because it knows whether anything else can come."""
        biased = [(i, one.biases) for i in edited if (one := asked[i].slot).biases is not None]
        if biased:
            add_biases(rows, [i for i, _ in biased], [b for _, b in biased if b is not None])
        punished = [i for i in edited if asked[i].slot.sampling.penalizes]
        if punished:
            options = [asked[i].slot.sampling for i in punished]
            part = _rows(rows, punished)
            self._history.apply(
                part,
                [asked[i].number for i in punished],
                [one.repetition_penalty for one in options],
                [one.presence_penalty for one in options],
                [one.frequency_penalty for one in options],
            )
            if part.data_ptr() != rows[punished[0]].data_ptr():
                rows[torch.tensor(punished, device=rows.device)] = part
        barred: dict[int, Tensor] = {}
        for i in edited:
            slot = asked[i].slot
            if slot.structure is not None and slot.broken is None:
                self._restrict(rows[i], asked[i], slot.structure)
            elif slot.ends is not None and asked[i].barred:
                barred[i] = slot.ends
        if barred:
            forbid(rows, list(barred), list(barred.values()))

    def _restrict(self, row: Tensor, one: TokenRequest, state: StructureState) -> None:
        """Leave only the tokens that a row's structure lets come."""
        mask = state.mask(one.barred)
        if isinstance(mask, str):
            one.slot.broken = mask
            return
        words = torch.frombuffer(mask, dtype=torch.uint8)
        bits = torch.arange(8, dtype=torch.uint8)
        allowed = (words.unsqueeze(1) >> bits & 1).flatten()[: self.vocab_size].bool()
        row.masked_fill_(~allowed.to(row.device), -torch.inf)

    def _settle(self, one: TokenRequest, token: int, fine: bool, result: StepResult) -> None:
        if fine:
            result.tokens[one.place] = token
        elif one.slot.broken is None:
            one.slot.broken = f"the logits of position {one.position} are not finite numbers"

    def _remember(self, asked: list[TokenRequest], result: StepResult) -> None:
        """Keep the tokens where later ones depend on them."""
        noted = [one for one in asked if one.slot.sampling.penalizes and one.slot.broken is None]
        self._history.note(
            [one.number for one in noted], [result.tokens[one.place] for one in noted]
        )
        for one in asked:
            if one.slot.structure is not None and one.slot.broken is None:
                one.slot.structure.take(result.tokens[one.place])

    # --- prompts --------------------------------------------------------------------------------

    def _read_prompts(self, logits: Tensor, prompts: list[PromptRow], result: StepResult) -> None:
        """Log-probabilities of the tokens after each position of the rows with ALL."""
        if not self.samples and not self.vocabulary.split:
            return
        where: list[int] = []
        wanted: list[int] = []
        counts: list[int] = []
        for one in prompts:
            wanted += one.following
            where += range(one.at, one.at + len(one.following))
            alternatives = self._slots[one.row.slot].sampling.prompt_logprobs or 0
            counts += [alternatives] * len(one.following)
        found = token_logprobs(
            _rows(logits, where),
            wanted,
            counts,
            self.vocabulary,
            self.recorder,
            rows_at_once=self._rows_at_once,
        )
        if found is None:
            return
        first = 0
        for one in prompts:
            last = first + len(one.following)
            result.prompt_logprobs[one.number] = found[first:last]
            first = last


def _draw(rows: Tensor, asked: Sequence[TokenRequest], scratch: Scratch) -> tuple[Tensor, Tensor]:
    options = [one.slot.sampling for one in asked]
    choices = Choices(
        at=[uniform(one.slot.seed, one.slot.index, one.position) for one in asked],
        temperature=[one.temperature for one in options],
        top_k=[one.slot.top_k for one in asked],
        top_p=[one.slot.top_p for one in asked],
        min_p=[one.min_p for one in options],
    )
    return draw_tokens(rows, choices, scratch)


def _rows(of: Tensor, wanted: list[int]) -> Tensor:
    """Some rows, in ascending order or not; a view if they lie side by side, else copies."""
    if wanted and wanted == list(range(wanted[0], wanted[0] + len(wanted))):
        return of[wanted[0] : wanted[0] + len(wanted)]
    return of[torch.tensor(wanted, dtype=torch.long, device=of.device)]
