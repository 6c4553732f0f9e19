"""The web application: who may ask, how much, for how long, and what is said when something is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from yatt_jax.serve.batching import Busy
from yatt_jax.serve.config import LimitsConfig
from yatt_jax.serve.measures import Measures
from yatt_jax.serve.services import Service
from yatt_jax.serve.texts import RequestError

_log = logging.getLogger(__name__)


def make_app(service: Service, limits: LimitsConfig, measures: Measures, token: str) -> Starlette:
    """The application of a service.

    ``POST`` to the service's path; ``GET /health`` and ``GET /metrics``, which need no token.

    Args:
      service: what answers.
      limits: of requests.
      measures: what is told to Prometheus.
      token: that clients must show; empty: none.
    """

    async def ask(request: Request) -> Response:
        start = time.monotonic()
        try:
            response = await _answer(service, limits, token, request)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; it is counted
        measures.requests.labels(service.path, str(response.status_code)).inc()
        measures.request_seconds.labels(service.path).observe(time.monotonic() - start)
        return response

    async def health(request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok", "path": service.path})

    async def tell(request: Request) -> Response:
        del request
        return Response(measures.text(), media_type="text/plain; version=0.0.4")

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        measures.requests.labels("other", str(error.status_code)).inc()
        return _error(error.status_code, f"{request.method} {request.url.path}: ask by POST to {service.path}")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        service.start()
        yield
        await service.stop()

    routes = [
        Route(service.path, ask, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", tell, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: refuse, 405: refuse})


async def _answer(service: Service, limits: LimitsConfig, token: str, request: Request) -> Response:
    if token and not secrets.compare_digest(
        request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()
    ):
        return _error(401, "show the token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
    try:
        async with asyncio.timeout(limits.body_s):
            body = await _body(request, int(limits.body_mb * 1e6))
    except TimeoutError:
        return _error(408, f"the body of the request did not come within {limits.body_s:g} s", {"Connection": "close"})
    if body is None:
        return _error(413, f"a body of more than {limits.body_mb:g} MB", {"Connection": "close"})
    try:
        posted = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _error(400, f"the body is no JSON: {error}")
    if not isinstance(posted, dict):
        return _error(400, f"expected a JSON object, found {type(posted).__name__}")
    try:
        async with asyncio.timeout(limits.request_s):
            return JSONResponse(await service.answer(posted))
    except RequestError as error:
        return _error(400, str(error))
    except Busy:
        return _error(429, "too many texts are waiting", {"Retry-After": "1"})
    except TimeoutError:
        return _error(503, f"not answered within {limits.request_s:g} s", {"Retry-After": "1"})
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return _error(503, "the server stops")
    except Exception:
        _log.exception("a request failed")
        return _error(500, "the model failed; see the server's log")


async def _body(request: Request, limit: int) -> bytes | None:
    """The body, or None if it is too long."""
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > limit:
        return None
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)
