"""What is asked of generation and what comes back. Never imports torch.

    SamplingParams         how the tokens of one request are chosen, and when they end
    Request          prompt tokens and SamplingParams under a name, for one scheduler
    Output           what one or several steps added to a request
    RequestRefused   why a request was not taken

Each has a JSON form, read strictly: a field that is unknown or of another type is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from hocket.spec.errors import HocketError, LayoutError, OptionError, unknown
from hocket.spec.layout import Layout

MAX_ALTERNATIVES = 20
"""Most alternatives that `logprobs` and `prompt_logprobs` may ask for."""
MAX_STOP_TOKENS = 256
"""Most token ids in `stop`, and in `stop_tokens`."""
MAX_BIASES = 1024
"""Most entries of `logit_bias`."""
MAX_STRUCTURE = 65536
"""Most characters of `structure`."""
MAX_NAME = 256
"""Most characters of a request's id, user and salt."""
MAX_TOKEN = 2**31 - 1
"""Largest token id, and largest number of tokens."""

Finish = Literal["stop", "length", "abort", "deadline", "error"]
"""Why a request ended: a token or text that stops it, its number of tokens, its client, its time,
or a fault that is reported in `Output.error`."""

RefusalKind = Literal["too_long", "never_fits", "full", "bad"]
"""More than the model's context; more than the whole cache; too many wait; not a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when they end.

    Attributes:
        max_new_tokens: tokens per prompt. 0 only together with `prompt_logprobs`.
        min_new_tokens: tokens before one that stops may come.
        temperature: 0 takes the most probable token; above, logits are divided by it.
        top_k: draw among the k most probable tokens. None: among all.
        top_p: draw among the most probable tokens that together reach this probability (nucleus
            sampling, Holtzman et al. 2020). None: among all.
        min_p: draw among the tokens whose probability is at least this share of the most probable
            one's (Nguyen et al. 2024). None: among all.
        repetition_penalty: logits of tokens seen, in prompt or answer, are divided by it when
            positive and multiplied when negative (Keskar et al. 2019). 1: off.
        presence_penalty: taken from the logits of tokens of the answer so far. 0: off.
        frequency_penalty: the same, once per time that they occur. 0: off.
        logit_bias: (token id, what is added to its logit).
        seed: of the draws, which are keyed by (seed, index, position in the sequence) and by
            nothing else. None: the client draws one when it submits.
        stop: the model's token ids that end a row.
        stop_tokens: token ids that end a row because the user said so.
        ignore_eos: go on after a token of `stop`; those of `stop_tokens` still end the row.
        logprobs: tell each token's log-probability, with this many alternatives. None: do not.
        prompt_logprobs: the same of the prompt's tokens.
        structure: JSON text of what the answer must obey: {"type": "json_object"},
            {"type": "json_schema", "schema": {...}} or {"type": "regex", "pattern": "..."}.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = 0
    stop: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: str | None = None

    def __post_init__(self) -> None:
        least = 0 if self.prompt_logprobs is not None else 1
        _bound("max_new_tokens", self.max_new_tokens, least, MAX_TOKEN)
        _bound("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if not 0 <= self.temperature < math.inf:
            raise OptionError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k is not None:
            _bound("top_k", self.top_k, 1, MAX_TOKEN)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p is {self.min_p}; it must be from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise OptionError(f"repetition_penalty is {self.repetition_penalty}; it must be over 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _bound(name, getattr(self, name), -2, 2)
        if len(self.logit_bias) > MAX_BIASES:
            raise OptionError(f"logit_bias has {len(self.logit_bias)} entries; most: {MAX_BIASES}")
        for token, bias in self.logit_bias:
            _bound("a token of logit_bias", token, 0, MAX_TOKEN)
            _bound(f"logit_bias of token {token}", bias, -100, 100)
        if self.seed is not None:
            _bound("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("stop", "stop_tokens"):
            tokens = getattr(self, name)
            if len(tokens) > MAX_STOP_TOKENS:
                raise OptionError(f"{name} has {len(tokens)} token ids; most: {MAX_STOP_TOKENS}")
            for token in tokens:
                _bound(f"a token of {name}", token, 0, MAX_TOKEN)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _bound(name, getattr(self, name), 0, MAX_ALTERNATIVES)
        if self.structure is not None and len(self.structure) > MAX_STRUCTURE:
            raise OptionError(
                f"structure has {len(self.structure)} characters; most: {MAX_STRUCTURE}"
            )

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(self.stop_tokens if self.ignore_eos else self.stop_tokens + self.stop)

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def from_json(cls, value: object) -> SamplingParams:
        """The inverse of `to_json`.

        Raises:
            OptionError: an unknown field, or a value that cannot be.
        """
        given = dict(_members("sampling", value, {f.name for f in dataclasses.fields(cls)}))
        for name, field in given.items():
            if name in ("stop", "stop_tokens"):
                given[name] = _tokens(name, field)
            elif name == "logit_bias":
                given[name] = _biases(field)
            elif name == "ignore_eos":
                given[name] = _typed(name, field, bool)
            elif name == "structure":
                given[name] = _typed(name, field, str, optional=True)
            else:
                kind = float if name in _FLOATS else int
                given[name] = _typed(name, field, kind, optional=name in _OPTIONAL)
        return cls(**given)


_FLOATS = frozenset(
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
_OPTIONAL = frozenset(("top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: names it in outputs; unique among the requests that have not ended.
        tokens: the prompt, one token or more.
        sampling: how to continue.
        index: which of the `n` answers of one prompt this is; keys its draws.
        user: whose it is: users share a server evenly.
        salt: prompts share blocks of the cache only with others of the same salt.
        deadline: seconds from its arrival after which it is ended. None: none.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    index: int = 0
    user: str = ""
    salt: str = ""
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name in ("id", "user", "salt"):
            if len(getattr(self, name)) > MAX_NAME:
                count = len(getattr(self, name))
                raise OptionError(f"{name} has {count} characters; most: {MAX_NAME}")
        if not self.tokens:
            raise OptionError("the prompt is empty: the model needs at least one token")
        if min(self.tokens) < 0 or max(self.tokens) > MAX_TOKEN:
            worst = min(self.tokens) if min(self.tokens) < 0 else max(self.tokens)
            raise OptionError(f"the prompt holds token {worst}, which no vocabulary has")
        _bound("index", self.index, 0, MAX_TOKEN)
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise OptionError(f"deadline is {self.deadline}; it must be over 0 seconds")

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return {**found, "sampling": self.sampling.to_json()}

    @classmethod
    def from_json(cls, value: object) -> Request:
        """The inverse of `to_json`.

        Raises:
            OptionError: an unknown field, one that is missing, or a value that cannot be.
        """
        given = _members("request", value, {f.name for f in dataclasses.fields(cls)})
        missing = [name for name in ("id", "tokens", "sampling") if name not in given]
        if missing:
            raise OptionError(f"the request has no {missing[0]!r}")
        return cls(
            id=_typed("id", given["id"], str),
            tokens=_tokens("tokens", given["tokens"]),
            sampling=SamplingParams.from_json(given["sampling"]),
            index=_typed("index", given.get("index", 0), int),
            user=_typed("user", given.get("user", ""), str),
            salt=_typed("salt", given.get("salt", ""), str),
            deadline=_typed("deadline", given.get("deadline"), float, optional=True),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token with its log-probability and the most probable tokens of its position.

    Of the logits as the model gave them: before temperature, penalties and biases.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> list[Any]:
        return [self.token, self.logprob, [list(pair) for pair in self.top]]

    @classmethod
    def from_json(cls, value: Any) -> TokenLogprobs:
        token, logprob, top = value
        return cls(int(token), float(logprob), tuple((int(t), float(p)) for t, p in top))


@dataclasses.dataclass(kw_only=True, slots=True)
class Output:
    """What one step, or several, added to a request.

    Attributes:
        id: the request's.
        tokens: new tokens, without the one that ended the row.
        logprobs: of `tokens`, one each. None: not asked for.
        prompt_logprobs: of the prompt's next positions, in order, beginning with its second
            token: nothing comes before the first one. None: not asked for, or none in this step.
        finish_reason: why the request ended. None: it goes on.
        stop_token: the token that ended the row, where one did.
        cached: prompt tokens that were found in the prefix cache when the request was started.
        error: what went wrong, where `finish` is "error".
    """

    id: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: Finish | None = None
    stop_token: int | None = None
    cached: int = 0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self.id, "tokens": self.tokens}
        if self.logprobs is not None:
            found["logprobs"] = [one.to_json() for one in self.logprobs]
        if self.prompt_logprobs is not None:
            found["prompt_logprobs"] = [one.to_json() for one in self.prompt_logprobs]
        for name in ("finish_reason", "stop_token", "error"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.cached:
            found["cached"] = self.cached
        return found

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Output:
        """The inverse of `to_json`; what a driver of ours sent, so faults in it are asserts."""
        finish = value.get("finish_reason")
        assert finish is None or finish in get_args(Finish), finish

        def logprobs(name: str) -> list[TokenLogprobs] | None:
            given = value.get(name)
            return None if given is None else [TokenLogprobs.from_json(one) for one in given]

        return cls(
            id=value["id"],
            tokens=value["tokens"],
            logprobs=logprobs("logprobs"),
            prompt_logprobs=logprobs("prompt_logprobs"),
            finish_reason=finish,
            stop_token=value.get("stop_token"),
            cached=value.get("cached", 0),
            error=value.get("error"),
        )


class RequestRefused(HocketError):
    """A request that was not taken.

    Attributes:
        kind: why, as a word.
        retry_after: seconds after which the same request may be taken; None: never as it is.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: RefusalKind = "bad",
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind: RefusalKind = kind
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return (_refused, (self.message, self.kind, self.retry_after, self.hint))


