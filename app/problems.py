"""Every error as RFC 9457 `application/problem+json`, in one shape, mapped in this one place."""

from __future__ import annotations

import logging
import re
import traceback
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import kvtide
from kvtide.app.models import Flaw, Problem

MEDIA_TYPE = "application/problem+json"
MAX_FLAWS = 32

_log = logging.getLogger("kvtide.service")

# What happened to the caller, as a status. The closest base class decides.
STATUSES: dict[type[kvtide.KVTideError], HTTPStatus] = {
    kvtide.KVTideError: HTTPStatus.INTERNAL_SERVER_ERROR,
    kvtide.InvalidRequest: HTTPStatus.UNPROCESSABLE_ENTITY,
    kvtide.GeometryMismatch: HTTPStatus.CONFLICT,
    kvtide.UnknownNamespace: HTTPStatus.NOT_FOUND,
    kvtide.NoRoom: HTTPStatus.INSUFFICIENT_STORAGE,
    kvtide.DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    kvtide.QueueFull: HTTPStatus.SERVICE_UNAVAILABLE,
    kvtide.DeviceUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    kvtide.CacheClosed: HTTPStatus.SERVICE_UNAVAILABLE,
    kvtide.Detached: HTTPStatus.CONFLICT,
}


def respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The response that carries a problem."""
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=problem.status,
        headers=dict(headers or {}),
        media_type=MEDIA_TYPE,
    )


def plain(status: int, detail: str = "") -> Problem:
    """A problem that says no more than its HTTP status, and a sentence."""
    phrase = HTTPStatus(status).phrase
    return Problem(type="about:blank", title=phrase, status=status, detail=detail or phrase)


def of_error(error: kvtide.KVTideError) -> Problem:
    """One of our own errors, under its own name."""
    status = next(STATUSES[base] for base in type(error).__mro__ if base in STATUSES)
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).capitalize()
    slug = words.lower().replace(" ", "-")
    return Problem(type=f"urn:kvtide:problem:{slug}", title=words, status=status, detail=str(error))


def of_validation(error: RequestValidationError) -> Problem:
    """A request that does not fit its model. What was sent is not repeated: it may be a secret."""
    found = error.errors()
    flaws = [
        Flaw(
            location=".".join(str(part) for part in flaw["loc"]),
            message=flaw["msg"].removeprefix("Value error, "),
            kind=flaw["type"],
        )
        for flaw in found[:MAX_FLAWS]
    ]
    first = flaws[0]
    return Problem(
        type="urn:kvtide:problem:invalid-request",
        title="Invalid request",
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        detail=f"{first.location}: {first.message}" + (f" (and {len(found) - 1} more)" if found[1:] else ""),
        errors=flaws,
    )


def install(app: FastAPI) -> None:
    """Let `app` answer with problems, whatever goes wrong in it."""

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        phrase = HTTPStatus(error.status_code).phrase
        return respond(plain(error.status_code, error.detail or phrase), error.headers)

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(of_validation(error))

    async def on_own(_: Request, error: Exception) -> Response:
        assert isinstance(error, kvtide.KVTideError)
        problem = of_error(error)
        return respond(problem, {"retry-after": "1"} if problem.status == 503 else None)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(kvtide.KVTideError, on_own)


class InternalErrors:
    """The edge where an exception that nobody expected becomes a 500.

    Its message stays out of the answer and of the log, because it may quote tokens; the log has its
    type and its frames, under the number that the caller is given.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - the edge: it is logged, and the caller is told
            number = uuid.uuid4().urn
            _log.error(
                "%s %r: %s (%s)\n%s",
                scope["method"],
                scope["path"],
                type(error).__qualname__,
                number,
                "".join(traceback.format_tb(error.__traceback__)),
            )
            if begun:
                # Half an answer cannot be mended; ending without its rest makes the server close.
                return
            problem = plain(500, "The service failed; its log tells more under this instance.")
            await respond(problem.model_copy(update={"instance": number}))(scope, receive, send)


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Statuses of a route for the OpenAPI document, each a problem."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in sorted(statuses)
    }
