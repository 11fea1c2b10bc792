"""What is refused before any route sees it."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from kvtide.app import gate
from kvtide.app.gate import Gate, Hosts
from kvtide.app.service import control


def problem(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, object] = response.json()
    assert body["status"] == response.status_code
    assert {"type", "title", "detail"} <= body.keys()
    return body


@pytest.mark.parametrize(
    "header",
    [
        "localhost",
        "LOCALHOST:8790",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.3.2.1",
        "[::1]:8790",
        "[::1]",
    ],
)
def test_loopback_names_are_known(header: str) -> None:
    assert Hosts().known(header)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "10.0.0.5",
        "0.0.0.0",
        "[::1",
        "::1",
        "[evil]:1",
    ],
)
def test_other_names_are_not(header: str) -> None:
    assert not Hosts().known(header)


def test_a_remote_service_knows_addresses_and_the_names_it_was_given() -> None:
    hosts = Hosts(["KV.internal"], remote=True)
    assert hosts.known("10.0.0.5:8790")
    assert hosts.known("[2001:db8::1]:8790")
    assert hosts.known("kv.internal:8790")
    assert not hosts.known("evil.example")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/stats", "/nowhere", "/openapi.json"])
async def test_an_unknown_host_is_a_problem_everywhere(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path, headers={"host": "evil.example"})
    assert answer.status_code == 421
    assert "Host" in str(problem(answer)["detail"])


async def test_two_host_headers_are_refused(client: httpx.AsyncClient) -> None:
    answer = await client.get("/livez", headers=[("host", "localhost"), ("host", "localhost")])
    assert answer.status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/jsonp"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_a_body_that_is_not_json_is_415(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await client.post("/v1/match", content=b"{}", headers=headers)
    assert answer.status_code == 415
    problem(answer)


async def test_json_with_a_charset_is_read(client: httpx.AsyncClient) -> None:
    body = json.dumps({"namespace": "m", "tokens": [1]})
    answer = await client.post(
        "/v1/match", content=body, headers={"content-type": "Application/JSON; charset=UTF-8"}
    )
    assert answer.status_code == 200


async def test_a_body_over_8_mib_is_413_by_its_length(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/match", content=bytes(gate.MAX_BODY + 1), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert str(gate.MAX_BODY) in str(problem(answer)["detail"])


async def test_a_body_over_8_mib_is_413_in_chunks_and_not_read_on(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            assert sent <= 9, "the service goes on reading"
            yield bytes(1 << 20)

    answer = await client.post("/v1/match", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    problem(answer)


async def test_a_body_that_does_not_come_is_408(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = await client.post("/v1/match", content=stalled(), headers={"content-type": "application/json"})
    assert answer.status_code == 408
    problem(answer)


async def test_too_many_requests_at_once_are_503_and_the_probes_still_answer() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope: object, receive: object, send: object) -> None:
        entered.set()
        await leave.wait()

    one = Gate(slow, Hosts(), max_requests=1)  # type: ignore[arg-type]
    app = control(None)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(one)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        first = asyncio.create_task(one(_scope("/v1/stats"), _nothing, _ignore))
        await entered.wait()
        answer = await client.get("/v1/stats")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        problem(answer)
        one.app = app
        assert (await client.get("/livez")).status_code == 200
        leave.set()
        await first
    assert one.inside == 0


async def test_a_client_that_goes_away_while_it_sends_leaves_nothing_behind() -> None:
    async def never(scope: object, receive: object, send: object) -> None:
        raise AssertionError("an incomplete body was handed on")

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    one = Gate(never, Hosts())  # type: ignore[arg-type]
    scope = _scope("/v1/match")
    scope["headers"] = [
        (b"host", b"localhost"),
        (b"content-length", b"5"),
        (b"content-type", b"application/json"),
    ]
    await one(scope, gone, _ignore)
    assert one.inside == 0


def _scope(path: str) -> dict[str, object]:
    return {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"localhost")]}


async def _nothing() -> dict[str, str]:
    raise AssertionError("nobody should read")


async def _ignore(message: object) -> None:
    del message
