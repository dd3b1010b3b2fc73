"""Conversations: what a record of chat or completion data says, and on which of it loss falls.

    {"messages": [{"role": "user", "content": ...}, ...]}         the assistant's turns
    {"conversations": [{"from": "human", "value": ...}, ...]}     the same, ShareGPT's words
    {"prompt": ..., "completion": ...}                            the completion; texts, or messages
    {"instruction": ..., "input": ..., "output": ...}             the output, after Alpaca's prompt

Never imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from hocket.spec.errors import DataError, nearest

CHAT, COMPLETION, TEXT = "chat", "completion", "text"

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHARED = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""The words of ShareGPT's `from`, as roles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and from which one on the assistant's are learned.

    Attributes:
        messages: each with `role` and `content`, as templates read them.
        first: messages before this one are given, whatever their role.
        tools: what the template gets of tools.
    """

    messages: tuple[Mapping[str, Any], ...]
    first: int = 0
    tools: list[Any] | None = None

    @property
    def turns(self) -> list[int]:
        """Numbers of the messages that are learned."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.first and message["role"] == "assistant"
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptAnswer:
    """A prompt and what follows it, as plain texts; the second is learned."""

    prompt: str
    completion: str


def format_of(fields: Collection[str]) -> str:
    """What records with these fields hold."""
    if "messages" in fields or "conversations" in fields:
        return CHAT
    pairs = ({"prompt", "completion"}, {"instruction", "output"})
    return COMPLETION if any(pair <= set(fields) for pair in pairs) else TEXT


def read_conversation(
    record: Mapping[str, Any], kind: str, where: str
) -> Conversation | PromptAnswer:
    """A record as a conversation or a pair.

    Args:
        kind: `chat` or `completion`. where: file and line, for what is said of a mistake.

    Raises:
        DataError: fields that are missing, no messages, a role that nobody has, no text.
    """
    if kind == CHAT:
        if "messages" in record:
            messages = _messages(record["messages"], "messages", where)
        elif "conversations" in record:
            messages = _shared(record["conversations"], where)
        else:
            raise _missing(record, ("messages", "conversations"), where)
        return Conversation(messages=messages, tools=_tools(record.get("tools"), where))
    if "prompt" not in record and "instruction" in record:
        return _alpaca(record, where)
    for name in ("prompt", "completion"):
        if name not in record:
            raise _missing(record, (name,), where)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt", where)
        after = _messages(completion, "completion", where)
        return Conversation(
            messages=(*before, *after),
            first=len(before),
            tools=_tools(record.get("tools"), where),
        )
    for name, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise DataError(
                f"{where}: {name} is {_kind(text)}; prompt and completion are two texts, or two "
                "lists of messages"
            )
    return PromptAnswer(prompt=_clean(prompt), completion=_clean(completion))


_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:",
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:",
)
"""Prompts without and with an input, of https://github.com/tatsu-lab/stanford_alpaca, train.py."""


def _alpaca(record: Mapping[str, Any], where: str) -> PromptAnswer:
    words = {}
    for name in ("instruction", "input", "output"):
        text = record.get(name)
        if text is None and name == "input":
            text = ""
        if not isinstance(text, str):
            raise DataError(f"{where}: {name} is {_kind(text)}, not text")
        words[name] = _clean(text)
    prompt = _ALPACA[bool(words["input"].strip())]
    prompt = prompt.replace("{input}", words["input"], 1) if words["input"].strip() else prompt
    return PromptAnswer(
        prompt=prompt.replace("{instruction}", words["instruction"], 1),
        completion=words["output"],
    )


def _messages(value: Any, name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: {name} is {_kind(value)}, not a list of messages")
    if not value:
        raise DataError(f"{where}: {name} is empty", hint="leave such records out")
    return tuple(_message(one, f"{where}, message {number}") for number, one in enumerate(value, 1))


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {_kind(value)}, not an object with role and content")
    # Tables fill in what only other messages have.
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        near = nearest(str(role), ROLES)
        raise DataError(
            f"{where} has the role {role!r}; known: {', '.join(ROLES)}",
            hint=f'"role": "{near or "user"}"',
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is None and role == "assistant" and "tool_calls" in message:
        return message  # templates write the calls
    if not isinstance(content, str):
        raise DataError(f"{where}: its content is {_kind(content)}, not text")
    return {**message, "content": _clean(content)}


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part["text"], str):
        return part["text"]
    raise DataError(f"{where}: a part of its content is not text, and only text can be learned")


def _shared(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: conversations is {_kind(value)}, not a list of messages")
    turned = []
    for number, one in enumerate(value, 1):
        if isinstance(one, Mapping) and "from" in one:
            said = one["from"]
            if said not in _SHARED:
                near = nearest(str(said), _SHARED)
                raise DataError(
                    f"{where}, message {number} is from {said!r}; known: {', '.join(_SHARED)}",
                    hint=f'"from": "{near or "human"}"',
                )
            one = {"role": _SHARED[said], "content": one.get("value")}
        turned.append(one)
    return _messages(turned, "conversations", where)


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: tools is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError(f"{where}: tools is {_kind(value)}, not a list")
    return value


def _missing(record: Mapping[str, Any], names: tuple[str, ...], where: str) -> DataError:
    there = sorted(record)
    return DataError(
        f"{where} has no field {' or '.join(map(repr, names))}"
        + (f"; it has {', '.join(map(repr, there))}" if there else ""),
        hint="--data-format text, with --text-field NAME",
    )


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _clean(text: str) -> str:
    """Text that can be encoded: half of a pair of surrogates cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
