"""The service: its answers, its birth and its end."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import kvtide
from kvtide.app import gate, listener, routes, service
from kvtide.app.service import ServiceSettings, openapi_text, serve, serve_beside

BOUND_S = 10.0
LOOPBACK = ServiceSettings(port=0, cache=kvtide.Settings(host_bytes=64 << 20))


# -- answers --------------------------------------------------------------------------------


async def test_livez_answers_while_the_loop_turns(client: httpx.AsyncClient, fake: Any) -> None:
    fake.components = (kvtide.Component("host", "failed", 1.0, "gone"),)
    answer = await client.get("/livez")
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


async def test_readyz_names_every_component(client: httpx.AsyncClient, fake: Any) -> None:
    fake.components = (
        kvtide.Component("host", "ok", 1.0, None),
        kvtide.Component("disk", "degraded", 2.0, "slow"),
    )
    answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "degraded",
        "components": [
            {"name": "host", "state": "ok", "since": 1.0, "cause": None},
            {"name": "disk", "state": "degraded", "since": 2.0, "cause": "slow"},
        ],
    }


async def test_s0_2_readyz_is_503_with_the_cause_when_a_component_has_failed(
    client: httpx.AsyncClient, fake: Any
) -> None:
    fake.components = (
        kvtide.Component("host", "failed", 3.0, "cudaHostRegister: out of memory"),
        kvtide.Component("copies", "ok", 1.0, None),
    )
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert "host: cudaHostRegister: out of memory" in body["detail"]
    assert [(part["name"], part["state"]) for part in body["components"]] == [
        ("host", "failed"),
        ("copies", "ok"),
    ]
    fake.components = (kvtide.Component("host", "ok", 4.0, None),)
    assert (await client.get("/readyz")).json()["status"] == "ready"


async def test_stats_are_what_the_cache_counts(client: httpx.AsyncClient, fake: Any) -> None:
    answer = await client.get("/v1/stats")
    assert answer.status_code == 200
    assert answer.json() == {**dataclasses.asdict(fake.statistics()), "tiers": []}


async def test_match_hands_on_what_was_asked(client: httpx.AsyncClient, fake: Any) -> None:
    answer = await client.post(
        "/v1/match", json={"namespace": "m", "tokens": [1, 2], "salt": "s", "extra": "0aFF"}
    )
    assert (answer.status_code, answer.json()) == (200, {"tokens": 32, "by_tier": {"host": 32}})
    await client.post("/v1/match", json={"namespace": "m", "hashes": ["00" * 8, "Ab" * 64]})
    assert fake.asked == [
        {"tokens": [1, 2], "hashes": None, "namespace": "m", "salt": "s", "extra": b"\x0a\xff"},
        {"tokens": None, "hashes": [bytes(8), b"\xab" * 64], "namespace": "m", "salt": None, "extra": b""},
    ]


async def test_long_prompts_are_hashed_beside_the_loop(client: httpx.AsyncClient, fake: Any) -> None:
    here = threading.get_ident()
    await client.post("/v1/match", json={"namespace": "m", "tokens": [7] * routes.TOKENS_ON_LOOP})
    assert fake.threads == {here}
    await client.post("/v1/match", json={"namespace": "m", "tokens": [7] * (routes.TOKENS_ON_LOOP + 1)})
    assert len(fake.threads) == 2


def test_the_openapi_document_is_up_to_date() -> None:
    kept = Path(service.__file__).with_name("openapi.json").read_text()
    assert kept == openapi_text(), "run: kvtide serve --openapi > app/openapi.json"


def test_every_call_declares_its_statuses_as_problems() -> None:
    document = json.loads(openapi_text())
    assert document["paths"].keys() == {"/livez", "/readyz", "/v1/stats", "/v1/match"}
    for path in document["paths"].values():
        for call in path.values():
            assert {"200", "421", "500"} <= call["responses"].keys()
            for status, answer in call["responses"].items():
                kind = "application/json" if status == "200" else "application/problem+json"
                assert answer["content"].keys() == {kind}
    names = document["components"]["schemas"].keys()
    assert "HTTPValidationError" not in names
    for reference in _references(document):
        assert reference.removeprefix("#/components/schemas/") in names


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for item in node for found in _references(item)]
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for item in node.values() for found in _references(item)]
    return []


# -- birth and end --------------------------------------------------------------------------


class Running:
    """`serve` under way in this loop."""

    def __init__(self, settings: ServiceSettings = LOOPBACK) -> None:
        self.settings = settings
        self.url = ""

    async def __aenter__(self) -> "Running":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.task = asyncio.create_task(serve(dataclasses.replace(self.settings, port=port)))
        async with asyncio.timeout(BOUND_S), httpx.AsyncClient() as client:
            while True:
                try:
                    assert (await client.get(self.url + "/livez")).status_code == 200
                except httpx.ConnectError:
                    assert not self.task.done(), "serve ended"
                    await asyncio.sleep(0.01)
                else:
                    return self

    async def ended(self) -> int:
        async with asyncio.timeout(BOUND_S):
            return await self.task

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_gracefully(opened: Any, number: signal.Signals) -> None:
    before = asyncio.all_tasks()
    handler = signal.getsignal(number)
    async with Running() as running:
        os.kill(os.getpid(), number)
        assert await running.ended() == 0
    assert opened.closed == 1
    assert asyncio.all_tasks() == before
    assert signal.getsignal(number) == handler


async def test_a_second_signal_is_not_held_back(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closing, go_on = asyncio.Event(), asyncio.Event()

    async def slow(deadline: float) -> kvtide.Closed:
        closing.set()
        await go_on.wait()
        return kvtide.Closed(())

    monkeypatch.setattr(opened, "close", slow)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    async with Running() as running:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            await closing.wait()
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        go_on.set()
        assert await running.ended() == 0


async def test_r15_what_is_stuck_is_named_and_makes_it_exit_non_zero(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    opened.stuck = ("copy to cuda:0",)
    async with Running() as running:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.ended() == service.EXIT_STUCK
    assert "stuck: copy to cuda:0" in caplog.text


async def test_a_request_that_does_not_end_does_not_keep_it_from_ending(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "DRAIN_SECONDS", 1)
    async with Running() as running:
        reader, writer = await asyncio.open_connection(*running.url.removeprefix("http://").split(":"))
        writer.write(
            b"POST /v1/match HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 9\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.1)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.ended() == 0
        assert time.monotonic() - began < 4
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert opened.closed == 1


async def test_a_cache_that_cannot_be_opened_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(settings: kvtide.Settings) -> None:
        raise kvtide.DeviceUnavailable(f"no device for {settings.host_bytes} bytes")

    monkeypatch.setattr(kvtide, "open_cache", broken)
    assert await serve(LOOPBACK) == service.EXIT_FAILED
    assert "no device for 67108864 bytes" in caplog.text


async def test_a_cache_that_cannot_be_closed_makes_it_exit_non_zero(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(deadline: float) -> kvtide.Closed:
        raise kvtide.TransferFailed(f"not within {deadline} s")

    monkeypatch.setattr(opened, "close", broken)
    async with Running() as running:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.ended() == service.EXIT_STUCK
    assert "the cache was not closed" in caplog.text


async def test_a_port_in_use_ends_it_before_a_cache_is_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvtide, "open_cache", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = dataclasses.replace(LOOPBACK, port=taken.getsockname()[1])
        assert await serve(settings) == service.EXIT_FAILED
    assert "Address already in use" in caplog.text


async def test_a_remote_service_warns_and_answers_to_addresses(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dataclasses.replace(LOOPBACK, host="0.0.0.0", allow_remote=True, allow_hosts=("kv.internal",))
    async with Running(settings) as running, httpx.AsyncClient() as client:
        for host, status in (("10.1.2.3", 200), ("kv.internal:80", 200), ("evil.example", 421)):
            answer = await client.get(running.url + "/livez", headers={"host": host})
            assert answer.status_code == status
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.ended() == 0
    assert "other machines may reach this service" in caplog.text
    assert opened.closed == 1


# -- real bytes over a real socket ----------------------------------------------------------


async def test_bodies_over_a_socket_are_bounded(fake: Any) -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield bytes(1 << 20)

    headers = {"content-type": "application/json"}
    async with serve_beside(fake, port=0) as url, httpx.AsyncClient(base_url=url) as client:
        for content in (bytes(gate.MAX_BODY + 1), chunks()):
            answer = await client.post("/v1/match", content=content, headers=headers)
            assert answer.status_code == 413
            assert answer.headers["content-type"] == "application/problem+json"
        answer = await client.post("/v1/match", json={"namespace": "m", "tokens": [1]})
        assert answer.status_code == 200


async def test_serve_beside_leaves_the_cache_open(fake: Any) -> None:
    async with serve_beside(fake, port=0) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/stats")).status_code == 200
    assert fake.closed == 0


async def test_serve_beside_takes_no_signals(fake: Any) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serve_beside(fake, port=0):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


async def test_serve_beside_refuses_what_others_reach(fake: Any) -> None:
    with pytest.raises(listener.CannotListen, match="other machines"):
        async with serve_beside(fake, "0.0.0.0", 0):
            raise AssertionError("it serves")


async def test_r9_an_idle_service_uses_under_one_percent_of_a_core(fake: Any) -> None:
    async with serve_beside(fake, port=0):
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before < 0.01


# -- with a real cache ----------------------------------------------------------------------


@pytest.fixture
async def stored() -> AsyncIterator[tuple[kvtide.Cache, str]]:
    """A cache that holds four blocks under a salt and with an extra, and its service's URL."""
    settings = kvtide.Settings(host_bytes=1 << 20, extent_bytes=1 << 20)
    async with kvtide.open_cache(settings) as cache:
        pages = cache.attach(
            kvtide.PagedKV.from_tensors([torch.zeros(4, 16, 8)], block_dim=0), namespace="model"
        )
        await pages.store(range(64), range(4), after=None, salt="secret", extra=b"\x01")
        await pages.store(None, [0, 1], after=None, hashes=[bytes(8), bytes([1] * 8)])
        async with serve_beside(cache, port=0) as url:
            yield cache, url
        await pages.detach()


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({"tokens": list(range(65)), "salt": "secret", "extra": "01"}, 64),
        ({"tokens": list(range(64)), "salt": "secret", "extra": "01"}, 48),
        ({"tokens": [*range(32), 0, *range(33, 65)], "salt": "secret", "extra": "01"}, 32),
        ({"tokens": list(range(65)), "salt": "guess", "extra": "01"}, 0),
        ({"tokens": list(range(65)), "extra": "01"}, 0),
        ({"tokens": list(range(65)), "salt": "secret"}, 0),
        ({"tokens": list(range(15))}, 0),
        ({"hashes": ["00" * 8, "01" * 8, "02" * 8]}, 32),
    ],
)
async def test_match_says_what_is_held_and_pins_nothing(
    stored: tuple[kvtide.Cache, str], asked: dict[str, Any], tokens: int
) -> None:
    cache, url = stored
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/match", json={"namespace": "model", **asked})
    assert answer.status_code == 200
    assert answer.json() == {"tokens": tokens, "by_tier": {"host": tokens} if tokens else {}}
    assert cache.statistics().tiers[0].pinned_bytes == 0


