"""What requests may hold: their fields, each with its bounds, and the sampling they ask for.

Fields that OpenAI's clients and those of other servers send are known; of the others, each name
is logged once. A field that is null is as one that is absent.
"""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hocket.serving.defaults import SamplingDefaults
from hocket.serving.front.text import check_stop
from hocket.serving.http.errors import bad
from hocket.serving.http.settings import HttpSettings
from hocket.serving.http.structures import (
    choice_regex,
    pattern,
    response_format,
    schema,
    structured_outputs,
)
from hocket.serving.request import MAX_BIASES, MAX_STOP_TOKENS, MAX_TOKEN, SamplingParams
from hocket.spec.errors import OptionError

log = logging.getLogger("hocket.http")

Count = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Name = Annotated[str, Field(max_length=256)]

_IGNORED = """
    store metadata service_tier parallel_tool_calls prompt_cache_key prompt_cache_retention
    safety_identifier verbosity reasoning_effort reasoning modalities prediction
    web_search_options function_call functions truncation include background conversation
    previous_response_id prompt instructions max_tool_calls top_logprobs text input
    add_special_tokens detokenize spaces_between_special_tokens length_penalty use_beam_search
    early_stopping priority request_id return_token_ids
"""
IGNORED = frozenset(_IGNORED.split())
"""Fields without effect here that need no word in the log."""

_MAX_LOGGED = 200
_logged: set[str] = set()


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Fields(BaseModel):
    """What all generating routes share."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TOKEN)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    user: Name = ""
    cache_salt: Annotated[str, Field(max_length=128)] = ""
    deadline: Annotated[float, Field(gt=0, le=1e9)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Annotated[str, Field(max_length=65536)] | None = None
    guided_choice: Annotated[list[str], Field(max_length=1024)] | None = None
    regex: Annotated[str, Field(max_length=65536)] | None = None

    known: ClassVar[frozenset[str]] = IGNORED

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """The fields of a request. Raises ApiError with the first that cannot be."""
        try:
            found = cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = [
                str(part)[:80] for part in first["loc"] if part in body or isinstance(part, int)
            ]
            name = ".".join(where) or "body"
            raise bad(f"{name}: {first['msg']}", param=name) from None
        tell_unknown(found.model_extra or {}, cls.known)
        return found

    def stop_strings(self, settings: HttpSettings) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        if given is None:
            return ()
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            raise bad("stop must be a string or a list of strings", "stop")
        try:
            return check_stop(given, settings.max_stop, settings.max_stop_characters)
        except OptionError as error:
            raise bad(error.message, "stop") from None

    def sampling(
        self,
        *,
        max_tokens: int,
        stop: tuple[int, ...],
        vocab_size: int,
        defaults: SamplingDefaults,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        structure: str | None = None,
    ) -> SamplingParams:
        """How tokens are chosen: as the request says, else as `defaults` do. Raises ApiError."""

        def either(name: str, otherwise: float | None = None) -> Any:
            said = getattr(self, name)
            found = getattr(defaults, name) if said is None else said
            return otherwise if found is None else found

        top_k = either("top_k", 0)
        biases = []
        for text, bias in (self.logit_bias or {}).items():
            if not (text.isascii() and text.isdecimal() and len(text) < 11):
                raise bad(f"logit_bias has the key {text[:40]!r}; keys are token ids", "logit_bias")
            if int(text) >= vocab_size:
                raise bad(
                    f"logit_bias names token {int(text)}; the vocabulary has {vocab_size}",
                    "logit_bias",
                )
            biases.append((int(text), bias))
        if self.min_tokens > max_tokens:
            raise bad(
                f"min_tokens is {self.min_tokens}, more than the {max_tokens} that may come",
                "min_tokens",
            )
        try:
            return SamplingParams(
                max_new_tokens=max_tokens,
                min_new_tokens=self.min_tokens,
                temperature=either("temperature", 1.0),
                top_k=top_k if top_k > 0 else None,
                top_p=either("top_p"),
                min_p=either("min_p") or None,
                repetition_penalty=either("repetition_penalty", 1.0),
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=tuple(biases),
                seed=self.seed,
                stop=stop,
                stop_tokens=tuple(self.stop_token_ids or ()),
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                structure=structure,
            )
        except OptionError as error:
            raise bad(error.message, error.message.split(" ", 1)[0]) from None

    def structure(self) -> tuple[str, str] | None:
        """The structure that the answer must have, as (the field that asks for it, JSON text).

        Raises:
            ApiError: more than one asks, or one is not understood.
        """
        asked = [(name, form) for name, form in self._structures() if form is not None]
        if len(asked) > 1:
            raise bad(f"{asked[0][0]} and {asked[1][0]} both ask for a structure", asked[1][0])
        return (asked[0][0], json.dumps(asked[0][1])) if asked else None

    def _structures(self) -> list[tuple[str, dict[str, Any] | None]]:
        return [
            ("response_format", response_format(self.response_format)),
            ("structured_outputs", structured_outputs(self.structured_outputs)),
            ("guided_json", None if self.guided_json is None else schema(self.guided_json)),
            ("guided_regex", pattern(self.guided_regex)),
            ("guided_choice", choice_regex(self.guided_choice)),
            ("regex", pattern(self.regex)),
        ]


class CompletionFields(Fields):
    """`/v1/completions`."""

    prompt: Any = None
    max_tokens: Count = 16
    echo: bool = False
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    return_tokens_as_token_ids: bool = False


class ChatFields(Fields):
    """`/v1/chat/completions`."""

    messages: Any = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] = 0
    tools: Any = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Any = None


class ResponseFields(Fields):
    """`/v1/responses`."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: Any = None
    tools: Any = None
    tool_choice: Any = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] = 0
    metadata: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool = False
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    store: bool = True


class TokenizeFields(BaseModel):
    """`/tokenize`: `prompt`, or `messages` as in a chat."""

    model_config = ConfigDict(extra="ignore", strict=True)
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


# --- the rest ------------------------------------------------------------------------------------


def tell_unknown(extra: dict[str, Any], known: frozenset[str]) -> None:
    """Say once of each field that it has no effect; of so many names that the log stays small."""
    for name in extra:
        short = name[:64]
        if name in known or short in _logged or len(_logged) >= _MAX_LOGGED:
            continue
        _logged.add(short)
        log.info("requests hold the field %r, which has no effect here", short)
