"""/v1/chat/completions: messages to the assistant's next one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from hocket.serving.front.ask import Answer, Usage
from hocket.serving.front.completion import CompletionCall
from hocket.serving.http.call import DONE, Call, json_response, quoted
from hocket.serving.http.completions import usage_form
from hocket.serving.http.errors import bad
from hocket.serving.http.fields import ChatFields
from hocket.serving.http.logprobs import chat_logprobs, dumps
from hocket.serving.http.messages import read_messages, read_switches, refuse_template
from hocket.serving.http.service import HttpService
from hocket.serving.http.tools import Tools, ToolText


async def chat(call: Call) -> Response | None:
    """The handler."""
    service, fields = call.service, ChatFields.read(call.body)
    service.check_model(fields.model)
    refuse_template(fields.chat_template)
    messages = read_messages(fields.messages)
    tools = Tools.read(fields.tools, fields.tool_choice, service.templates)
    prompt = await service.render(
        messages,
        tools=tools.shown,
        switches=read_switches(fields.chat_template_kwargs),
        continue_last=fields.continue_final_message,
        param="messages",
    )
    logprobs = _logprobs(fields, service)
    completion = service.start(
        fields,
        [prompt],
        fields.sampling(
            max_tokens=max_tokens(
                service, len(prompt), fields.max_completion_tokens, fields.max_tokens
            ),
            stop=service.model.stop,
            vocab_size=service.model.vocab_size,
            defaults=service.model.sampling,
            logprobs=logprobs,
            structure=await service.structure(tools.structure(), fields.structure()),
        ),
        who=call.who,
        param="messages",
        special=tools.special,
    )
    form = _Form(call, fields, tools)
    with call.counted(completion):
        if fields.stream:
            await call.stream(form.events(completion))
            return None
        answers = await completion.collect()
    return json_response(form.whole(answers, completion.usage))


def max_tokens(service: HttpService, prompt: int, *asked: int | None) -> int:
    """Tokens that may follow: the first that is asked for, else as many as there is room for."""
    for one in asked:
        if one is not None:
            if one < 1:
                raise bad(f"max_tokens is {one}; it must be at least 1", "max_tokens")
            return one
    left = service.left(prompt)
    if left < 1:
        service.check_fits(prompt, 1, "messages")
    return left


def _logprobs(fields: ChatFields, service: HttpService) -> int | None:
    most = service.settings.max_alternatives
    if fields.top_logprobs > most:
        raise bad(f"top_logprobs is {fields.top_logprobs}; at most {most}", "top_logprobs")
    if fields.top_logprobs and not fields.logprobs:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
    return fields.top_logprobs if fields.logprobs else None


class _Form:
    """How one call's answers are written."""

    def __init__(self, call: Call, fields: ChatFields, tools: Tools) -> None:
        self.call, self.fields, self.tools = call, fields, tools
        self.words = call.service.words
        self.id = f"chatcmpl-{call.who.id}"

    def whole(self, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        """The response without a stream."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.call.created,
            "model": self.call.service.model.name,
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_form(usage),
        }

    def _choice(self, answer: Answer) -> dict[str, Any]:
        text = ToolText(self.tools)
        content = text.feed(answer.text)
        content += text.end()
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        finish = answer.finish_reason
        if text.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [one.form() for one in text.calls]
            finish = "tool_calls" if finish == "stop" else finish
        logprobs = None
        if self.fields.logprobs:
            most = self.fields.top_logprobs
            logprobs = {
                "content": chat_logprobs(self.words, answer.logprobs, most),
                "refusal": None,
            }
        return {
            "index": answer.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": answer.stop,
        }

    async def events(self, completion: CompletionCall) -> AsyncIterator[bytes]:
        """The stream."""
        fields, usage = self.fields, completion.usage
        options = fields.stream_options
        head = (
            f'data: {{"id":"{self.id}","object":"chat.completion.chunk",'
            f'"created":{self.call.created},"model":{quoted(self.call.service.model.name)},'
            '"choices":['
        )
        per_chunk = options is not None and options.continuous_usage_stats
        tail = ',"usage":null}\n\n' if options is not None and options.include_usage else "}\n\n"
        texts: dict[int, ToolText] = {}
        unopened = set(range(completion.ask.answers))
        async for pieces in completion:
            events: list[str] = []
            if per_chunk:
                tail = f',"usage":{dumps(usage_form(usage))}}}\n\n'
            for piece in pieces:
                index, logprobs, finish = piece.index, "null", piece.finish_reason
                if index in unopened:
                    unopened.discard(index)
                    events.append(
                        f'{head}{{"index":{index},"delta":{{"role":"assistant","content":""}},'
                        f'"logprobs":null,"finish_reason":null}}]{tail}'
                    )
                if piece.logprobs:
                    found = chat_logprobs(self.words, piece.logprobs, fields.top_logprobs)
                    logprobs = dumps({"content": found, "refusal": None})
                content, calls = piece.text, ""
                if self.tools.shown:
                    text = texts.setdefault(index, ToolText(self.tools))
                    content, calls = text.deltas(piece.text, last=finish is not None)
                    if text.calls and finish == "stop":
                        finish = "tool_calls"
                if content or piece.logprobs:
                    events.append(
                        f'{head}{{"index":{index},"delta":{{"content":{quoted(content)}}},'
                        f'"logprobs":{logprobs},"finish_reason":null}}]{tail}'
                    )
                if calls:
                    events.append(
                        f'{head}{{"index":{index},"delta":{{"tool_calls":{calls}}},'
                        f'"logprobs":null,"finish_reason":null}}]{tail}'
                    )
                if finish is not None:
                    stop = "" if piece.stop is None else f',"stop_reason":{dumps(piece.stop)}'
                    events.append(
                        f'{head}{{"index":{index},"delta":{{}},"logprobs":null,'
                        f'"finish_reason":"{finish}"{stop}}}]{tail}'
                    )
            yield "".join(events).encode()
        if options is not None and options.include_usage:
            yield f'{head}],"usage":{dumps(usage_form(usage))}}}\n\n'.encode() + DONE
        else:
            yield DONE
