"""Tools: functions that a model may call, as its template shows them and as it writes calls.

    Tools       what a request offers, and which form of writing the model's template teaches
    ToolText    one answer's text, split into what is said and the calls

Forms, each found in the template's own text:

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>       Qwen, Hermes
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]           Mistral
    llama     {"name": ..., "parameters": {...}}, the whole answer           Llama 3
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from hocket.serving.front.renderer import Templates
from hocket.serving.http.errors import bad
from hocket.serving.http.logprobs import dumps

MOST = 128
"""Tools of one request."""
MOST_HELD = 1 << 16
"""Characters of a call; what is longer is text."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_BEGIN = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "{"}
_END = {"hermes": "</tool_call>"}
_PYTHON_TAG = "<|python_tag|>"


class Tools:
    """What a request offers.

    Attributes:
        shown: the tools, as the template reads them; None: none.
        form: how the model writes calls. forced: names of which one must be called; None: free.
    """

    def __init__(
        self, shown: list[dict[str, Any]] | None, form: str, forced: list[str] | None
    ) -> None:
        self.shown = shown
        self.form = form
        self.forced = forced

    @property
    def special(self) -> bool:
        """Whether calls are written with special tokens, which text is otherwise without."""
        return self.shown is not None and self.form in ("mistral", "llama")

    @classmethod
    def read(cls, given: Any, choice: Any, templates: Templates | None) -> Tools:
        """`tools` and `tool_choice`. Raises ApiError."""
        if not given or choice == "none":
            if choice not in (None, "none", "auto"):
                raise bad("tool_choice needs tools", "tool_choice")
            return cls(None, "", None)
        if not isinstance(given, list) or len(given) > MOST:
            raise bad(f"tools must be a list of at most {MOST}", "tools")
        shown = [_tool(one, f"tools.{number}") for number, one in enumerate(given)]
        if templates is None or not templates.has_tools:
            raise bad("the model's chat template has no tools", "tools")
        form = _form(templates.text(True))
        names = [tool["function"]["name"] for tool in shown]
        return cls(shown, form, _forced(choice, names))

    def structure(self) -> tuple[str, str] | None:
        """What an answer must obey that has to call a tool, as (field, JSON text)."""
        if self.forced is None or self.shown is None:
            return None
        arguments = "parameters" if self.form == "llama" else "arguments"
        schemas = []
        for tool in self.shown:
            function = tool["function"]
            if function["name"] in self.forced:
                schemas.append(
                    {
                        "type": "object",
                        "properties": {
                            "name": {"const": function["name"]},
                            arguments: function.get("parameters") or {"type": "object"},
                        },
                        "required": ["name", arguments],
                        "additionalProperties": False,
                    }
                )
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return "tool_choice", json.dumps({"type": "json_schema", "schema": schema})


def _tool(given: Any, where: str) -> dict[str, Any]:
    """One tool; of responses, whose function lies flat, as of chats."""
    if not isinstance(given, dict) or given.get("type") != "function":
        raise bad(f"{where}.type must be function", where)
    function = given.get("function", {k: v for k, v in given.items() if k != "type"})
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not _NAME.match(name):
        raise bad(f"{where}.function.name must be 1 to 64 letters, digits, _ . -", where)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad(f"{where}.function.parameters must be a JSON schema", where)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise bad(f"{where}.function.description must be a text", where)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description or "",
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def _forced(choice: Any, names: list[str]) -> list[str] | None:
    if choice in (None, "auto"):
        return None
    if choice == "required":
        return names
    inner = choice.get("function", choice) if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if name not in names:
        raise bad(
            "tool_choice must be none, auto, required or a function that tools hold", "tool_choice"
        )
    return [name]


def _form(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    return "llama" if '"parameters"' in template or _PYTHON_TAG in template else "hermes"


class ToolCall:
    """One call that a model wrote."""

    def __init__(self, name: str, arguments: Any) -> None:
        self.id = f"call_{secrets.token_hex(12)}"
        self.name = name
        self.arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)

    def form(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolText:
    """One answer's text as it comes, without the calls in it.

    What may become a call is held back; what turns out to be none is said after all.

    Attributes:
        calls: those so far.
    """

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.calls: list[ToolCall] = []
        self._text = ""  # not yet said: the possible beginning of a call, or a call
        self._inside = False
        self._num_sent = 0
        self._whole = tools.forced is not None
        self._begun = False
        self._given_up = False

    def feed(self, text: str) -> str:
        """What may be said now."""
        if self.tools.shown is None or self._given_up:
            return text
        self._text += text
        if len(self._text) > MOST_HELD:
            self._given_up = True
            said, self._text = self._text, ""
            return _BEGIN[self.tools.form] + said if self._inside else said
        if self._whole:  # the structure makes the whole answer a call
            return ""
        return self._llama() if self.tools.form == "llama" else self._tagged()

    def end(self) -> str:
        """What is left at the end."""
        left, self._text = self._text, ""
        if not left:
            return ""
        if self._whole or self._inside or self.tools.form == "llama":
            found = _calls(left.removeprefix(_PYTHON_TAG))
            if found is not None and (known := self._known(found)):
                self.calls += known
                return ""
            if self._inside:
                return _BEGIN[self.tools.form] + left
        return left

    def deltas(self, text: str, *, last: bool) -> tuple[str, str]:
        """(what may be said now, the JSON of calls that have become whole)."""
        said = self.feed(text)
        if last:
            said += self.end()
        new = self.calls[self._num_sent :]
        calls = [{"index": i, **one.form()} for i, one in enumerate(new, self._num_sent)]
        self._num_sent = len(self.calls)
        return said, dumps(calls) if calls else ""

    def _llama(self) -> str:
        """A call is the whole answer: its first character tells."""
        start = self._text.lstrip()
        if self._begun or (
            start and not start.startswith("{") and not _PYTHON_TAG.startswith(start[:14])
        ):
            self._begun = True
            said, self._text = self._text, ""
            return said
        return ""

    def _tagged(self) -> str:
        """Calls stand between tags, or from a tag to the end."""
        begin, end = _BEGIN[self.tools.form], _END.get(self.tools.form)
        said = []
        while self._text:
            if self._inside:
                at = -1 if end is None else self._text.find(end)
                if at < 0:
                    break
                assert end is not None
                inside, self._text = self._text[:at], self._text[at + len(end) :]
                self._inside = False
                found = self._known(_calls(inside) or [])
                self.calls += found
                if not found:
                    said.append(begin + inside + end)
                continue
            at = self._text.find(begin)
            if at >= 0:
                said.append(self._text[:at])
                self._text = self._text[at + len(begin) :]
                self._inside = True
                continue
            free = len(self._text) - _overlap(self._text, begin)
            said.append(self._text[:free])
            self._text = self._text[free:]
            break
        return "".join(said)

    def _known(self, found: list[ToolCall]) -> list[ToolCall]:
        """Calls of tools that were offered; others are text."""
        names = {tool["function"]["name"] for tool in self.tools.shown or ()}
        return found if all(one.name in names for one in found) else []


def _overlap(text: str, begin: str) -> int:
    """Characters at the end of a text that may begin a tag."""
    for size in range(min(len(begin) - 1, len(text)), 0, -1):
        if begin.startswith(text[-size:]):
            return size
    return 0


def _calls(text: str) -> list[ToolCall] | None:
    """The calls in some JSON; None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return None
        calls.append(ToolCall(one["name"], one.get("arguments", one.get("parameters", {}))))
    return calls
