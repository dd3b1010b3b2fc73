"""/v1/responses: OpenAI's newer interface, of text and function calls, without a memory.

Nothing is stored between requests: what refers to an earlier response is refused, and clients
send the whole conversation in `input`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from hocket.serving.front.ask import Answer, Usage
from hocket.serving.front.completion import CompletionCall
from hocket.serving.http.call import DONE, Call, json_response, quoted
from hocket.serving.http.chat import max_tokens
from hocket.serving.http.errors import bad
from hocket.serving.http.fields import ResponseFields
from hocket.serving.http.logprobs import chat_logprobs, dumps
from hocket.serving.http.messages import message_text, read_messages, read_switches
from hocket.serving.http.tools import ToolCall, Tools, ToolText


async def responses(call: Call) -> Response | None:
    """The handler."""
    service, fields = call.service, ResponseFields.read(call.body)
    service.check_model(fields.model)
    _refuse(fields)
    messages = read_input(fields)
    tools = Tools.read(fields.tools, fields.tool_choice, service.templates)
    if isinstance(fields.text, dict) and fields.text.get("format") is not None:
        if fields.response_format is not None:
            raise bad("text.format and response_format both ask for a structure", "text")
        fields.response_format = fields.text["format"]
    wants_logprobs = "message.output_text.logprobs" in (call.body.get("include") or [])
    if fields.top_logprobs > service.settings.max_alternatives:
        raise bad(
            f"top_logprobs is {fields.top_logprobs}; at most {service.settings.max_alternatives}",
            "top_logprobs",
        )
    prompt = await service.render(
        messages,
        tools=tools.shown,
        switches=read_switches(fields.chat_template_kwargs),
        param="input",
    )
    completion = service.start(
        fields,
        [prompt],
        fields.sampling(
            max_tokens=max_tokens(service, len(prompt), fields.max_output_tokens),
            stop=service.model.stop,
            vocab_size=service.model.vocab_size,
            defaults=service.model.sampling,
            logprobs=fields.top_logprobs if wants_logprobs else None,
            structure=await service.structure(tools.structure(), fields.structure()),
        ),
        who=call.who,
        param="input",
        special=tools.special,
    )
    form = _Form(call, fields, tools)
    with call.counted(completion):
        if fields.stream:
            await call.stream(form.events(completion), name_errors=True)
            return None
        answer = (await completion.collect())[0]
    return json_response(form.whole(answer, completion.usage))


def _refuse(fields: ResponseFields) -> None:
    """Raise ApiError for what needs a memory, or more than text."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(fields, name) is not None:
            raise bad(
                f"{name}: this server stores nothing; send the whole conversation in input", name
            )
    if fields.background:
        raise bad("background: this server answers while it is asked", "background")
    if fields.n != 1:
        raise bad("n: a response is one answer", "n")


def read_input(fields: ResponseFields) -> list[dict[str, Any]]:
    """`instructions` and `input`, a text or items, as the messages of a chat. Raises ApiError."""
    found: list[Any] = []
    if fields.instructions:
        found.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        found.append({"role": "user", "content": fields.input})
    elif isinstance(fields.input, list) and fields.input:
        for number, item in enumerate(fields.input):
            _item(item, f"input.{number}", found)
    else:
        raise bad("input must be a text or a list of items, one or more", "input")
    return read_messages(found, "input")


def _item(item: Any, where: str, found: list[Any]) -> None:
    """Add one item to the messages."""
    if not isinstance(item, dict):
        raise bad(f"{where} must be an object", where)
    kind = item.get("type", "message")
    if kind == "message":
        found.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id", ""),
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
        }
        if found and found[-1].get("tool_calls"):
            found[-1]["tool_calls"].append(call)
        else:
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        text = message_text(item.get("output", ""), f"{where}.output")
        found.append(
            {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))[:200]}
        )
    elif kind != "reasoning":  # what a model thought is not shown to it again
        raise bad(f"{where}.type {str(kind)[:40]!r} is not supported", f"{where}.type")


