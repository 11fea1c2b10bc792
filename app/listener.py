"""A listening socket, and uvicorn on it as a guest: it takes no signals, ends on demand, polls nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

import kvtide

DRAIN_SECONDS = 3
"""How long requests under way may take to end once the service is asked to stop."""

BACKLOG = 128

_log = logging.getLogger("kvtide.service")


class CannotListen(kvtide.KVTideError):
    """The address cannot be listened on; the message says why and what to do."""


def listen(host: str, port: int, *, remote: bool = False) -> socket.socket:
    """A socket that listens on host and port (0: any free one).

    Raises `CannotListen`, also for an address that other machines can reach, unless `remote` allows it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"host {host!r} has no address here: {error}") from error
    family, _, _, _, address = found[0]
    if not remote and not ipaddress.ip_address(address[0]).is_loopback:
        raise CannotListen(
            f"{host} can be reached from other machines, and whoever reaches the service may use it: "
            "listen on 127.0.0.1, or say --allow-remote if the network keeps others out"
        )
    try:
        # Listening at once, not at the first accept: otherwise two servers may both believe to have the port.
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Is another kvtide running? "
            "Choose another with --port"
        ) from error


def url_of(sock: socket.socket) -> str:
    """Where clients find a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class CannotStart(kvtide.KVTideError):
    """The application behind the socket did not start; its log says why."""


class Listener(uvicorn.Server):
    """uvicorn inside somebody else's loop.

    lifespan: whether starting and ending run the application's lifespan.
    """

    def __init__(self, app: ASGIApp, *, lifespan: bool) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on" if lifespan else "off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
        )
        self.up = asyncio.Event()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Take no more connections, let the requests under way end, and end. Say it as often as you like."""
        self.should_exit = True
        self._stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the host's: uvicorn would raise them anew at its end, in place of the exit status."""
        yield

    async def main_loop(self) -> None:
        """Waits to be stopped, where uvicorn's looks ten times a second."""
        await self._stop.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with an exception in place of `sys.exit`. Raises `CannotStart`."""
        try:
            await super().startup(sockets=sockets)
        except SystemExit:
            raise CannotStart("the service did not start; see the log above") from None
        finally:
            self.up.set()
        _log.info("serving on %s", " ".join(url_of(sock) for sock in sockets or ()))


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, sock: socket.socket) -> AsyncIterator[str]:
    """Serve `app` on `sock` from the running loop while the block runs; gives the URL.

    The application's lifespan is not run, and requests still under way at the end get `DRAIN_SECONDS`.
    """
    server = Listener(app, lifespan=False)
    with sock:
        url = url_of(sock)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="kvtide-service")
        try:
            await server.up.wait()
            if not server.started:
                await serving
            yield url
        finally:
            server.stop()
            await serving
