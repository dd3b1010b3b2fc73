"""Messages of a chat: checked, and in the form that models' templates read."""

from __future__ import annotations

import json
from typing import Any

from hocket.models.chat_template import SWITCHES
from hocket.serving.http.errors import ApiError, bad

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MOST = 10_000
"""Messages of one chat."""


def read_messages(given: Any, param: str = "messages") -> list[dict[str, Any]]:
    """Plain messages: `role`, `content` as one text, and what belongs to tools.

    Raises:
        ApiError: there are none, or one cannot be.
    """
    if not isinstance(given, list) or not given:
        raise bad(f"{param} must be a list of messages, one or more", param)
    if len(given) > MOST:
        raise bad(f"{param} has {len(given)} messages; at most {MOST}", param)
    return [_message(one, f"{param}.{number}") for number, one in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise bad(f"{where} must be an object", where)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    found: dict[str, Any] = {"role": ROLES[role]}
    calls = given.get("tool_calls")
    content = given.get("content")
    if content is None and not (role == "assistant" and calls):
        if role != "assistant":
            raise bad(f"{where}.content is missing", f"{where}.content")
        content = ""
    found["content"] = message_text(content or "", f"{where}.content")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if given.get(name) is not None:
            if not isinstance(given[name], str):
                raise bad(f"{where}.{name} must be a text", f"{where}.{name}")
            found[name] = given[name]
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise bad(f"{where}.tool_calls: only an assistant calls tools", f"{where}.tool_calls")
        found["tool_calls"] = [_tool_call(one, f"{where}.tool_calls") for one in calls]
    return found


def message_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} must be a text or a list of parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            shown = kind if isinstance(kind, str) else type(part).__name__
            raise bad(f"{where} holds a part of type {shown[:40]!r}; this model reads text", where)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise bad(f"{where} holds a part without text", where)
        texts.append(text)
    return "".join(texts)


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{where}: a call needs function.name", where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        # Templates write arguments as JSON: as a text they would be quoted twice.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise bad(f"{where}: function.arguments is not JSON", where) from None
    return {
        "id": str(given.get("id", ""))[:200],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def read_switches(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`: switches that templates know, and nothing else.

    Raises:
        ApiError: another name, or a value that is no switch.
    """
    for name, value in (given or {}).items():
        if name not in SWITCHES:
            raise bad(
                f"chat_template_kwargs holds {name[:64]!r}; known: {', '.join(sorted(SWITCHES))}",
                "chat_template_kwargs",
            )
        if not isinstance(value, bool | int | str) or len(str(value)) > 64:
            raise bad(f"chat_template_kwargs.{name} must be short", "chat_template_kwargs")
    return dict(given or {})


def refuse_template(given: Any) -> None:
    """A template is a program: one that comes with a request is not run."""
    if given is not None:
        raise ApiError(
            400,
            "chat_template: this server runs no template of a request",
            param="chat_template",
        )