async def test_a_real_cache_is_ready_counted_and_honest(stored: tuple[kvtide.Cache, str]) -> None:
    _, url = stored
    async with httpx.AsyncClient(base_url=url) as client:
        ready = (await client.get("/readyz")).json()
        assert ready["status"] == "ready"
        assert {"cache"} < {part["name"] for part in ready["components"]}
        counted = (await client.get("/v1/stats")).json()
        assert counted["tiers"][0]["blocks"] == 6
        for body, status, name in (
            ({"namespace": "never seen", "tokens": [1]}, 404, "unknown-namespace"),
            ({"namespace": "model", "tokens": []}, 422, "invalid-request"),
            ({"namespace": "model", "hashes": ["00" * 8] * 2}, 422, "invalid-request"),
        ):
            answer = await client.post("/v1/match", json=body)
            assert answer.status_code == status
            assert answer.json()["type"] == f"urn:kvtide:problem:{name}"


async def test_after_the_cache_is_closed_it_says_so(stored: tuple[kvtide.Cache, str]) -> None:
    cache, url = stored
    await cache.close()
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/livez")).status_code == 200
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert "cache: the cache is closed" in ready.json()["detail"]
        answer = await client.post("/v1/match", json={"namespace": "model", "tokens": [1]})
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:kvtide:problem:cache-closed"


async def test_serve_with_a_real_cache_leaves_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    async with Running() as running:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.ended() == 0
    await asyncio.get_running_loop().shutdown_default_executor()
    assert set(threading.enumerate()) <= before
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
