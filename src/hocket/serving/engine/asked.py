"""Asked: what a plan asks of a sampler, and what the sampler knows of each request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import ALL, BatchRow, StepPlan

if TYPE_CHECKING:
    from hocket.serving.engine.penalties import TokenBiases
    from hocket.serving.engine.structure import StructureState

# In this order, so that rows of one kind lie side by side.
# The last ones need no pass over probabilities.
LARGEST, DRAWN, NUCLEUS, RANKED = range(4)


@dataclasses.dataclass(slots=True)
class Slot:
    """What is known of one request.

    Attributes:
        barred_until: position before which the tokens that end it must not come.
        kind: how its token is chosen once its logits are final.
        top_k, top_p: None where they would cut nothing.
        edited: whether its logits are changed at every position.
        broken: why it cannot be sampled; None: it can.
    """

    sampling: SamplingParams
    seed: int
    index: int
    barred_until: int
    kind: int
    edited: bool
    top_k: int | None = None
    top_p: float | None = None
    broken: str | None = None
    ends: Tensor | None = None
    biases: TokenBiases | None = None
    structure: StructureState | None = None

    @classmethod
    def of(cls, admission: Admission, vocab_size: int) -> Slot:
        """A slot as a request begins in it."""
        sampling = admission.sampling
        top_k, top_p = sampling.top_k, sampling.top_p
        top_k = None if top_k is None or top_k >= vocab_size else top_k
        top_p = None if top_p is None or top_p >= 1 else top_p
        if sampling.temperature == 0:
            kind = LARGEST
        elif top_k is not None or (top_p is None and sampling.min_p):
            kind = RANKED
        else:
            kind = NUCLEUS if top_p is not None else DRAWN
        return cls(
            sampling=sampling,
            seed=admission.seed,
            index=admission.index,
            barred_until=admission.prompt_length + sampling.min_new_tokens,
            kind=kind,
            edited=bool(sampling.penalizes or sampling.logit_bias or sampling.structure),
            top_k=top_k,
            top_p=top_p,
        )


class TokenRequest:
    """One token that a plan asks for.

    Attributes:
        place: in the result's tokens.
        at: row of logits.
        number: of the slot.
        position: of the token in its sequence.
        barred: whether tokens that end the sequence must not come yet.
        edited: whether the row's logits are changed.
        plain: whether its largest logit is all that is wanted.
    """

    __slots__ = ("at", "barred", "edited", "number", "place", "plain", "position", "slot")

    def __init__(self, place: int, at: int, number: int, slot: Slot, position: int) -> None:
        self.place = place
        self.at = at
        self.number = number
        self.slot = slot
        self.position = position
        self.barred = position < slot.barred_until
        self.edited = slot.edited or self.barred
        self.plain = not self.edited and slot.kind == LARGEST and slot.sampling.logprobs is None


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of a plan whose prompt's log-probabilities are asked for.

    Attributes:
        number: of the row in the plan. at: its first row of logits.
        following: the tokens after each of its positions.
    """

    number: int
    row: BatchRow
    at: int
    following: list[int]


def asked_of(plan: StepPlan, slots: dict[int, Slot]) -> tuple[list[TokenRequest], list[PromptRow]]:
    """The tokens and the prompts' log-probabilities that a plan asks for, in row order."""
    asked: list[TokenRequest] = []
    prompts: list[PromptRow] = []
    at = token = 0
    for number, row in enumerate(plan.rows):
        if row.logits == ALL:
            following = plan.tokens[token + 1 : token + row.count]
            if row.next_token >= 0:
                following.append(row.next_token)
            prompts.append(PromptRow(number, row, at, following))
        at += row.num_logits
        token += row.count
        if row.samples:
            slot = slots[row.slot]
            asked.append(TokenRequest(len(asked), at - 1, row.slot, slot, row.start + row.count))
    return asked, prompts
