"""OneAnswer: one answer while it is made, from a request's outputs to pieces of text.

Tokens become text as soon as it is whole; a stop string is looked for in it, held back as far as it
may be the beginning of one, and ends its own request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from hocket.serving.front.ask import AnswerDelta, Ask
from hocket.serving.front.text import StopStrings, TextPieces
from hocket.serving.request import Output, Request
from hocket.spec.errors import HocketError


class DeadlinePassed(HocketError):
    """The time that a request was given is over."""


class AnswerFailed(HocketError):
    """A replica could not go on with this request; others are not touched."""


class AnswerAborted(HocketError):
    """The server ended the request, as it does when it is stopped."""


class OutputStream(Protocol):
    """Outputs of one request, the last with its `finish`."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self) -> None:
        """End the request; its memory is free at once."""


class RequestTarget(Protocol):
    """Who answers: `front.router.Router`, or one `front.client.ReplicaClient`."""

    def submit(self, request: Request) -> OutputStream: ...


class OneAnswer:
    """One answer while it is made."""

    def __init__(
        self, index: int, ask: Ask, request: Request, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.index = index
        self.ask = ask
        self.request = request
        self.finish_reason: str | None = None
        self.cached = 0
        self.taken = 0
        self._stream: OutputStream | None = None
        self._cancelled = False
        self._pending: AnswerDelta | None = None
        self._pieces = TextPieces(decode)
        self._stops = StopStrings(ask.stop) if ask.stop else None
        # Log-probabilities with offsets are given token by token, and stop strings count only
        # after the least number of tokens.
        self._singly = ask.per_token or self._stops is not None

    def begin(self, replicas: RequestTarget) -> OutputStream | _Nothing:
        """Send the request. Its outputs."""
        if self._cancelled:
            return _Nothing()
        self._stream = replicas.submit(self.request)
        return self._stream

    def shorten(self, seconds: float) -> None:
        """The time that went by before it was sent."""
        if self.request.deadline is not None:
            left = self.request.deadline - seconds
            if left <= 0:
                raise DeadlinePassed(
                    f"the request's deadline of {self.request.deadline:g} s has passed"
                )
            self.request = dataclasses.replace(self.request, deadline=left)

    def cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None and self.finish_reason is None:
            self._stream.cancel()

    def take(self, output: Output) -> AnswerDelta | None:
        """The piece that an output makes; None where there is nothing to tell yet."""
        if output.finish_reason in ("abort", "deadline", "error"):
            self._fail(output)
        piece = AnswerDelta(
            self.index,
            "",
            output.tokens,
            [] if self.ask.per_token else None,
            output.logprobs,
            output.prompt_logprobs,
        )
        if self._singly:
            self._by_token(piece)
        else:
            piece.text = self._pieces.extend(output.tokens) if output.tokens else ""
            self.taken += len(output.tokens)
        if piece.finish_reason is None and output.finish_reason is not None:
            self.taken += output.stop_token is not None
            piece.finish_reason = output.finish_reason
            if output.stop_token in self.request.sampling.stop_tokens:
                piece.stop = output.stop_token
            self._end(piece)
        self.finish_reason = piece.finish_reason
        if self._pending is not None:
            piece.tokens = self._pending.tokens + piece.tokens
            if piece.texts is not None:
                piece.texts = (self._pending.texts or []) + piece.texts
            self._pending = None
        if piece.text or piece.finish_reason or piece.logprobs or piece.prompt_logprobs:
            return piece
        self._pending = piece  # tokens whose text is not whole yet come with the next piece
        return None

    def _by_token(self, piece: AnswerDelta) -> None:
        """Tokens one by one, up to one that completes a stop string."""
        least = self.request.sampling.min_new_tokens
        texts: list[str] = []
        for count, token in enumerate(piece.tokens, 1):
            text = self._pieces.add(token)
            self.taken += 1
            if piece.texts is not None:
                piece.texts.append(text)
            if self._stops is not None and self.taken >= least:
                text, found = self._stops.feed(text)
                if found is not None:
                    self._stop(piece, count, found)
                    texts.append(text + found if self.ask.keep_stop else text)
                    break
            texts.append(text)
        piece.text = "".join(texts)

    def _stop(self, piece: AnswerDelta, count: int, found: str) -> None:
        """A stop string ends the answer, and the request with it."""
        piece.finish_reason, piece.stop = "stop", found
        piece.tokens = piece.tokens[:count]
        if piece.logprobs is not None:
            piece.logprobs = piece.logprobs[:count]
        if self._stream is not None:
            self._stream.cancel()

    def _end(self, piece: AnswerDelta) -> None:
        """What was held back belongs to the last piece; it may complete a stop string."""
        last = self._pieces.end()
        if self._stops is not None:
            last, found = self._stops.feed(last)
            if found is not None:
                piece.finish_reason, piece.stop = "stop", found
                last += found if self.ask.keep_stop else ""
            else:
                last += self._stops.end()
        if piece.texts and last:
            piece.texts[-1] += last
        piece.text += last

    def _fail(self, output: Output) -> None:
        self.finish_reason = output.finish_reason
        if output.finish_reason == "deadline":
            raise DeadlinePassed(
                f"the request's deadline of {self.ask.deadline or 0:g} s passed after "
                f"{self.taken} tokens"
            )
        if output.finish_reason == "error":
            raise AnswerFailed(output.error or "the replica could not continue the request")
        raise AnswerAborted("the server ended the request")


class _Nothing:
    """The outputs of a request that was cancelled before it was sent."""

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        raise StopAsyncIteration

    def cancel(self) -> None:
        return
