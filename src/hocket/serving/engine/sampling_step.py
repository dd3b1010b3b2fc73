"""SamplingStep: what the host tells a device of the tokens that one step samples, in one copy."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hocket.serving.engine.asked import LARGEST, PromptRow, TokenRequest
from hocket.serving.engine.draw import uniform
from hocket.serving.engine.staging import Column, Staging


@dataclasses.dataclass(slots=True)
class SampledSlice:
    """Rows that are taken at once, and their places among them: with a bias, penalties, barred
    stop tokens, a structure, log-probabilities."""

    asked: list[TokenRequest]
    biased: list[int] = dataclasses.field(default_factory=list)
    punished: list[int] = dataclasses.field(default_factory=list)
    barred: list[int] = dataclasses.field(default_factory=list)
    structured: list[int] = dataclasses.field(default_factory=list)
    reported: list[int] = dataclasses.field(default_factory=list)
    masks: bytearray = dataclasses.field(default_factory=bytearray)

    @property
    def edited(self) -> bool:
        return bool(self.biased or self.punished or self.barred or self.structured)

    @property
    def alternatives(self) -> int:
        return max((self.asked[i].slot.sampling.logprobs or 0 for i in self.reported), default=0)


class SamplingStep:
    """What the host tells the device of one step, in one copy.

    Attributes:
        asked: in the order of `slots` [N] and `uniforms` [N].
        places: slice number and name of an edit to the rows it is of.
        masks: of structures, by slice number, uint8.
        noted: of `asked`, those whose tokens have a history; `noted_places` likewise.
        prompt_places, prompt_tokens: rows of logits and the tokens after them.
    """

    def __init__(
        self,
        asked: list[TokenRequest],
        slices: list[SampledSlice],
        prompts: list[PromptRow],
        staging: Staging,
        *,
        samples: bool,
    ) -> None:
        self.asked = asked
        self._at = [one.at for one in asked]
        self.noted = [i for i, one in enumerate(asked) if samples and one.slot.sampling.penalizes]
        where = [one.at + i for one in prompts for i in range(len(one.following))]
        following = [token for one in prompts for token in one.following]
        drawn = [
            uniform(one.slot.seed, one.slot.index, one.position)
            if samples and one.slot.kind != LARGEST
            else 0.0
            for one in asked
        ]
        columns: list[Column] = [
            (self._at, torch.long),
            ([one.number for one in asked], torch.long),
            (drawn, torch.float64),
            (self.noted, torch.long),
            (where, torch.long),
            (following, torch.long),
        ]
        names: list[tuple[int, str]] = []
        for number, part in enumerate(slices):
            for name in ("reported", "biased", "punished", "barred", "structured"):
                if getattr(part, name):
                    names.append((number, name))
                    columns.append((getattr(part, name), torch.long))
        masked = [number for number, part in enumerate(slices) if part.masks]
        columns += [
            (torch.frombuffer(slices[number].masks, dtype=torch.uint8), torch.uint8)
            for number in masked
        ]
        views = staging.send(columns)
        self._places, self.slots, self.uniforms, self.noted_places = views[:4]
        self.prompt_places, self.prompt_tokens = views[4:6]
        self.places = dict(zip(names, views[6 : 6 + len(names)], strict=True))
        self.masks = dict(zip(masked, views[6 + len(names) :], strict=True))

    def rows(self, logits: Tensor, first: int, count: int) -> Tensor:
        """The logits of some of `asked`; a view if they lie side by side."""
        at = self._at[first : first + count]
        if at == list(range(at[0], at[0] + count)):
            return logits[at[0] : at[0] + count]
        return logits.index_select(0, self._places[first : first + count])
