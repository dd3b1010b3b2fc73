"""The routes of a server as an OpenAPI 3.1 document, from the fields that read the requests."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

from hocket.serving.http.fields import ChatFields, CompletionFields, ResponseFields, TokenizeFields
from hocket.serving.http.gate import OPEN


class DetokenizeFields(BaseModel):
    """`/detokenize`: token ids to text."""

    tokens: list[int]


class ReloadFields(BaseModel):
    """`/v1/models/reload`: other weights, of a folder below `--reload-dir`."""

    model_config = ConfigDict(extra="forbid")
    path: str | None = None


BODIES: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a chat", ChatFields),
    "/v1/completions": ("Continue texts", CompletionFields),
    "/v1/responses": ("Answer a list of input items; nothing is stored", ResponseFields),
    "/v1/models/reload": ("Load other weights without losing a request", ReloadFields),
    "/tokenize": ("Token ids of a text or a chat", TokenizeFields),
    "/detokenize": ("Text of token ids", DetokenizeFields),
    "/v1/tokenize": ("Token ids of a text or a chat", TokenizeFields),
    "/v1/detokenize": ("Text of token ids", DetokenizeFields),
}
"""Routes with a JSON body: what each does, and its fields."""

READ = {
    "/v1/models": "The served model",
    "/v1/models/{name}": "One model by its name",
    "/health": "Whether the process answers",
    "/ready": "Whether a request would be answered",
    "/version": "The version of hocket",
    "/openapi.json": "This document",
    "/docs": "This document as a page",
}
"""Routes without a body."""

_KEY: list[dict[str, list[str]]] = [{"key": []}]
_ERROR = {
    "description": "An error in OpenAI's form",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "integer", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def document(version: str, keys: bool) -> dict[str, Any]:
    """The document.

    Args:
        version: of hocket.
        keys: whether requests need a bearer key.
    """
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, (summary, fields) in BODIES.items():
        schema = fields.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[fields.__name__] = schema
        body = {"schema": {"$ref": f"#/components/schemas/{fields.__name__}"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": _name("post", path),
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": _responses("text/event-stream" if _streams(fields) else None),
            }
        }
    for path, summary in READ.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": _name("get", path),
            "responses": _responses(None),
        }
        if "{name}" in path:
            place = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [place]
        if path in OPEN:
            operation["security"] = []
        paths[path] = {"get": operation}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "hocket", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if keys:
        found["security"] = _KEY
    return found


def _streams(fields: type[BaseModel]) -> bool:
    return "stream" in fields.model_fields


def _responses(also: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if also is not None:
        content[also] = {"schema": {"type": "string"}}
    return {
        "200": {"description": "The answer", "content": content},
        "default": {"$ref": "#/components/responses/error"},
    }


def _name(method: str, path: str) -> str:
    """`post /v1/chat/completions` as an identifier: post_v1_chat_completions."""
    return "_".join([method, *re.findall(r"\w+", path)])