class _Form:
    """How one call's answer is written."""

    def __init__(self, call: Call, fields: ResponseFields, tools: Tools) -> None:
        self.call, self.fields, self.tools = call, fields, tools
        self.words = call.service.words
        self.id = f"resp_{call.who.id}"
        self.item = f"msg_{call.who.id}"
        self.number = 0

    def response(
        self, status: str, output: list[Any], usage: Usage | None = None, why: str | None = None
    ) -> dict[str, Any]:
        """The response object."""
        fields = self.fields
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": None if why is None else {"reason": why},
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self.call.service.model.name,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": fields.response_format or {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "metadata": fields.metadata or {},
            "usage": None if usage is None else _usage(usage),
        }

    def whole(self, answer: Answer, usage: Usage) -> dict[str, Any]:
        """The response without a stream."""
        text = ToolText(self.tools)
        said = text.feed(answer.text)
        said += text.end()
        logprobs = chat_logprobs(self.words, answer.logprobs, self.fields.top_logprobs)
        output: list[Any] = []
        if said.strip() or not text.calls:
            output.append(self._message(said, _status(answer.finish_reason), logprobs))
        output += [_function_call(one) for one in text.calls]
        return self._ended(answer.finish_reason, output, usage)

    def _ended(self, finish: str | None, output: list[Any], usage: Usage) -> dict[str, Any]:
        why = "max_output_tokens" if finish == "length" else None
        return self.response(_status(finish), output, usage, why)

    def _message(self, text: str | None, status: str, logprobs: list[Any]) -> dict[str, Any]:
        content = [] if text is None else [_part(text, logprobs)]
        return {
            "id": self.item,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _event(self, kind: str, **values: Any) -> str:
        data = dumps({"type": kind, "sequence_number": self.number, **values})
        self.number += 1
        return f"event: {kind}\ndata: {data}\n\n"

    async def events(self, completion: CompletionCall) -> AsyncIterator[bytes]:
        """The stream: created, in_progress, the message's or calls' own events, completed."""
        text, parts, finish = ToolText(self.tools), [""], None
        logprobs: list[Any] = []
        output: list[Any] = []
        opened = False
        head = (
            'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
            f'"item_id":"{self.item}","output_index":0,"content_index":0,"sequence_number":'
        )
        begun = self._event("response.created", response=self.response("in_progress", []))
        begun += self._event("response.in_progress", response=self.response("in_progress", []))
        async for pieces in completion:
            piece = pieces[0]
            finish = piece.finish_reason
            said = text.feed(piece.text)
            if finish is not None:
                said += text.end()
            new = chat_logprobs(self.words, piece.logprobs or (), self.fields.top_logprobs)
            logprobs += new
            if not opened and (said or (finish is not None and not text.calls)):
                opened = True
                begun += self._open()
            if said:
                parts.append(said)
                begun += f'{head}{self.number},"delta":{quoted(said)},"logprobs":{dumps(new)}}}\n\n'
                self.number += 1
            if begun:
                yield begun.encode()
                begun = ""
        if opened:
            output.append(self._message("".join(parts), _status(finish), logprobs))
            begun += self._close(output[0])
        for one in text.calls:
            begun += self._called(len(output), one)
            output.append(_function_call(one))
        kind = "response.incomplete" if finish == "length" else "response.completed"
        begun += self._event(kind, response=self._ended(finish, output, completion.usage))
        yield begun.encode() + DONE

    def _open(self) -> str:
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        return self._event(
            "response.output_item.added",
            output_index=0,
            item=self._message(None, "in_progress", []),
        ) + self._event("response.content_part.added", part=_part("", []), **place)

    def _close(self, item: dict[str, Any]) -> str:
        part = item["content"][0]
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        return (
            self._event(
                "response.output_text.done",
                text=part["text"],
                logprobs=part["logprobs"],
                **place,
            )
            + self._event("response.content_part.done", part=part, **place)
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def _called(self, index: int, one: ToolCall) -> str:
        item = _function_call(one)
        place = {"item_id": item["id"], "output_index": index}
        empty = {**item, "arguments": "", "status": "in_progress"}
        return (
            self._event("response.output_item.added", output_index=index, item=empty)
            + self._event("response.function_call_arguments.delta", delta=one.arguments, **place)
            + self._event(
                "response.function_call_arguments.done",
                arguments=one.arguments,
                name=one.name,
                **place,
            )
            + self._event("response.output_item.done", output_index=index, item=item)
        )


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _function_call(one: ToolCall) -> dict[str, Any]:
    return {
        "id": "fc_" + one.id.removeprefix("call_"),
        "type": "function_call",
        "status": "completed",
        "call_id": one.id,
        "name": one.name,
        "arguments": one.arguments,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
