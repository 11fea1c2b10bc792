"""Real sockets: who may listen where, and how a guest in the loop begins and ends."""

import asyncio
import socket

import httpx
import pytest

from kvtide.app.listener import CannotListen, CannotStart, Listener, listen, listening, url_of


async def app(scope: object, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body"})  # type: ignore[operator]


def test_any_free_port_of_the_loopback_interface() -> None:
    with listen("127.0.0.1", 0) as one, listen("localhost", 0) as other:
        assert url_of(one) != url_of(other)
        assert url_of(one).startswith("http://127.0.0.1:")


@pytest.mark.skipif(not socket.has_ipv6, reason="Python was built without IPv6")
def test_ipv6_urls_have_brackets() -> None:
    try:
        sock = listen("::1", 0)
    except CannotListen as error:
        pytest.skip(str(error))
    with sock:
        assert url_of(sock).startswith("http://[::1]:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_is_refused(host: str) -> None:
    with pytest.raises(CannotListen, match="--allow-remote"):
        listen(host, 0)


def test_unless_it_is_allowed() -> None:
    with listen("0.0.0.0", 0, remote=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def test_a_port_in_use_is_a_clear_error() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port}: Address already in use.*--port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["", "no such host", "a" * 70, "no-such-host.invalid"])
def test_a_host_without_address_is_a_clear_error(host: str) -> None:
    with pytest.raises(CannotListen, match="has no address here"):
        listen(host, 0)


async def test_it_answers_inside_the_block_and_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    sock = listen("127.0.0.1", 0)
    async with listening(app, sock) as url, httpx.AsyncClient() as client:
        assert (await client.get(url)).status_code == 204
        # This connection stays open while the listener ends.
    assert sock.fileno() == -1
    assert asyncio.all_tasks() == before
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


async def test_an_error_in_the_block_ends_it_too() -> None:
    before = asyncio.all_tasks()
    sock = listen("127.0.0.1", 0)
    with pytest.raises(ZeroDivisionError):
        async with listening(app, sock):
            raise ZeroDivisionError
    assert sock.fileno() == -1
    assert asyncio.all_tasks() == before


async def test_an_application_that_does_not_start_is_an_exception() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise ZeroDivisionError

    with listen("127.0.0.1", 0) as sock:
        server = Listener(broken, lifespan=True)
        with pytest.raises(CannotStart):
            await server.serve(sockets=[sock])
    assert server.up.is_set()


async def test_a_socket_that_cannot_be_served_is_an_error_of_the_block() -> None:
    sock = listen("127.0.0.1", 0)
    sock.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        async with listening(app, sock):
            raise AssertionError("nothing is being served")
