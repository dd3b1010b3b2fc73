"""Completer: prompts of token ids to pieces of text, with n answers each, counted and bounded.

    Ask           what one call wants (`front.ask`)
    Completion    the call while it runs: an async iterator of the pieces that came together
    OneAnswer     each of its answers (`front.one_answer`)

One answer is one Request to the replicas. Answers of one prompt other than the first are asked
for when the first has begun: then their prompt lies in the prefix cache and is not computed again.

Whatever ends a Completion early (`cancel`, its iteration being closed) ends its requests, so that
their memory is free at once; a stop string ends its own request in the same way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from hocket.serving.front.ask import Answer, AnswerDelta, Ask, Usage
from hocket.serving.front.one_answer import AnswerAborted, OneAnswer, RequestTarget
from hocket.serving.request import Output, Request

SHARED = 32
"""Tokens of a prompt from which its other answers wait for the first one's beginning."""


@dataclasses.dataclass
class RequestCounts:
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
        replicas: RequestTarget,
        decode: Callable[[Sequence[int]], str],
        decode_all: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.replicas = replicas
        self.decode = decode
        self.decode_all = decode_all or decode
        self.counts = RequestCounts()

    def start(self, ask: Ask) -> CompletionCall:
        """A call; nothing is sent before it is iterated.

        Raises:
            OptionError: a Request that cannot be.
        """
        return CompletionCall(self, ask)


class CompletionCall:
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
            OneAnswer(index, ask, Request(
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
        self._heard: set[int] = set()  # prompts of which something was answered
        self._over = False

    def cancel(self) -> None:
        """End all its requests. Its iteration ends."""
        self._over = True
        for answer in self._answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[list[AnswerDelta]]:
        try:
            if len(self._answers) == 1:
                answer = self._answers[0]
                async for output in answer.begin(self._completer.replicas):
                    piece = self._take(answer, output)
                    if piece is not None:
                        yield [piece]
                    if answer.finish_reason is not None:
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
                answer.finish_reason, answer.stop = piece.finish_reason, piece.stop
        for answer, parts in zip(found, texts, strict=True):
            answer.text = "".join(parts)
        return found

    def _take(self, answer: OneAnswer, output: Output) -> AnswerDelta | None:
        """Count an output and make its piece."""
        usage, counts = self.usage, self._completer.counts
        prompt = answer.index // self.ask.n
        if prompt not in self._heard:  # not one that was sent away
            self._heard.add(prompt)
            counts.prompt_tokens += len(self.ask.prompts[prompt])
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

    def _check(self, answer: OneAnswer) -> None:
        """A stream that ended before its answer did."""
        if answer.finish_reason is None and not self._over:
            raise AnswerAborted("the request was ended before its answer was whole")

    async def _several(self) -> AsyncIterator[list[AnswerDelta]]:
        """Pieces of several answers as they come."""
        queue: asyncio.Queue[tuple[OneAnswer, Output | BaseException | None]] = asyncio.Queue()
        replicas = self._completer.replicas
        begun: dict[int, asyncio.Event] = {}

        async def pump(answer: OneAnswer) -> None:
            prompt, which = divmod(answer.index, self.ask.n)
            event = begun.setdefault(prompt, asyncio.Event())
            try:
                if which and len(answer.request.tokens) >= SHARED:
                    await event.wait()
                    answer.shorten(time.monotonic() - self.began)
                async for output in answer.begin(replicas):
                    queue.put_nowait((answer, output))
                    if output.tokens or output.finish_reason is not None:
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
                    elif answer.finish_reason is None:
                        piece = self._take(answer, what)
                        if piece is not None:
                            pieces.append(piece)
                if pieces:
                    yield pieces
        finally:
            for task in tasks:
                task.cancel()
