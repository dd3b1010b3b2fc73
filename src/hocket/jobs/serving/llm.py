"""LLM: a model that answers batches of prompts from this process.

    with hocket.LLM("runs/tiny", "tp2") as llm:
        for found in llm.generate(["one", "two"], SamplingParams(max_new_tokens=20)):
            print(found.text)

Behind it is what `hocket serve` runs, without the address: replicas, the router before them and
their clients, on an event loop in a thread. This process never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import operator
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hocket.jobs.python_form import errors_in_python
from hocket.spec import renamed
from hocket.spec.errors import OptionError
from hocket.spec.serving import BLOCK_SIZE, num_replicas

if TYPE_CHECKING:
    from hocket.jobs.serving.replicas import ReplicaSet
    from hocket.jobs.serving.request import PreparedServer
    from hocket.launch import Launcher
    from hocket.reporting.answers import AnswersBar
    from hocket.serving.front.completion import Completer
    from hocket.serving.front.router import Router
    from hocket.serving.request import SamplingParams, TokenLogprobs
    from hocket.spec.layout import Layout

T = TypeVar("T")
Prompt = str | Sequence[int]
OnText = Callable[[int, str], None]
"""Called with the number of the prompt and the next piece of its text, as it is made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What followed one prompt.

    Attributes:
        prompt: its text. prompt_tokens: its ids.
        text: what followed. tokens: the new ids, without the one that ended it.
        finish_reason: `stop` or `length`.
        logprobs: of `tokens`, where asked for; prompt_logprobs: of the prompt, from its second
            token on.
        cached: tokens of the prompt that lay in the prefix cache.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...] = ()
    finish_reason: str = "length"
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self, renamed.attribute("Completion", name, renamed.COMPLETION))


