"""DeviceSampler: what `Sampler` chooses, computed where the logits are, and read by the host once.

    begin     what requests ask for, to tables with a row for each slot       one copy, if any came
    launch    indices and random numbers of the step                          one copy
              tokens, log-probabilities, histories, on the device
              to page-locked memory                                           one copy back
    result    wait for that copy, and say it as a StepResult                  the only wait

Between `launch` and `result` the host may plan and launch the next step: the tokens are in
`last` already, on every tensor rank, and a step takes those that the host does not know from there.
A structure's mask follows from the token before it, on the host: its requests have one step under
way at a time, which is the scheduler's to see to.

Definitions and order are those of `Sampler`; tests hold the two to the same results. Not executed
on a GPU yet.

Legend: N rows of logits that are sampled, V vocabulary, n alternatives.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.runtime.collectives import broadcast
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
from hocket.serving.engine.device_draw import DeviceChoices, draw_on_device
from hocket.serving.engine.logprobs import entries, logprobs
from hocket.serving.engine.penalties import TokenHistory
from hocket.serving.engine.sampling_step import SampledSlice, SamplingStep
from hocket.serving.engine.slot_tables import SlotTables
from hocket.serving.engine.staging import Readback, Returning, Staging
from hocket.serving.engine.token_sampler import TokenSampler
from hocket.serving.engine.top_logits import top_token
from hocket.serving.engine.vocabulary import Vocabulary
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import StepPlan, StepResult

if TYPE_CHECKING:
    from hocket.serving.engine.structure import Structures

_SLICE_BYTES = 2**28
"""Logits taken at once."""


@dataclasses.dataclass(slots=True)
class Sampled:
    """A step's results on their way to the host.

    Attributes:
        number: of the plan.
        asked: in the order of the values; `slices`: those with logits of their own.
        prompts: rows whose prompt log-probabilities are reported, `counts` alternatives for each.
        values: tokens, whether they could be chosen, log-probabilities. None: nothing was asked.
    """

    number: int
    asked: list[TokenRequest]
    slices: list[SampledSlice]
    prompts: list[PromptRow]
    counts: list[int]
    values: Returning | None

    def result(self) -> StepResult:
        """The result; waits for it, once."""
        count = len(self.asked)
        result = StepResult(self.number, [0] * count)
        if self.values is None:
            return result
        values = self.values.read()
        for one, token, fine in zip(
            self.asked, values[:count], values[count : 2 * count], strict=True
        ):
            if fine:
                result.tokens[one.place] = int(token)
            elif one.slot.broken is None:
                one.slot.broken = f"the logits of position {one.position} are not finite numbers"
        at = 2 * count
        for part in self.slices:
            gathered = [part.asked[i] for i in part.reported]
            wanted = [result.tokens[one.place] for one in gathered]
            counts = [one.slot.sampling.logprobs or 0 for one in gathered]
            rows, at = _table(values, at, len(gathered), 1 + 2 * part.alternatives)
            for one, entry in zip(gathered, entries(rows, wanted, counts), strict=True):
                result.logprobs[one.place] = entry
        wanted = [token for one in self.prompts for token in one.following]
        counts = [
            n for one, n in zip(self.prompts, self.counts, strict=True) for _ in one.following
        ]
        rows, at = _table(values, at, len(wanted), 1 + 2 * max(counts, default=0))
        found = entries(rows, wanted, counts)
        first = 0
        for prompt in self.prompts:
            last = first + len(prompt.following)
            result.prompt_logprobs[prompt.number] = found[first:last]
            first = last
        assert at == len(values), (at, len(values))
        for one in self.asked:
            if one.slot.broken is not None:
                result.failed[one.place] = one.slot.broken
                result.tokens[one.place] = 0
                result.logprobs.pop(one.place, None)
            elif one.slot.structure is not None:
                one.slot.structure.take(result.tokens[one.place])
        result.failed = dict(sorted(result.failed.items()))
        return result


def _table(values: list[float], at: int, rows: int, width: int) -> tuple[list[list[float]], int]:
    end = at + rows * width
    return [values[i : i + width] for i in range(at, end, width)], end


class DeviceSampler(TokenSampler):
    """As `TokenSampler`, with `max_num_seqs` slots.

    Args:
        last: [max_num_seqs + 1] int64 where tokens are kept for the next step, on every tensor
            rank; None: no step needs them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        device: torch.device | str,
        recorder: Recorder,
        max_num_seqs: int,
        *,
        structures: Structures | None = None,
        last: Tensor | None = None,
    ) -> None:
        super().__init__(
            vocabulary, vocab_size, device, recorder,
            slice_bytes=_SLICE_BYTES, structures=structures,
        )  # fmt: skip
        self.last = last
        # Several requests with penalties may come in one plan: a buffer for each of a few.
        self._admitting = Staging(1024, self.device, grows=True, buffers=8)
        self._staging = Staging(16 * max_num_seqs, self.device, grows=True)
        self._tables = SlotTables(max_num_seqs, vocab_size, self.device)
        self._history = TokenHistory(max_num_seqs, self.device, self._admitting.send)
        self.readback = Readback(self.device)

    def begin(self, plan: StepPlan) -> None:
        """Release and admit what the plan says. Call before the plan's forward pass, so that
        structures are compiled meanwhile."""
        for slot in plan.released:
            self.release(slot)
        if plan.admitted:
            self.admit(*plan.admitted)

    @torch.inference_mode()
    def admit(self, *admitted: Admission) -> None:
        """Take requests, or take them up again after a preemption."""
        for admission in admitted:
            self._admit(admission)
        if self.samples:
            self._tables.admit([(one.slot, self._slots[one.slot]) for one in admitted],
                               self._admitting.send)  # fmt: skip

    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult | None:
        sampled = self.launch(logits, plan)
        return None if sampled is None else sampled.result()

    @torch.inference_mode()
    def launch(self, logits: Tensor, plan: StepPlan) -> Sampled | None:
        """Choose the tokens of a plan, without waiting. Collective over the tensor axis.

        Args:
            logits: [M, V of this rank]; one row per row of the plan with LAST, as many as its
                positions per row with ALL, in order. Not changed.
            plan: the step; `begin` was called with it.

        Returns:
            None on tensor indices above 0.
        """
        assert logits.shape[0] == plan.num_logits, (logits.shape, plan.num_logits)
        asked, prompts = asked_of(plan, self._slots)
        plain = [one for one in asked if one.plain]
        rest = sorted((one for one in asked if not one.plain), key=lambda one: one.slot.kind)
        ordered = [*plain, *rest]
        counts = [self._slots[one.row.slot].sampling.prompt_logprobs or 0 for one in prompts]
        slices = [
            self._sliced(rest[first : first + self._rows_at_once])
            for first in range(0, len(rest), self._rows_at_once)
        ]
        step = SamplingStep(ordered, slices, prompts, self._staging, samples=self.samples)
        made: list[Tensor] = []
        tokens, goods = [], []
        if plain:
            largest = step.rows(logits, 0, len(plain))
            pairs = self._largest(largest, torch.split(largest, self._rows_at_once))
            if pairs is not None:
                tokens.append(pairs[:, 1].long())
                goods.append(pairs[:, 0].isfinite())
        first = len(plain)
        for number, part in enumerate(slices):
            rows = self._gathered(step.rows(logits, first, len(part.asked)))
            if rows is not None:
                chosen, good, gathered = self._take(rows.float(), part, step, number, first)
                tokens.append(chosen)
                goods.append(good)
                made += gathered
            first += len(part.asked)
        if ordered:
            chosen = self._shared(tokens, goods, step)
            if self.samples:
                self._note(chosen, step)
                made = [chosen.double(), torch.cat(goods).double(), *made]
        if prompts and (self.samples or self.vocabulary.split):
            prompt_logprobs = self._prompts(logits, step, max(counts, default=0))
            if prompt_logprobs is not None:
                made.append(prompt_logprobs.flatten())
        if not self.samples:
            return None
        values = self.readback.start(torch.cat(made)) if made else None
        return Sampled(plan.number, ordered, slices, prompts, counts, values)

    def _sliced(self, asked: list[TokenRequest]) -> SampledSlice:
        part = SampledSlice(asked)
        for i, one in enumerate(asked):
            slot = one.slot
            if slot.sampling.logprobs is not None:
                part.reported.append(i)
            if not one.edited or not self.samples:
                continue
            if slot.sampling.logit_bias and slot.broken is None:
                part.biased.append(i)
            if slot.sampling.penalizes:
                part.punished.append(i)
            if slot.structure is not None and slot.broken is None:
                mask = slot.structure.mask(one.barred)
                if isinstance(mask, str):
                    slot.broken = mask
                else:
                    part.structured.append(i)
                    part.masks += mask
            elif one.barred and self._tables.has_ends(one.number):
                part.barred.append(i)
        return part

    # --- one kind after the other -------------------------------------------------------------

    def _take(
        self, rows: Tensor, part: SampledSlice, step: SamplingStep, number: int, first: int
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Tokens, whether they could be chosen, and log-probabilities of a slice's rows, the
        first of which is number `first` of all that are sampled."""
        raw = rows.index_select(0, step.places[number, "reported"]) if part.reported else None
        if part.edited:
            rows = rows.clone()  # they may be the model's own
            self._edit(rows, part, step, number, first)
        tokens, goods = [], []
        begin = 0
        for kind in (LARGEST, DRAWN, NUCLEUS, RANKED):
            end = begin + sum(one.slot.kind == kind for one in part.asked)
            if begin == end:
                continue
            if kind == LARGEST:
                values, ids = top_token(rows[begin:end])
                tokens.append(ids)
                goods.append(values.isfinite())
            else:
                these = slice(first + begin, first + end)
                choices = self._choices(part.asked[begin:end], step, these)
                ids, good = draw_on_device(rows[begin:end], choices)
                tokens.append(ids)
                goods.append(good)
            begin = end
        chosen, good = torch.cat(tokens), torch.cat(goods)
        if raw is None:
            return chosen, good, []
        wanted = chosen.index_select(0, step.places[number, "reported"])
        found = logprobs(
            raw, wanted, part.alternatives, self._whole, self.recorder,
            rows_at_once=self._rows_at_once,
        )  # fmt: skip
        assert found is not None
        return chosen, good, [found.flatten()]

    def _choices(
        self, asked: list[TokenRequest], step: SamplingStep, these: slice
    ) -> DeviceChoices:
        slots, tables = step.slots[these], self._tables
        options = [one.slot for one in asked]
        ks = [one.top_k for one in options if one.top_k is not None]
        return DeviceChoices(
            at=step.uniforms[these],
            temperature=tables.temperature.index_select(0, slots)
            if any(one.sampling.temperature != 1 for one in options)
            else None,
            top_k=tables.top_k.index_select(0, slots) if ks else None,
            most=max(ks, default=0),
            top_p=tables.top_p.index_select(0, slots)
            if any(one.top_p is not None for one in options)
            else None,
            min_p=tables.min_p.index_select(0, slots)
            if any(one.sampling.min_p for one in options)
            else None,
        )

    def _edit(
        self, rows: Tensor, part: SampledSlice, step: SamplingStep, number: int, first: int
    ) -> None:
        """Biases, penalties, barred stop tokens and structure, in place."""
        tables = self._tables
        slots = step.slots[first : first + len(part.asked)]

        def rows_of(name: str) -> tuple[Tensor, Tensor]:
            places = step.places[number, name]
            return places, slots.index_select(0, places)

        if part.biased:
            places, of = rows_of("biased")
            picked = rows.index_select(0, places)
            tokens, values = tables.biases(of)
            rows.index_copy_(0, places, picked.scatter_add_(1, tokens, values))
        if part.punished:
            places, of = rows_of("punished")
            picked = rows.index_select(0, places)
            self._history.apply_rows(
                picked, [part.asked[i].number for i in part.punished], of,
                (tables.repetition.index_select(0, of), tables.presence.index_select(0, of),
                 tables.frequency.index_select(0, of)),
            )  # fmt: skip
            rows.index_copy_(0, places, picked)
        if part.barred:
            places, of = rows_of("barred")
            picked = rows.index_select(0, places)
            rows.index_copy_(0, places, picked.scatter_(1, tables.ends(of), -torch.inf))
        if part.structured:
            places = step.places[number, "structured"]
            words = step.masks[number].view(len(part.structured), -1)
            bits = torch.arange(8, dtype=torch.uint8, device=rows.device)
            allowed = (words.unsqueeze(-1) >> bits & 1).flatten(1)[:, : self.vocab_size].bool()
            picked = rows.index_select(0, places)
            rows.index_copy_(0, places, picked.masked_fill_(~allowed, -torch.inf))

    # --- what later steps depend on -----------------------------------------------------------

    def _shared(self, tokens: list[Tensor], goods: list[Tensor], step: SamplingStep) -> Tensor:
        """The tokens [N], on every tensor rank where later steps take them from the device."""
        if self.samples:
            chosen = torch.cat(tokens).masked_fill(~torch.cat(goods), 0)
        else:
            chosen = torch.empty(len(step.asked), dtype=torch.long, device=self.device)
        if self.last is not None:
            broadcast(chosen, self.vocabulary.axis, self.recorder)
            self.last.index_copy_(0, step.slots, chosen)
        return chosen

    def _note(self, chosen: Tensor, step: SamplingStep) -> None:
        if step.noted:
            self._history.note_rows(
                [step.asked[i].number for i in step.noted],
                step.slots.index_select(0, step.noted_places),
                chosen.index_select(0, step.noted_places),
            )

    def _prompts(self, logits: Tensor, step: SamplingStep, most: int) -> Tensor | None:
        return logprobs(
            logits.index_select(0, step.prompt_places), step.prompt_tokens, most,
            self.vocabulary, self.recorder, rows_at_once=self._rows_at_once,
        )  # fmt: skip