def _refused(
    message: str, kind: RefusalKind, retry_after: float | None, hint: str | None
) -> RequestRefused:
    return RequestRefused(message, kind=kind, retry_after=retry_after, hint=hint)


def refuse_replicas(layout: Layout) -> None:
    """Raise LayoutError for a layout that generation has no use for."""
    if layout.dp > 1 or layout.cp > 1:
        rest = [f"{a}{layout.degree(a)}" for a in ("pp", "tp") if layout.degree(a) > 1]
        raise LayoutError(
            f"generate splits one model over tp and pp; the layout is {layout.axes_text()}, "
            "and replicas would only repeat the same tokens",
            hint=f"--layout {'.'.join(rest) or 'dp1'}",
        )


def check_prompts(
    prompts: Sequence[Sequence[int]],
    options: SamplingParams,
    vocab_size: int,
    positions: int | None,
) -> None:
    """Raise OptionError for prompts that cannot be continued."""
    if not prompts:
        raise OptionError("there is no prompt", hint='--prompt "def add(a, b):"')
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise OptionError(f"prompt {row} is empty: the model needs at least one token")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise OptionError(
                    f"prompt {row} holds token {token}; the model's vocabulary has {vocab_size}"
                )
    longest = max(map(len, prompts))
    if positions is not None and longest + options.max_new_tokens > positions:
        room = positions - longest
        raise OptionError(
            f"a prompt of {longest} tokens and {options.max_new_tokens} new ones need "
            f"{longest + options.max_new_tokens} positions; the model has {positions}",
            hint=f"--max-new-tokens {room}" if room > 0 else "a shorter prompt",
        )


