"""Completer: prompts of token ids to pieces of text, with n answers each, counted and bounded.

    Ask           what one call wants: prompts, how many answers of each, stop strings, Sampling
    Completion    the call while it runs: an async iterator of the pieces that came together
    Piece         what was added to one answer

One answer is one Request to the replicas. Answers of one prompt other than the first are asked
for when the first has begun: then their prompt lies in the prefix cache and is not computed again.

Whatever ends a Completion early (`cancel`, its iteration being closed) ends its requests, so that
their memory is free at once; a stop string ends its own request in the same way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from hocket.serving.front.text import StopStrings, TextPieces
from hocket.serving.request import Output, Request, Sampling, TokenLogprobs
from hocket.spec.errors import HocketError, OptionError

SHARED = 32
"""Tokens of a prompt from which its other answers wait for the first one's beginning."""


class DeadlinePassed(HocketError):
    """The time that a request was given is over."""


class AnswerFailed(HocketError):
    """A replica could not go on with this request; others are not touched."""


class AnswerAborted(HocketError):
    """The server ended the request, as it does when it is stopped."""


class Stream(Protocol):
    """Outputs of one request, the last with its `finish`."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self) -> None:
        """End the request; its memory is free at once."""


class Replicas(Protocol):
    """Who answers: `front.router.Router`, or one `front.client.ReplicaClient`."""

    def submit(self, request: Request) -> Stream: ...


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
    sampling: Sampling
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
class Piece:
    """What was added to one answer.

    Attributes:
        index: of the answer: `prompt * n + which`.
        text: to be told; tokens may come without any.
        tokens: ids, without one that ended the answer.
        texts: text of each of them before stop strings were looked for, if `per_token`.
        logprobs: of `tokens`, if asked for. prompt_logprobs: of the prompt, once.
        finish: `stop` or `length` in the last piece of an answer.
        stop: the string or the user's own token that ended it.
    """

    index: int
    text: str
    tokens: list[int]
    texts: list[str] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: str | None = None
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
    finish: str | None = None
    stop: str | int | None = None

    @property
    def score(self) -> float:
        """Mean log-probability of its tokens, by which `best_of` chooses."""
        if not self.logprobs:
            return -math.inf
        return sum(one.logprob for one in self.logprobs) / len(self.logprobs)


@dataclasses.dataclass
class Counts:
    """Of all calls since the start, for metrics."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Completer:
    """Answers calls through the replicas.

    Args:
        replicas: who answers.
        decode: token ids to text; `decode_all`: with special tokens written out.

    Attributes:
        counts: tokens since the start.
    """

    def __init__(
        self,
        replicas: Replicas,
        decode: Callable[[Sequence[int]], str],
        decode_all: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.replicas = replicas
        self.decode = decode
        self.decode_all = decode_all or decode
        self.counts = Counts()

    def start(self, ask: Ask) -> Completion:
        """A call; nothing is sent before it is iterated.

        Raises:
            OptionError: a Request that cannot be.
        """
        return Completion(self, ask)


class Completion:
    """A call while it runs. Iterate it once, or `collect` it.

    Raises, while iterated:
        RequestRefused: a replica did not take a request.
        DeadlinePassed, AnswerFailed, AnswerAborted: an answer ended without its end.
        HocketError: no replica answers.

    Attributes:
        usage: tokens so far.
        began: when it was made, by the monotonic clock; `first`: when its first token came, None
            before; `last`: when the newest came.
    """

    def __init__(self, completer: Completer, ask: Ask) -> None:
        self.ask = ask
        self.usage = Usage(prompt_tokens=sum(map(len, ask.prompts)))
        self.began = time.monotonic()
        self.first: float | None = None
        self.last: float | None = None
        self._completer = completer
        sampling = ask.sampling
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        decode = completer.decode_all if ask.special else completer.decode
        self._answers = [
            _Running(index, ask, Request(
                id=f"{ask.id}-{index}",
                tokens=ask.prompts[index // ask.n],
                sampling=sampling,
                index=index % ask.n,
                user=ask.user,
                salt=ask.salt,
                deadline=ask.deadline,
            ), decode)
            for index in range(ask.answers)
        ]  # fmt: skip
        self._over = False

    def cancel(self) -> None:
        """End all its requests. Its iteration ends."""
        self._over = True
        for answer in self._answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        counts = self._completer.counts
        counts.prompt_tokens += self.usage.prompt_tokens
        try:
            if len(self._answers) == 1:
                answer = self._answers[0]
                async for output in answer.begin(self._completer.replicas):
                    piece = self._take(answer, output)
                    if piece is not None:
                        yield [piece]
                    if answer.finish is not None:
                        break
                self._check(answer)
            else:
                async for pieces in self._several():
                    yield pieces
        finally:
            self.cancel()

    async def collect(self) -> list[Answer]:
        """The whole answers, by index."""
        found = [Answer(index) for index in range(self.ask.answers)]
        texts: list[list[str]] = [[] for _ in found]
        async for pieces in self:
            for piece in pieces:
                answer = found[piece.index]
                texts[piece.index].append(piece.text)
                answer.tokens += piece.tokens
                answer.texts += piece.texts or ()
                answer.logprobs += piece.logprobs or ()
                answer.prompt_logprobs += piece.prompt_logprobs or ()
                answer.finish, answer.stop = piece.finish, piece.stop
        for answer, parts in zip(found, texts, strict=True):
            answer.text = "".join(parts)
        return found

    def _take(self, answer: _Running, output: Output) -> Piece | None:
        """Count an output and make its piece."""
        usage, counts = self.usage, self._completer.counts
        if output.cached > answer.cached:
            more = output.cached - answer.cached
            answer.cached = output.cached
            counts.cached_tokens += more
            if answer.request.index == 0:
                usage.cached_tokens += more
        before = answer.taken
        piece = answer.take(output)
        if answer.taken > before:
            usage.completion_tokens += answer.taken - before
            counts.completion_tokens += answer.taken - before
            self.last = time.monotonic()
            if self.first is None:
                self.first = self.last
        return piece

    def _check(self, answer: _Running) -> None:
        """A stream that ended before its answer did."""
        if answer.finish is None and not self._over:
            raise AnswerAborted("the request was ended before its answer was whole")

    async def _several(self) -> AsyncIterator[list[Piece]]:
        """Pieces of several answers as they come."""
        queue: asyncio.Queue[tuple[_Running, Output | BaseException | None]] = asyncio.Queue()
        replicas = self._completer.replicas
        begun: dict[int, asyncio.Event] = {}

        async def pump(answer: _Running) -> None:
            prompt, which = divmod(answer.index, self.ask.n)
            event = begun.setdefault(prompt, asyncio.Event())
            try:
                if which and len(answer.request.tokens) >= SHARED:
                    await event.wait()
                    answer.shorten(time.monotonic() - self.began)
                async for output in answer.begin(replicas):
                    queue.put_nowait((answer, output))
                    if output.tokens or output.finish is not None:
                        event.set()
                queue.put_nowait((answer, None))
            except Exception as error:  # handed to the reader, who raises it
                queue.put_nowait((answer, error))
            finally:
                event.set()

        tasks = [asyncio.create_task(pump(answer)) for answer in self._answers]
        try:
            left = len(tasks)
            while left:
                heard = [await queue.get()]
                while not queue.empty():
                    heard.append(queue.get_nowait())
                pieces = []
                for answer, what in heard:
                    if isinstance(what, BaseException):
                        raise what
                    if what is None:
                        left -= 1
                        self._check(answer)
                    elif answer.finish is None:
                        piece = self._take(answer, what)
                        if piece is not None:
                            pieces.append(piece)
                if pieces:
                    yield pieces
        finally:
            for task in tasks:
                task.cancel()


class _Running:
    """One answer while it is made."""

    def __init__(
        self, index: int, ask: Ask, request: Request, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.index = index
        self.ask = ask
        self.request = request
        self.finish: str | None = None
        self.cached = 0
        self.taken = 0
        self._stream: Stream | None = None
        self._cancelled = False
        self._untold: Piece | None = None
        self._pieces = TextPieces(decode)
        self._stops = StopStrings(ask.stop) if ask.stop else None
        # Log-probabilities with offsets are told token by token, and stop strings count only
        # after the least number of tokens.
        self._singly = ask.per_token or self._stops is not None

    def begin(self, replicas: Replicas) -> Stream | _Nothing:
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
                raise DeadlinePassed(f"the request's {self.request.deadline:g} s are over")
            self.request = dataclasses.replace(self.request, deadline=left)

    def cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None and self.finish is None:
            self._stream.cancel()

    def take(self, output: Output) -> Piece | None:
        """The piece that an output makes; None where there is nothing to tell yet."""
        if output.finish in ("abort", "deadline", "error"):
            self._fail(output)
        piece = Piece(
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
        if piece.finish is None and output.finish is not None:
            self.taken += output.stop_token is not None
            piece.finish = output.finish
            if output.stop_token in self.request.sampling.stop_tokens:
                piece.stop = output.stop_token
            self._end(piece)
        self.finish = piece.finish
        if self._untold is not None:
            piece.tokens = self._untold.tokens + piece.tokens
            if piece.texts is not None:
                piece.texts = (self._untold.texts or []) + piece.texts
            self._untold = None
        if piece.text or piece.finish or piece.logprobs or piece.prompt_logprobs:
            return piece
        self._untold = piece  # tokens whose text is not whole yet come with the next piece
        return None

    def _by_token(self, piece: Piece) -> None:
        """Tokens one by one, up to one that completes a stop string."""
        least = self.request.sampling.min_new_tokens
        told: list[str] = []
        for count, token in enumerate(piece.tokens, 1):
            text = self._pieces.add(token)
            self.taken += 1
            if piece.texts is not None:
                piece.texts.append(text)
            if self._stops is not None and self.taken >= least:
                text, found = self._stops.feed(text)
                if found is not None:
                    self._stop(piece, count, found)
                    told.append(text + found if self.ask.keep_stop else text)
                    break
            told.append(text)
        piece.text = "".join(told)

    def _stop(self, piece: Piece, count: int, found: str) -> None:
        """A stop string ends the answer, and the request with it."""
        piece.finish, piece.stop = "stop", found
        piece.tokens = piece.tokens[:count]
        if piece.logprobs is not None:
            piece.logprobs = piece.logprobs[:count]
        if self._stream is not None:
            self._stream.cancel()

    def _end(self, piece: Piece) -> None:
        """What was held back belongs to the last piece; it may complete a stop string."""
        last = self._pieces.end()
        if self._stops is not None:
            last, found = self._stops.feed(last)
            if found is not None:
                piece.finish, piece.stop = "stop", found
                last += found if self.ask.keep_stop else ""
            else:
                last += self._stops.end()
        if piece.texts and last:
            piece.texts[-1] += last
        piece.text += last

    def _fail(self, output: Output) -> None:
        self.finish = output.finish
        if output.finish == "deadline":
            raise DeadlinePassed(
                f"the request's {self.ask.deadline or 0:g} s are over after {self.taken} tokens"
            )
        if output.finish == "error":
            raise AnswerFailed(output.error or "the replica could not go on with the request")
        raise AnswerAborted("the server ended the request")


class _Nothing:
    """The outputs of a request that was cancelled before it was sent."""

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        raise StopAsyncIteration

    def cancel(self) -> None:
        return


def check_stop(strings: Sequence[str], most: int, most_characters: int) -> tuple[str, ...]:
    """Stop strings that are few and short enough to be looked for.

    Raises:
        OptionError: too many, too long, or an empty one.
    """
    if len(strings) > most:
        raise OptionError(f"stop has {len(strings)} strings; most: {most}")
    total = sum(map(len, strings))
    if total > most_characters:
        raise OptionError(f"stop has {total} characters; most: {most_characters}")
    if not all(strings):
        raise OptionError("a stop string is empty: every text would end before its first token")
    return tuple(dict.fromkeys(strings))
