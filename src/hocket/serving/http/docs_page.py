"""The OpenAPI document of a server as one self-contained page: routes, fields, a command each."""

from __future__ import annotations

import json
from html import escape
from typing import Any

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/responses": {"input": "Hello"},
    "/v1/models/reload": {},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [72, 105]},
    "/v1/tokenize": {"prompt": "Hello"},
    "/v1/detokenize": {"tokens": [72, 105]},
}
"""A body for each route that takes one."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.3rem; } code, pre { font: .85rem/1.45 ui-monospace, monospace; }
details { border: 1px solid #8886; border-radius: .5rem; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; } pre { overflow-x: auto; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-top: 1px solid #8883;
  vertical-align: top; }
"""


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document, as `openapi.document` makes it; it loads nothing else."""
    schemas = document["components"]["schemas"]
    header = ' -H "Authorization: Bearer $KEY"' if "security" in document else ""
    routes = "".join(
        _route(method, path, operation, schemas, header)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<title>hocket: API</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>Routes of this server</h1>\n"
        "<p>OpenAI's API; clients of OpenAI take <code>/v1</code> at this address as their base "
        'URL. The same for programs: <a href="openapi.json">openapi.json</a>. A chat page: '
        f'<a href="./">/</a>.</p>\n{routes}</body>\n</html>\n'
    )


def _route(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any], header: str
) -> str:
    """One route, folded."""
    body = operation.get("requestBody")
    command = f"curl $URL{path}{header if operation.get('security') != [] else ''}"
    table = ""
    if body is not None:
        schema = _resolved(body["content"]["application/json"]["schema"], schemas)
        example = json.dumps(EXAMPLES[path])
        command += f" -H 'content-type: application/json' -d '{example}'"
        table = _table(schema, schemas)
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>\n<pre>{escape(command)}</pre>\n{table}"
        "</details>\n"
    )


def _table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The fields of an object."""
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field, schemas))}</td>"
        f"<td>{'required' if name in required else escape(_default(field))}</td></tr>\n"
        for name, field in schema.get("properties", {}).items()
    )
    head = "<tr><th>field</th><th>values</th><th>default</th></tr>\n"
    return f'<div class="table"><table>{head}{rows}</table></div>\n'


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value is None or value == "" else json.dumps(value)


def _kind(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The values that a field takes, in words."""
    field = _resolved(field, schemas)
    if "anyOf" in field:
        kinds = [_kind(one, schemas) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(field.get('items', {}), schemas)}"
    if kind == "object" and "properties" in field:
        return "object of " + ", ".join(field["properties"])
    bounds = [
        f"{words} {field[name]}"
        for name, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("maxLength", "characters: at most"),
        )
        if name in field and abs(field[name]) < 2**31 - 1
    ]
    return ", ".join((kind, *bounds))


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference names; others as they are."""
    found: dict[str, Any] = schema
    if "$ref" in schema:
        found = schemas[schema["$ref"].rpartition("/")[2]]
    return found
