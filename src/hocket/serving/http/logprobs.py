"""Log-probabilities in the two forms of OpenAI's: of completions and of chats."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable
from typing import Any

from hocket.serving.front.words import TokenizerFace
from hocket.serving.request import TokenLogprobs

LEAST = -9999.0
"""Stands for a probability of zero: JSON has no infinity."""


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if math.isfinite(logprob) else LEAST


def label(words: TokenizerFace, token: int, as_ids: bool = False) -> str:
    """A token as completions name it: its text, or its bytes where they are no text."""
    if as_ids:
        return f"token_id:{token}"
    found = words.token_bytes(token)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class CompletionLogprobs:
    """The columns of one answer of a completion: tokens, token_logprobs, top_logprobs,
    text_offset.

    Args:
        as_ids: tokens are named by their ids.
    """

    def __init__(self, words: TokenizerFace, *, as_ids: bool = False) -> None:
        self.words = words
        self.as_ids = as_ids
        self.offset = 0
        self._open = codecs.getincrementaldecoder("utf-8")("replace")
        self.clear()

    def clear(self) -> None:
        """Begin new columns behind those so far."""
        self.tokens: list[str] = []
        self.logprobs: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, one: TokenLogprobs, text: str) -> None:
        name = label(self.words, one.token, self.as_ids)
        top: dict[str, float] = {}
        for token, logprob in one.top:
            top.setdefault(label(self.words, token, self.as_ids), finite(logprob))
        top.setdefault(name, finite(one.logprob))
        self._add(name, finite(one.logprob), top, len(text))

    def begin(self, token: int) -> None:
        """The first token of a prompt, which nothing predicts."""
        self._add(label(self.words, token, self.as_ids), None, None, len(self._completed(token)))

    def add_prompt(self, one: TokenLogprobs) -> None:
        self.add(one, self._completed(one.token))

    def _completed(self, token: int) -> str:
        """The characters that a token of a prompt ends; some are spread over several."""
        return self._open.decode(self.words.token_bytes(token))

    def _add(
        self, name: str, logprob: float | None, top: dict[str, float] | None, size: int
    ) -> None:
        self.tokens.append(name)
        self.logprobs.append(logprob)
        self.top.append(top)
        self.offsets.append(self.offset)
        self.offset += size

    def form(self) -> dict[str, Any]:
        return {
            "text_offset": self.offsets,
            "token_logprobs": self.logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top,
        }


def chat_logprobs(
    words: TokenizerFace, found: Iterable[TokenLogprobs], most: int
) -> list[dict[str, Any]]:
    """The `content` of a chat's log-probabilities, with at most so many alternatives."""
    return [
        {
            **chat_entry(words, one.token, one.logprob),
            "top_logprobs": [chat_entry(words, t, p) for t, p in one.top[:most]],
        }
        for one in found
    ]


def chat_entry(words: TokenizerFace, token: int, logprob: float) -> dict[str, Any]:
    data = words.token_bytes(token)
    return {
        "token": data.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
