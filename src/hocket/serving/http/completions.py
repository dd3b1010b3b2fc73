"""/v1/completions: texts or token ids to what follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from hocket.serving.front.ask import Answer, AnswerDelta, Usage
from hocket.serving.front.completion import CompletionCall
from hocket.serving.http.call import DONE, Call, json_response, quoted
from hocket.serving.http.errors import bad
from hocket.serving.http.fields import CompletionFields
from hocket.serving.http.logprobs import CompletionLogprobs, dumps
from hocket.serving.http.service import HttpService

Prompt = tuple[tuple[int, ...], str | None]
"""Token ids, and the text they come from, where they come from one."""


async def completions(call: Call) -> Response | None:
    """The handler."""
    service, fields = call.service, CompletionFields.read(call.body)
    service.check_model(fields.model)
    if fields.suffix:
        raise bad("suffix is not supported: the model continues texts, it fills no gaps", "suffix")
    best_of = _best_of(fields)
    prompts = await read_prompts(service, fields.prompt)
    form = _Form(call, fields, prompts)
    logprobs = _bounded("logprobs", fields.logprobs, service)
    if best_of > fields.n and logprobs is None:
        logprobs = 0  # answers are compared by them
    completion = service.start(
        fields,
        [tokens for tokens, _ in prompts],
        fields.sampling(
            max_tokens=_max_tokens(call, fields, prompts),
            stop=service.model.stop,
            vocab_size=service.model.vocab_size,
            defaults=service.model.sampling,
            logprobs=logprobs,
            prompt_logprobs=form.prompt_alternatives,
            structure=await service.structure(fields.structure()),
        ),
        who=call.who,
        param="prompt",
        n=best_of,
        per_token=fields.logprobs is not None,
    )
    with call.counted(completion):
        if fields.stream:
            await call.stream(form.events(completion))
            return None
        answers = await completion.collect()
    return json_response(form.whole(_best(answers, best_of, fields.n), completion.usage))


def _best_of(fields: CompletionFields) -> int:
    """Answers made of each prompt."""
    best_of = fields.n if fields.best_of is None else fields.best_of
    if best_of < fields.n:
        raise bad(f"best_of is {best_of}, less than n, which is {fields.n}", "best_of")
    if fields.stream and best_of > fields.n:
        raise bad("best_of cannot be streamed: the best is known at the end", "best_of")
    return best_of


def _best(answers: list[Answer], made: int, n: int) -> list[Answer]:
    """The n most probable of each prompt's answers, renumbered."""
    if made == n:
        return answers
    found: list[Answer] = []
    for start in range(0, len(answers), made):
        ordered = sorted(answers[start : start + made], key=lambda a: -a.score)
        found += ordered[:n]
    for index, answer in enumerate(found):
        answer.index = index
    return found


def _bounded(name: str, asked: int | None, service: HttpService) -> int | None:
    most = service.settings.max_alternatives
    if asked is not None and asked > most:
        raise bad(f"{name} is {asked}; at most {most}", name)
    return asked


def _max_tokens(call: Call, fields: CompletionFields, prompts: list[Prompt]) -> int:
    """Tokens that may follow. Those that nobody asked for are no more than there is room for."""
    if fields.max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
        raise bad("max_tokens is 0, which needs echo", "max_tokens")
    if "max_tokens" in fields.model_fields_set:
        return fields.max_tokens
    left = call.service.left(max(len(tokens) for tokens, _ in prompts))
    return max(1, min(fields.max_tokens, left))


