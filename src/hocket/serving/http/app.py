"""The routes of a server as one ASGI application, behind its gate."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hocket.serving.http.call import Endpoint
from hocket.serving.http.chat import chat
from hocket.serving.http.completions import completions
from hocket.serving.http.errors import ApiError, error_response, http_error
from hocket.serving.http.gate import Gate
from hocket.serving.http.metrics import CONTENT_TYPE
from hocket.serving.http.openapi import BODIES, READ
from hocket.serving.http.plain import Plain, detokenize, reload, tokenize
from hocket.serving.http.responses import responses
from hocket.serving.http.service import HttpService

POST = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/models/reload": reload,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/tokenize": tokenize,
    "/v1/detokenize": detokenize,
}
"""Routes with a JSON body."""


def build_app(service: HttpService) -> ASGIApp:
    """What answers requests."""
    plain = Plain(service)
    routes = [
        Route(path, Endpoint(service, handler), methods=["POST"]) for path, handler in POST.items()
    ]
    routes += [
        Route("/", plain.chat_page),
        Route("/v1/models", plain.models),
        Route("/v1/models/{name:path}", plain.model),
        Route("/health", plain.health),
        Route("/ready", plain.ready),
        Route("/version", plain.version),
        Route("/openapi.json", plain.openapi),
        Route("/docs", plain.docs_page),
    ]
    app = _starlette(routes)
    app.state.answers = True
    return Gate(app, service.settings, service.metrics)


def build_metrics_app(service: HttpService) -> ASGIApp:
    """What answers on the metrics' port."""

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return Gate(_starlette([Route("/metrics", metrics)]), service.settings.for_metrics())


def _starlette(routes: list[Route]) -> Starlette:
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(_named(request, http_error(error)))

    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, ApiError: failed})
    app.router.redirect_slashes = False
    app.state.answers = False
    return app


def _named(request: Request, error: ApiError) -> ApiError:
    """The framework's own errors, in words that help."""
    path = request.url.path[:200]
    if error.status == 404 and error.message == "Not Found":
        routes = ", ".join((*BODIES, *READ)) if request.app.state.answers else "/metrics"
        error.message = f"there is no {path}; this server has {routes}"
        if path == "/metrics":
            error.message += "; metrics are on --metrics-port (default: the next port)"
    elif error.status == 405:
        error.message = f"{path} does not accept {request.method[:20]}"
    return error