class LLM:
    """A model on its ranks, ready to answer. Close it, or use it as a context.

    Args:
        model: a Hugging Face directory with weights and a tokenizer, or a run folder.
        layout: `tp2.pp2.dp2`; dp are replicas.
        launcher: a warm one for the first replica, which stays open. None: one is started.
        **options: flags of `hocket serve`, with underscores: `dtype`, `max_num_batched_tokens`,
            `max_model_len`, `max_num_seqs`, `num_blocks`, `device`, `threads`, `tokenizer` ...

    Attributes:
        capacity: what the first replica said when it was ready: `num_blocks`, `cache_tokens` ...
        max_model_len: tokens that prompt and answer may have together.

    Raises:
        HocketError: what the caller can mend.
    """

    _public = False
    """Made by a caller of the library, whose errors name keywords; not by a verb."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        layout: str | Layout = "dp1",
        *,
        launcher: Launcher | None = None,
        **options: Any,
    ) -> None:
        from hocket.jobs.serving import request as serve_request

        values = {"model": os.fspath(model), "layout": layout, **options}
        self._public = True
        with errors_in_python():
            self._start(serve_request.server(values), launcher)

    @classmethod
    def of(
        cls, server: PreparedServer, launcher: Launcher | None = None, *, proxy_check: bool = True
    ) -> Self:
        """One whose options have been checked.

        `proxy_check` False: the architecture is not checked on its proxy model first, and missing
        kernels are not reported.
        """
        found = cls.__new__(cls)
        found._start(server, launcher, proxy_check=proxy_check)
        return found

    def _start(
        self, server: PreparedServer, launcher: Launcher | None, *, proxy_check: bool = True
    ) -> None:
        from hocket.jobs.serving.start import Launchers, kernels_remark, require_split
        from hocket.jobs.train import modeling_modules
        from hocket.launch import joined_context
        from hocket.ranks.serving import PRELOAD

        if launcher is None and joined_context() is not None:
            raise OptionError(
                "a model that answers starts its own ranks; this process is one of another "
                "launcher's",
                hint="run it without torchrun",
            )
        if server.request.auto:
            raise OptionError("an LLM needs a layout", hint='layout="tp2"')
        if proxy_check and (remark := kernels_remark(server)):
            warnings.warn(remark, stacklevel=3)
        self._server = server
        self._stop = server.stop
        self.words = server.words
        self.max_model_len = server.options.max_model_len or 0
        self.vocab_size = server.source.dimensions.vocab_size
        self._numbers = itertools.count()
        self._stack = contextlib.ExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hocket-llm")
        self._thread.daemon = True
        self._replicas: ReplicaSet | None = None
        self._thread.start()
        try:
            makers = Launchers(server, self._stack)
            first: Any
            if launcher is None:
                first = makers.make(0)
            else:
                first = Lent(launcher, (*PRELOAD, *modeling_modules(server.source.config)))
            if proxy_check:
                require_split(first, server)
            ready = [first, *(makers.make(n) for n in range(1, num_replicas(server.layout)))]
            self._wait(self._open(ready, makers.make))
        except BaseException:
            self.close()
            raise

    # --- what it is asked --------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        on_text: OnText | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continue prompts, each as soon as there is room for it.

        Args:
            prompts: a text, token ids, or a list of either.
            sampling: how to choose tokens, for all or one for each. None: 64 tokens, greedily.
            stop: a string, or some, that end an answer.
            on_text: called with texts as they grow, in another thread.
            progress: show a bar. None: for several prompts, where standard error is a terminal.

        Returns:
            One Completion a prompt, in their order.

        Raises:
            OptionError: a prompt that is empty, too long or of unknown tokens, or something that is
                no prompt, SamplingParams or stop string, before anything is computed.
            HocketError: the replicas died.
        """
        from hocket.reporting.answers import AnswersBar
        from hocket.serving.request import SamplingParams, check_prompts

        ids = [
            tuple(self.words.encode(one, special=True)) if isinstance(one, str) else one
            for one in _prompts(prompts)
        ]
        _check_samplings(sampling, SamplingParams)
        each = (
            [sampling or SamplingParams()] if not isinstance(sampling, Sequence) else list(sampling)
        )
        if len(each) == 1 and not isinstance(sampling, Sequence):
            each *= len(ids)
        if len(each) != len(ids):
            raise OptionError(f"{len(ids)} prompts and {len(each)} samplings; one for each, or one")
        if ids:
            with errors_in_python(self._public):
                for tokens, one in zip(ids, each, strict=True):
                    check_prompts([tokens], one, self.vocab_size, self.max_model_len)
        ends = _stops(stop)
        shown = progress if progress is not None or len(ids) > 1 else False
        with AnswersBar(len(ids), shown=shown) as bar:
            return self._wait(self._answer(_Batch(ids, each, ends, on_text, bar)))

    @property
    def capacity(self) -> dict[str, Any]:
        assert self._replicas is not None
        return dict(self._replicas.replicas[0].capacity)

    def record(self, steps: int) -> dict[str, Any]:
        """The Timeline, as JSON data, of the first replica's next `steps` steps.

        Call it from another thread than the one that waits in `generate`.
        """
        assert self._replicas is not None
        client: Any = self._replicas.replicas[0].client
        found: dict[str, Any] = self._wait(client.record(steps))
        return found

    def measured(self) -> dict[str, Any]:
        """What the first replica's steps took so far."""
        assert self._replicas is not None
        client: Any = self._replicas.replicas[0].client
        found: dict[str, Any] = self._wait(client.measured())
        return found

    def statistics(self) -> list[dict[str, Any]]:
        """The scheduler's counts of each replica: `finished`, `preempted` ..."""
        assert self._replicas is not None
        clients: list[Any] = [one.client for one in self._replicas.replicas]
        return [dict(self._wait(client.measured())["stats"]) for client in clients]

    def close(self) -> None:
        """End the ranks. May be called twice."""
        if self._loop.is_closed():
            return
        try:
            if self._replicas is not None:
                self._wait(self._replicas.end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the loop -------------------------------------------------------------------------

    async def _open(self, launchers: list[Any], relaunch: Callable[[int], Launcher]) -> None:
        from hocket.jobs.serving.replicas import ReplicaSet
        from hocket.jobs.serving.server import _connect, replica_options
        from hocket.serving.front.completion import Completer
        from hocket.serving.front.router import Router

        server = self._server
        self._router: Router = Router(server.options.block_size or BLOCK_SIZE)
        self._replicas = ReplicaSet(
            launchers,
            replica_options(server),
            self._router,
            _connect,
            relaunch=relaunch,
            say=lambda text: None,
            max_restarts=0,
        )
        self._completer: Completer = Completer(self._router, self.words.decode)
        self._replicas.start()
        await self._replicas.ready()

    async def _answer(self, batch: _Batch) -> list[Completion]:
        from hocket.serving.front.client import ReplicaLost
        from hocket.serving.front.router import NoReplica

        assert self._replicas is not None
        options = self._server.options
        # As many as run and some that wait: more would be refused.
        most = (options.max_num_seqs or 1) + min(options.max_queue, options.max_num_seqs or 1)
        room = asyncio.Semaphore(most * self._server.layout.dp)

        async def one(row: int) -> Completion:
            async with room:
                return await self._one(row, batch)

        tasks = [asyncio.ensure_future(one(row)) for row in range(len(batch.prompts))]
        try:
            return list(await asyncio.gather(*tasks))
        except (ReplicaLost, NoReplica):
            # Why it was lost is what its ranks said, which arrives a moment later.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._replicas.fatal), 10.0)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, row: int, batch: _Batch) -> Completion:
        from hocket.serving.front.ask import Ask

        tokens, sampling = batch.prompts[row], batch.samplings[row]
        if not sampling.stop:
            sampling = dataclasses.replace(sampling, stop=self._server.stop)
        name = f"llm-{next(self._numbers)}"
        call = self._completer.start(
            Ask(prompts=(tokens,), sampling=sampling, id=name, stop=batch.stop)
        )
        texts: list[str] = []
        new: list[int] = []
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: list[TokenLogprobs] = []
        finish = "length"
        async for pieces in call:
            for piece in pieces:
                texts.append(piece.text)
                new += piece.tokens
                logprobs += piece.logprobs or ()
                prompt_logprobs += piece.prompt_logprobs or ()
                finish = piece.finish_reason or finish
                batch.bar.add(len(piece.tokens))
                if batch.on_text is not None and piece.text:
                    batch.on_text(row, piece.text)
        batch.bar.add(0, prompts=1)
        return Completion(
            prompt=self.words.decode(tokens),
            text="".join(texts),
            tokens=tuple(new),
            prompt_tokens=tokens,
            finish_reason=finish,
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(prompt_logprobs),
            cached=call.usage.cached_tokens,
        )

    # --- between the threads -----------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of something on the loop; an interrupt here ends it there."""
        if self._loop.is_closed():
            work.close()
            raise OptionError("the LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What one call of `generate` wants."""

    prompts: list[tuple[int, ...]]
    samplings: list[SamplingParams]
    stop: tuple[str, ...]
    on_text: OnText | None
    bar: AnswersBar


class Lent:
    """A launcher of somebody else's: used like any, and left open."""

    def __init__(self, launcher: Launcher, preload: Sequence[str] = ()) -> None:
        self._launcher = launcher
        launcher.preload(preload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def close(self) -> None:
        return None


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings; one alone is not its letters. Raises OptionError for an empty one, or none."""
    listed = None if isinstance(given, str) else _items(given)
    found: list[Any] = [given] if listed is None else listed
    for one in found:
        if not isinstance(one, str):
            raise OptionError(f"a stop string is {one!r:.60}", hint='stop=["end"]')
    if not all(found):
        raise OptionError("a stop string is empty: every text would end before its first token")
    return tuple(found)


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    """Each as a text or as token ids; one alone is a list of one.

    Raises:
        OptionError: something else.
    """
    if isinstance(given, str):
        return [given]
    listed = _items(given)
    if listed is None:
        raise OptionError(
            f"prompts are of {type(given).__name__}; they are texts, or lists of token ids",
            hint='llm.generate(["hocket trains"])',
        )
    alone = _tokens(listed)
    if listed and alone is not None:
        return [alone]
    found: list[str | tuple[int, ...]] = []
    for number, one in enumerate(listed):
        items = _items(one)
        tokens = None if items is None else _tokens(items)
        if not isinstance(one, str) and tokens is None:
            raise OptionError(
                f"prompt {number} is {one!r:.60}; a prompt is a text, or a list of token ids",
                hint='llm.generate(["hocket trains"])',
            )
        found.append(one if isinstance(one, str) else tokens or ())
    return found


def _items(given: Any) -> list[Any] | None:
    """What can be gone through, as a list; None: it cannot, or its items are not meant."""
    if isinstance(given, bytes | bytearray | Mapping):
        return None
    try:
        return list(given)
    except TypeError:
        return None


def _tokens(items: list[Any]) -> tuple[int, ...] | None:
    """Whole numbers of any library; None: they are something else."""
    try:
        return tuple(operator.index(item) for item in items)
    except TypeError:
        return None


def _check_samplings(given: Any, kind: type) -> None:
    """Raises OptionError: not None, a SamplingParams, or a list of them."""
    if given is None:
        return
    for one in given if isinstance(given, Sequence) else (given,):
        if not isinstance(one, kind):
            raise OptionError(
                f"sampling is {one!r:.60}; it is a SamplingParams, or one for each prompt",
                hint="hocket.SamplingParams(max_new_tokens=64)",
            )