def _bound(name: str, value: float, least: float, most: float) -> None:
    """Raise OptionError unless least <= value <= most; a NaN is not."""
    if not least <= value <= most:
        if value < least and most in (MAX_TOKEN, 2**63 - 1):
            raise OptionError(f"{name} is {value}; it must be at least {least}")
        raise OptionError(f"{name} is {value}; it must be from {least} to {most}")


def _members(what: str, value: object, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise OptionError(f"the {what} is {type(value).__name__}; it must be a JSON object")
    for name in value:
        if name not in known:
            message, hint = unknown(f"field of the {what}", str(name), known)
            raise OptionError(message, hint=hint)
    return value


def _typed(name: str, value: Any, kind: type, *, optional: bool = False) -> Any:
    if optional and value is None:
        return None
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind:
        word = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise OptionError(f"{name} is {type(value).__name__}; it must be {word}")
    return value


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise OptionError(f"{name} must be a list of token ids")
    return tuple(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list | tuple):
        raise OptionError("logit_bias must be a list of pairs of token id and bias")
    found = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise OptionError("logit_bias must be a list of pairs of token id and bias")
        found.append((_typed("a token of logit_bias", pair[0], int),
                      _typed("a bias of logit_bias", pair[1], float)))  # fmt: skip
    return tuple(found)
