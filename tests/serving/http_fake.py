"""A replica without a model: each answer repeats its prompt, token by token, in steps.

It keeps blocks as an engine does, so that a test can see who holds some: a request waits until
there are enough, holds them while it runs, and gives them back when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from hocket.serving.request import Output, Request, RequestRefused, TokenLogprobs
from hocket.spec.errors import HocketError


class FakeStream:
    def __init__(self, replica: FakeReplica, request: Request) -> None:
        self.replica, self.request = replica, request
        self.queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()
        self.over = False
        self.made = 0
        self.answer = replica.answer(request)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Output:
        if self.over and self.queue.empty():
            raise StopAsyncIteration
        found = await self.queue.get()
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, BaseException):
            raise found
        return found

    def cancel(self) -> None:
        if not self.over:
            self.over = True
            self.replica.cancelled.append(self.request.id)
            self.replica.drop(self)
            self.queue.put_nowait(None)


@dataclasses.dataclass(eq=False)
class FakeReplica:
    """Answers end after `length` tokens with `stop`, or at `max_new_tokens`.

    `delay`: seconds of a step. `script`: a request to the tokens of its answer.
    """

    num_blocks: int = 64
    block_size: int = 16
    max_queue: int = 8
    length: int = 24
    delay: float = 0.0
    eos: int = 256
    ready: bool = True
    closed: str = ""
    script: Callable[[Request], list[int]] | None = None
    cancelled: list[str] = dataclasses.field(default_factory=list)
    seen: list[Request] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.running: list[FakeStream] = []
        self.waiting: list[FakeStream] = []
        self.task: asyncio.Task[None] | None = None
        self.known: set[tuple[str, tuple[int, ...]]] = set()

    # --- what the front sees --------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        figures = {"running": len(self.running), "waiting": len(self.waiting)}
        return {"replicas": {0: {**figures, "blocks_used": self.used}}}

    def submit(self, request: Request) -> FakeStream:
        stream = FakeStream(self, request)
        self.seen.append(request)
        if self.needs(request) > self.num_blocks:
            error = RequestRefused(f"it needs {self.needs(request)} blocks", kind="never_fits")
            stream.over = True
            stream.queue.put_nowait(error)
        elif len(self.waiting) >= self.max_queue:
            stream.over = True
            stream.queue.put_nowait(RequestRefused("full", kind="full", retry_after=2.5))
        else:
            self.waiting.append(stream)
            if self.task is None or self.task.done():
                self.task = asyncio.ensure_future(self.loop())
        return stream

    # --- the engine -----------------------------------------------------------------------------

    def needs(self, request: Request) -> int:
        return -(-(len(request.tokens) + request.sampling.max_new_tokens) // self.block_size)

    @property
    def used(self) -> int:
        return sum(self.needs(stream.request) for stream in self.running)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def drop(self, stream: FakeStream) -> None:
        for queue in (self.running, self.waiting):
            if stream in queue:
                queue.remove(stream)

    def die(self, error: HocketError) -> None:
        for stream in (*self.running, *self.waiting):
            stream.over = True
            stream.queue.put_nowait(error)
        self.running, self.waiting = [], []

    async def loop(self) -> None:
        while not self.idle:
            while self.waiting and self.used + self.needs(self.waiting[0].request) <= (
                self.num_blocks
            ):
                self.running.append(self.waiting.pop(0))
            await asyncio.sleep(self.delay)
            for stream in list(self.running):
                self.step(stream)

    def step(self, stream: FakeStream) -> None:
        request = stream.request
        sampling, count = request.sampling, stream.made
        output = Output(id=request.id)
        if not count:
            key = (request.salt, request.tokens)
            output.cached = len(request.tokens) - 1 if key in self.known else 0
            self.known.add(key)
            if sampling.prompt_logprobs is not None:
                output.prompt_logprobs = [
                    self.logprobs(t, sampling.prompt_logprobs) for t in request.tokens[1:]
                ]
        answer = stream.answer
        if count >= sampling.max_new_tokens:
            output.finish_reason = "length"
        elif count >= len(answer):
            output.finish_reason, output.stop_token = "stop", self.eos
        else:
            token = answer[count]
            if token in sampling.stop_tokens and count >= sampling.min_new_tokens:
                output.finish_reason, output.stop_token = "stop", token
            else:
                stream.made += 1
                output.tokens = [token]
                if sampling.logprobs is not None:
                    output.logprobs = [self.logprobs(token, sampling.logprobs)]
                if stream.made >= sampling.max_new_tokens:
                    output.finish_reason = "length"
        if output.finish_reason is not None:
            stream.over = True
            self.drop(stream)
        stream.queue.put_nowait(output)

    def logprobs(self, token: int, most: int) -> TokenLogprobs:
        top = tuple(((token + i) % 256, -0.25 - i) for i in range(most))
        return TokenLogprobs(token, -0.25, top)

    def answer(self, request: Request) -> list[int]:
        if self.script is not None:
            return self.script(request)
        sampling = request.sampling
        shift = request.index if sampling.temperature else 0
        most = self.num_blocks * self.block_size
        size = min(sampling.max_new_tokens, most) if sampling.ignore_eos else self.length
        prompt = request.tokens
        return [(prompt[i % len(prompt)] + shift) % 256 for i in range(size)]
