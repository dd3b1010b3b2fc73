"""Ask: what one call wants, and the words in which it is answered.

Ask       prompts, how many answers of each, stop strings, SamplingParams
Piece     what was added to one answer
Answer    a whole one; Usage: the tokens of all
"""

from __future__ import annotations

import dataclasses
import math

from hocket.serving.request import SamplingParams, TokenLogprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What one call wants.

    Attributes:
        prompts: token ids, one prompt or several.
        sampling: how to continue each; its `seed` None: one is drawn here.
        n: answers of each prompt.
        stop: strings that end an answer.
        keep_stop: tell the stop string too.
        id: names the call in requests; must be new. user, salt, deadline: as of a Request.
        per_token: pieces carry the text of each token, as log-probabilities with offsets need it.
        special: special tokens are text as well.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    id: str
    n: int = 1
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    user: str = ""
    salt: str = ""
    deadline: float | None = None
    per_token: bool = False
    special: bool = False

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.n


@dataclasses.dataclass(slots=True)
class AnswerDelta:
    """What was added to one answer.

    Attributes:
        index: of the answer: `prompt * n + which`.
        text: to be sent; tokens may come without any.
        tokens: ids, without one that ended the answer.
        texts: text of each of them before stop strings were looked for, if `per_token`.
        logprobs: of `tokens`, if asked for. prompt_logprobs: of the prompt, once.
        finish_reason: `stop` or `length` in the last piece of an answer.
        stop: the string or the user's own token that ended it.
    """

    index: int
    text: str
    tokens: list[int]
    texts: list[str] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop: str | int | None = None


@dataclasses.dataclass(slots=True)
class Usage:
    """Tokens of one call: of its prompts, each once; of all answers; found in the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclasses.dataclass(slots=True)
class Answer:
    """A whole answer, as `Completion.collect` gives it: the sum of its pieces."""

    index: int
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None

    @property
    def score(self) -> float:
        """Mean log-probability of its tokens, by which `best_of` chooses."""
        if not self.logprobs:
            return -math.inf
        return sum(one.logprob for one in self.logprobs) / len(self.logprobs)