async def read_prompts(service: HttpService, given: Any) -> list[Prompt]:
    """`prompt`: a text, texts, token ids, or lists of them. Raises ApiError."""
    if given is None:
        raise bad("prompt is missing", "prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and is_id(given[0])):
        given = [given]
    if not isinstance(given, list) or not given:
        raise bad("prompt must be a text, a list of texts, or (lists of) token ids", "prompt")
    if len(given) > service.settings.max_answers:
        raise bad(
            f"prompt holds {len(given)} prompts; at most {service.settings.max_answers}", "prompt"
        )
    found: list[Prompt] = []
    for one in given:
        if isinstance(one, str):
            found.append((tuple(await service.encode(one, param="prompt")), one))
        elif isinstance(one, list) and all(map(is_id, one)):
            found.append((tuple(one), None))
            most = service.model.vocab_size
            wrong = next((token for token in one if not 0 <= token < most), None)
            if wrong is not None:
                raise bad(f"prompt holds token {wrong}; the vocabulary has {most}", "prompt")
        else:
            raise bad("prompt must hold texts only, or lists of token ids only", "prompt")
        if len(found) % 16 == 0:
            await asyncio.sleep(0)  # others are answered between
    return found


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Form:
    """How one call's answers are written."""

    def __init__(self, call: Call, fields: CompletionFields, prompts: list[Prompt]) -> None:
        self.call, self.fields, self.prompts = call, fields, prompts
        self.words = call.service.words
        self.id = f"cmpl-{call.who.id}"
        self.prompt_alternatives = _bounded("prompt_logprobs", fields.prompt_logprobs, call.service)
        if fields.echo and fields.logprobs is not None:
            self.prompt_alternatives = max(fields.logprobs, self.prompt_alternatives or 0)

    def whole(self, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        """The response without a stream."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.call.created,
            "model": self.call.service.model.name,
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_form(usage),
        }

    def _choice(self, answer: Answer) -> dict[str, Any]:
        echo, logprobs = self._echo(answer.index), None
        found: dict[str, Any] = {}
        if self.fields.logprobs is not None:
            columns = CompletionLogprobs(self.words, as_ids=self.fields.return_tokens_as_token_ids)
            if self.fields.echo:
                self._prompt_columns(columns, answer)
                columns.offset = len(echo)
            for one, text in zip(answer.logprobs, answer.texts, strict=True):
                columns.add(one, text)
            logprobs = columns.form()
        elif self.prompt_alternatives is not None:
            columns = CompletionLogprobs(self.words)
            self._prompt_columns(columns, answer)
            found["prompt_logprobs"] = columns.form()
        return {
            "index": answer.index,
            "text": echo + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop,
            **found,
        }

    def _echo(self, index: int) -> str:
        """The prompt of an answer, where it is to be repeated."""
        if not self.fields.echo:
            return ""
        tokens, text = self.prompts[index // self.fields.n]
        return self.words.decode_all(tokens) if text is None else text

    def _prompt_columns(self, columns: CompletionLogprobs, answer: Answer | AnswerDelta) -> None:
        tokens = self.prompts[answer.index // self.fields.n][0]
        columns.begin(tokens[0])
        for one in answer.prompt_logprobs or ():
            columns.add_prompt(one)

    async def events(self, completion: CompletionCall) -> AsyncIterator[bytes]:
        """The stream."""
        fields, usage = self.fields, completion.usage
        options = fields.stream_options
        head = (
            f'data: {{"id":"{self.id}","object":"text_completion","created":{self.call.created},'
            f'"model":{quoted(self.call.service.model.name)},"choices":['
        )
        per_chunk = options is not None and options.continuous_usage_stats
        tail = ',"usage":null}\n\n' if options is not None and options.include_usage else "}\n\n"
        unopened = set(range(completion.ask.answers)) if fields.echo else set()
        columns: dict[int, CompletionLogprobs] = {}
        async for pieces in completion:
            events: list[str] = []
            for piece in pieces:
                text, logprobs = piece.text, "null"
                if fields.logprobs is not None:
                    logprobs = self._columns(columns, piece)
                if piece.index in unopened:
                    unopened.discard(piece.index)
                    text = self._echo(piece.index) + text
                end = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
                if piece.stop is not None:
                    end += f',"stop_reason":{dumps(piece.stop)}'
                if per_chunk:
                    tail = f',"usage":{dumps(usage_form(usage))}}}\n\n'
                events.append(
                    f'{head}{{"index":{piece.index},"text":{quoted(text)},"logprobs":{logprobs},'
                    f'"finish_reason":{end}}}]{tail}'
                )
            yield "".join(events).encode()
        if options is not None and options.include_usage:
            yield f'{head}],"usage":{dumps(usage_form(usage))}}}\n\n'.encode() + DONE
        else:
            yield DONE

    def _columns(self, known: dict[int, CompletionLogprobs], piece: AnswerDelta) -> str:
        """The log-probabilities of one piece."""
        columns = known.get(piece.index)
        if columns is None:
            as_ids = self.fields.return_tokens_as_token_ids
            columns = known[piece.index] = CompletionLogprobs(self.words, as_ids=as_ids)
            if self.fields.echo:
                columns.begin(self.prompts[piece.index // self.fields.n][0][0])
        for one in piece.prompt_logprobs or ():
            columns.add_prompt(one)
        if self.fields.echo and piece.tokens:
            columns.offset = max(columns.offset, len(self._echo(piece.index)))
        for one, text in zip(piece.logprobs or (), piece.texts or (), strict=True):
            columns.add(one, text)
        form = dumps(columns.form())
        columns.clear()
        return form


def usage_form(usage: Usage) -> dict[str, Any]:
    """Tokens, as completions and chats tell them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
