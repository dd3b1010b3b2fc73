"""Routes that generate nothing: models, tokenize, detokenize, health and readiness, the page."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib import resources
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from hocket.serving.http import docs_page
from hocket.serving.http.call import Call, json_response
from hocket.serving.http.completions import is_id
from hocket.serving.http.errors import ApiError, bad
from hocket.serving.http.fields import TokenizeFields
from hocket.serving.http.messages import read_messages, read_switches
from hocket.serving.http.openapi import document
from hocket.serving.http.service import HttpService
from hocket.serving.http.tools import Tools
from hocket.spec.errors import ModelError


class Plain:
    """Handlers of GET routes."""

    def __init__(self, service: HttpService) -> None:
        self.service = service
        text = resources.files("hocket.serving.http").joinpath("page.html").read_text("utf-8")
        self.page = text.encode()
        self.page_headers = {"Content-Security-Policy": policy(text)}
        docs = docs_page.page(document("", keys=service.settings.keys is not None))
        self.docs = docs.encode()
        self.docs_headers = {"Content-Security-Policy": policy(docs)}

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        model = self.service.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "hocket",
            "max_model_len": model.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """The version of hocket, as vLLM's route has its own."""
        from hocket import __version__

        return json_response({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        """The routes and their fields as an OpenAPI document."""
        from hocket import __version__

        return json_response(document(__version__, keys=self.service.settings.keys is not None))

    async def docs_page(self, request: Request) -> Response:
        """The same as a page, without the version: it is open to clients without a key."""
        return Response(self.docs, headers=self.docs_headers, media_type="text/html; charset=utf-8")

    async def ready(self, request: Request) -> Response:
        """Whether a request would be answered, and the replicas that answer none."""
        if self.service.closing or bool(getattr(self.service.replicas, "closed", None)):
            return json_response({"status": "ending"}, 503)
        missing = self.service.missing()
        found = {"missing": missing} if missing else {}
        if not self.service.replicas.ready:
            return json_response({"status": "starting", **found}, 503)
        return json_response({"status": "ready", **found})

    async def chat_page(self, request: Request) -> Response:
        """The chat page; to somebody without a key, as an error that asks for one."""
        status = 401 if request.scope["state"].get("stranger") else 200
        headers = dict(self.page_headers)
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.page, status, headers, media_type="text/html; charset=utf-8")


async def tokenize(call: Call) -> Response | None:
    """`prompt` or `messages` to token ids."""
    service = call.service
    try:
        fields = TokenizeFields.model_validate(call.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise bad(f"{first['loc'][0]}: {first['msg']}", str(first["loc"][0])) from None
    if fields.messages is not None:
        ids = await service.render(
            read_messages(fields.messages),
            tools=Tools.read(fields.tools, None, service.templates).shown,
            switches=read_switches(fields.chat_template_kwargs),
            continue_last=not fields.add_generation_prompt,
        )
    elif fields.prompt is not None:
        ids = await service.encode(fields.prompt, special=fields.add_special_tokens)
    else:
        raise bad("prompt or messages is missing", "prompt")
    found: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": service.model.max_model_len,
    }
    if fields.return_token_strs:
        found["token_strs"] = [service.words.token_text(token) for token in ids]
    return json_response(found)


async def reload(call: Call) -> Response | None:
    """Other weights for the model: those at `path`, or the served ones, read again."""
    load = call.service.reload
    if load is None:
        raise ApiError(
            403, "this server loads no other weights: it was started without --reload-dir"
        )
    unknown = sorted(call.body.keys() - {"path"})
    path = call.body.get("path")
    if unknown or not isinstance(path, str | None):
        raise bad('the body is {} or {"path": TEXT}', unknown[0] if unknown else "path")
    try:
        return json_response(await load(path))
    except ModelError as error:
        raise bad(error.message, "path") from None


async def detokenize(call: Call) -> Response | None:
    """`tokens` to their text."""
    tokens, words = call.body.get("tokens"), call.service.words
    if not isinstance(tokens, list) or not all(map(is_id, tokens)):
        raise bad("tokens must be a list of token ids", "tokens")
    wrong = next((token for token in tokens if not 0 <= token < words.vocab_size), None)
    if wrong is not None:
        raise bad(f"tokens holds {wrong}; the tokenizer has {words.vocab_size}", "tokens")
    if len(tokens) <= 2000:
        return json_response({"prompt": words.decode_all(tokens)})
    seconds = call.service.settings.body_seconds
    text = await call.service.workers.run(seconds, "detokenizing", words.decode_all, tokens)
    return json_response({"prompt": text})


def policy(text: str) -> str:
    """The policy of a page: it may run its own script and ask its own server, and no more."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (hashlib.sha256(one.encode()).digest() for one in found)
        return " ".join(f"'sha256-{b64encode(one).decode()}'" for one in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
