"""What stands before every route: who is asked for, what is sent, how much of it, how many at once."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtide.app.problems import plain, respond

MAX_BODY = 8 << 20
"""Bytes of a request body."""

BODY_SECONDS = 30.0
"""How long a client may take to send its body."""

MAX_REQUESTS = 32
"""Requests at once. Each may hold a whole body in memory; the probes do not count."""

PROBES = frozenset({"/livez", "/readyz"})


class Hosts:
    """Which Host headers are known.

    A browser that was lured to a foreign name which resolves to this machine (DNS rebinding) sends
    that name. An address cannot be rebound, so a server that others may reach knows all addresses,
    and one that they may not reach knows those of the loopback interface.

    names: host names beside localhost. remote: others may reach this server.
    """

    def __init__(self, names: Collection[str] = (), *, remote: bool = False) -> None:
        self.names = frozenset({"localhost", *(_bare(name) for name in names)})
        self.remote = remote

    def known(self, header: str) -> bool:
        """Whether this server answers to the Host header's value, its port aside."""
        name = _bare(_without_port(header))
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.remote or address.is_loopback


def _bare(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _without_port(header: str) -> str:
    if header.startswith("["):
        address, closing, _ = header[1:].partition("]")
        return address if closing else ""
    return header.partition(":")[0]


class Gate:
    """Answers with a problem what no route should see, and hands on whole bodies only."""

    def __init__(self, app: ASGIApp, hosts: Hosts, max_requests: int = MAX_REQUESTS) -> None:
        self.app = app
        self.hosts = hosts
        self.max_requests = max_requests
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.hosts.known(hosts[0]):
            detail = "This service does not answer to that Host."
            await respond(plain(421, detail))(scope, receive, send)
            return
        if scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        if self.inside >= self.max_requests:
            detail = f"{self.max_requests} requests are under way."
            await respond(plain(503, detail), {"retry-after": "1"})(scope, receive, send)
            return
        self.inside += 1
        try:
            await self._admitted(scope, headers, receive, send)
        finally:
            self.inside -= 1

    async def _admitted(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if not _has_body(headers):
            await self.app(scope, receive, send)
            return
        if not _is_json(headers):
            detail = "Send JSON as application/json, in UTF-8 and without a content encoding."
            await respond(plain(415, detail))(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read(headers, receive)
        except TimeoutError:
            detail = f"The body did not arrive within {BODY_SECONDS:g} s."
            await respond(plain(408, detail), {"connection": "close"})(scope, receive, send)
            return
        except _Disconnected:
            return
        if body is None:
            await respond(plain(413, f"A body has at most {MAX_BODY} bytes."))(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)


class _Disconnected(Exception):
    """The client went away before its body was whole."""


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _is_json(headers: Headers) -> bool:
    kind, *parameters = (part.strip().lower() for part in headers.get("content-type", "").split(";"))
    return (
        kind == "application/json"
        and all(parameter in ("", "charset=utf-8", 'charset="utf-8"') for parameter in parameters)
        and headers.get("content-encoding", "identity") == "identity"
    )


async def _read(headers: Headers, receive: Receive) -> bytes | None:
    """The whole body, or None once it is known to be too long."""
    if int(headers.get("content-length", "0")) > MAX_BODY:
        return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body", False):
            return bytes(body)
