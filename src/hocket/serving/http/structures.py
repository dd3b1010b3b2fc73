"""The structure that an answer must have, by whichever name a client asks for it.

Each becomes the JSON of `SamplingParams.structure`: {"type": "json_object"}, {"type":
"json_schema", "schema": ...} or {"type": "regex", "pattern": ...}.
"""

from __future__ import annotations

import json
from typing import Any

from hocket.serving.http.errors import bad


def response_format(given: Any) -> dict[str, Any] | None:
    """Of chats: {"type": "text" | "json_object" | "json_schema", ...}; of responses, the same
    with the schema's fields next to the type.
    """
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        if isinstance(inner, dict) and "schema" in inner:
            return schema(inner["schema"], "response_format")
        raise bad("response_format.json_schema has no schema", "response_format")
    if kind == "regex" and isinstance(given.get("pattern"), str):
        return pattern(given["pattern"])
    raise bad(
        "response_format.type must be one of text, json_object, json_schema", "response_format"
    )


def structured_outputs(given: Any) -> dict[str, Any] | None:
    """{"json": ...}, {"regex": ...}, {"choice": [...]} or {"json_object": true}."""
    if given is None:
        return None
    if isinstance(given, dict):
        asked = {name: value for name, value in given.items() if value not in (None, False)}
        if len(asked) == 1:
            name, value = next(iter(asked.items()))
            if name == "json":
                return schema(value, "structured_outputs")
            if name == "json_object":
                return {"type": "json_object"}
            if name == "regex" and isinstance(value, str):
                return pattern(value)
            if name == "choice" and isinstance(value, list):
                return choice_regex(value)
    raise bad(
        "structured_outputs must hold one of json, json_object, regex, choice",
        "structured_outputs",
    )


def schema(given: Any, param: str = "guided_json") -> dict[str, Any]:
    """A JSON schema: an object, or its text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise bad(f"{param} is not JSON: {error}", param) from None
    if not isinstance(given, dict | bool):
        raise bad(f"{param} must be a JSON schema, an object", param)
    return {"type": "json_schema", "schema": given}


def pattern(given: str | None) -> dict[str, Any] | None:
    return None if given is None else {"type": "regex", "pattern": given}


def choice_regex(given: list[Any] | None) -> dict[str, Any] | None:
    """One of some strings, as a regular expression."""
    if given is None:
        return None
    if not given or not all(isinstance(one, str) for one in given):
        raise bad("a choice is a list of strings, one or more", "guided_choice")
    return pattern("|".join(f"({_literal(one)})" for one in given))


def _literal(text: str) -> str:
    """A regular expression of a text itself, in every dialect: only punctuation is escaped."""
    return "".join("\\" + c if c in r"\.^$|?*+()[]{}-/" else c for c in text)
