"""Service: the model that is served, and what every route needs to answer for it."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from hocket.models.chat_template import TemplateRefusal
from hocket.serving.defaults import SamplingDefaults
from hocket.serving.front.ask import Ask
from hocket.serving.front.completion import Completer, CompletionCall
from hocket.serving.front.one_answer import OutputStream
from hocket.serving.front.renderer import Templates
from hocket.serving.front.words import TokenizerFace
from hocket.serving.http.body import Bodies
from hocket.serving.http.errors import ApiError, bad
from hocket.serving.http.fields import Fields
from hocket.serving.http.metrics import ServerMetrics
from hocket.serving.http.settings import HttpSettings
from hocket.serving.http.workers import WorkerThreads
from hocket.serving.request import MAX_STRUCTURE, Request, SamplingParams
from hocket.spec.errors import OptionError

INLINE = 2000
"""Characters that are tokenized at once: about a tenth of a millisecond, less than a thread."""


class ServingReplicas(Protocol):
    """Who answers: `front.router.Router`."""

    @property
    def ready(self) -> bool:
        """Whether a request would be answered."""

    @property
    def stats(self) -> Mapping[str, Any]:
        """Figures of all replicas, and each one's under `replicas`."""

    def submit(self, request: Request) -> OutputStream: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What clients may know of the model.

    Attributes:
        name: what they call it. created: seconds since 1970.
        max_model_len: tokens of a request, prompt and answer.
        vocab_size: token ids that the model knows.
        stop: its token ids that end an answer.
        sampling: of requests that do not say.
    """

    name: str
    max_model_len: int
    vocab_size: int
    stop: tuple[int, ...] = ()
    created: int = 0
    sampling: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)


class HttpService:
    """A served model.

    Args:
        replicas: who answers.
        words: its tokenizer. templates: its chat templates; None: it has none.
        room: tells the tokens that the cache of one replica holds; None while unknown.
        missing: names the replicas that answer nothing at the moment.
        check_structure: raises OptionError for a structure that cannot be. None: the engine's.
    """

    def __init__(
        self,
        replicas: ServingReplicas,
        words: TokenizerFace,
        model: ServedModel,
        templates: Templates | None = None,
        settings: HttpSettings | None = None,
        *,
        room: Callable[[], int | None] = lambda: None,
        missing: Callable[[], list[dict[str, Any]]] = list,
        check_structure: Callable[[str], object] | None = None,
    ) -> None:
        self.replicas = replicas
        self.words = words
        self.model = model
        self.templates = templates
        self.settings = settings or HttpSettings()
        self.room, self.missing = room, missing
        self.check_structure = check_structure or _engines_check()
        self.completer = Completer(replicas, words.decode, words.decode_all)
        self.workers = WorkerThreads(self.settings.workers, self.settings.max_jobs)
        self.bodies = Bodies(self.settings)
        self.metrics = ServerMetrics(self.completer.counts, lambda: replicas.stats)
        self.reload: Callable[[str | None], Awaitable[dict[str, Any]]] | None = None
        self.closing = False

    # --- text to tokens ------------------------------------------------------------------------

    async def encode(
        self, text: str, *, special: bool = True, param: str | None = None
    ) -> list[int]:
        """Ids of a text; a long one in a thread.

        Args:
            param: the field that holds it, of a text that is a prompt: one that is plainly longer
                than the context is refused by its beginning. None: all of it is tokenized.
        """
        if len(text) <= INLINE:
            return self.words.encode(text, special=special)

        def job() -> list[int]:
            if param is not None:
                self._check_beginning(text, param)
            return self.words.encode(text, special=special)

        return await self.workers.run(self.settings.body_seconds, "tokenizing the prompt", job)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        switches: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        param: str | None = None,
    ) -> list[int]:
        """Ids of a chat's prompt. `param`: as of `encode`."""
        templates, most = self.templates, self.settings.max_rendered
        if templates is None:
            raise bad(
                "the model has no chat template; its server can be given one with "
                "--chat-template-file, and /v1/completions needs none",
                "messages",
                "no_chat_template",
            )

        def job() -> str:
            try:
                return templates.render(
                    messages, tools=tools, switches=switches, continue_last=continue_last, most=most
                )
            except TemplateRefusal as refusal:
                raise bad(refusal.message, "messages") from None

        text = await self.workers.run(self.settings.render_seconds, "the chat template", job)
        return await self.encode(text, special=False, param=param)

    def _check_beginning(self, text: str, param: str) -> None:
        """Refuse a text whose beginning alone has twice the tokens that a request may have.

        What follows a beginning can join tokens across the cut only: half of them are far more
        than it could save. Each look takes in four times the text of the one before, so that a
        text that passes was tokenized at most a third more than once.
        """
        most = self.model.max_model_len
        size = max(INLINE, 16 * most)
        while size < len(text):
            found = len(self.words.encode(text[:size], special=False))
            if found >= 2 * most:
                raise bad(
                    f"the first {size} of the prompt's {len(text)} characters are {found} tokens; "
                    f"the context has {most}",
                    param,
                    "context_length_exceeded",
                )
            size *= 4

    async def structure(self, *asked: tuple[str, str] | None) -> str | None:
        """The structure that one of some fields asks for, after it was found to be one.

        Raises:
            ApiError: two ask, there is no structured output, or it is refused.
        """
        found = [one for one in asked if one is not None]
        if not found:
            return None
        name, text = found[0]
        if len(found) > 1:
            raise bad(f"{name} and {found[1][0]} ask for different answers", name)
        check = self.check_structure
        if check is None:
            raise bad(f"{name}: this server has no structured output", name)
        if len(text) > MAX_STRUCTURE:  # before it is compiled, which takes seconds for a large one
            raise bad(f"{name}: {len(text)} characters as JSON; at most {MAX_STRUCTURE}", name)
        try:
            # A grammar may take long to build: not on the event loop.
            await self.workers.run(self.settings.render_seconds, name, check, text)
        except OptionError as error:
            raise bad(f"{name}: {error.message}", name) from None
        return text

    # --- a call ----------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raise a 404 for a model that is not the one."""
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model.name!r}",
                code="model_not_found",
                param="model",
            )

    def left(self, prompt: int) -> int:
        """Tokens that may follow a prompt of that many."""
        room = self.room()
        most = self.model.max_model_len if room is None else min(self.model.max_model_len, room)
        return most - prompt

    def check_fits(self, prompt: int, answer: int, param: str) -> None:
        """Raise a 400 for a request that no state of the server could take."""
        asked = f"{prompt} tokens of prompt and {answer} of answer"
        if prompt + answer > self.model.max_model_len:
            raise bad(
                f"the request asks for {asked}, {prompt + answer} in all; "
                f"the context has {self.model.max_model_len}",
                param,
                "context_length_exceeded",
            )
        room = self.room()
        if room is not None and prompt + answer > room:
            raise bad(
                f"the request asks for {asked}, {prompt + answer} in all; the cache of a "
                f"replica holds {room}",
                param,
                "cache_size_exceeded",
            )

    def start(
        self,
        fields: Fields,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        who: Caller,
        param: str,
        n: int | None = None,
        per_token: bool = False,
        special: bool = False,
    ) -> CompletionCall:
        """A call that fits. Raises ApiError."""
        n = fields.n if n is None else n
        answers = len(prompts) * n
        if answers > self.settings.max_answers:
            raise bad(
                f"{len(prompts)} prompts with {n} answers each are {answers}; "
                f"at most {self.settings.max_answers}",
                "n" if n > 1 else param,
            )
        for prompt in prompts:
            if not prompt:
                raise bad("the prompt is empty: the model needs at least one token", param)
            self.check_fits(len(prompt), sampling.max_new_tokens, param)
        if not self.replicas.ready or self.closing:
            why = str(getattr(self.replicas, "closed", "")) or "no replica of the model is ready"
            raise ApiError(503, why, code="service_unavailable", retry_after=1.0)
        deadlines = (fields.deadline, who.deadline, self.settings.deadline)
        return self.completer.start(
            Ask(
                prompts=tuple(map(tuple, prompts)),
                sampling=sampling,
                id=who.id,
                n=n,
                stop=fields.stop_strings(self.settings),
                keep_stop=fields.include_stop_str_in_output,
                # Where there are keys, nobody can be somebody else, nor share somebody's cache.
                user=who.user or fields.user,
                salt=f"{who.user}/{fields.cache_salt}" if who.user else fields.cache_salt,
                deadline=min((one for one in deadlines if one is not None), default=None),
                per_token=per_token,
                special=special or not fields.skip_special_tokens,
            )
        )


def _engines_check() -> Callable[[str], object] | None:
    from hocket.serving.engine import structure

    return getattr(structure, "check_structure", None)


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who calls: the request's id, its key's user, and the time it gives."""

    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    user: str = ""
    deadline: float | None = None
