"""One shape for everything that goes wrong."""

import json
import logging
from typing import Any

import httpx
import pytest

import kvtide
from kvtide.app import problems
from kvtide.app.models import Problem

SALT = "hunter2-hunter2"
TOKEN = 1234567891
JSON = {"content-type": "application/json"}


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    Problem.model_validate_json(response.content)
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    return body


async def test_a_path_that_is_not_there_is_404(client: httpx.AsyncClient) -> None:
    for path in ("/", "/v1", "/livez/", "/docs"):
        body = problem(await client.get(path), 404)
        assert body["type"] == "about:blank"
        assert body["title"] == "Not Found"


async def test_a_wrong_method_is_405_and_says_which_is_right(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/match")
    problem(answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("body", "location", "kind"),
    [
        ({"namespace": "m"}, "body", "value_error"),
        ({"namespace": "m", "tokens": [1], "hashes": ["00" * 32]}, "body", "value_error"),
        ({"namespace": "m", "hashes": ["00" * 32], "extra": "00"}, "body", "value_error"),
        ({"tokens": [1]}, "body.namespace", "missing"),
        ({"namespace": "", "tokens": [1]}, "body.namespace", "string_too_short"),
        ({"namespace": 3, "tokens": [1]}, "body.namespace", "string_type"),
        ({"namespace": "m", "tokens": [1], "sesame": 1}, "body.sesame", "extra_forbidden"),
        ({"namespace": "m", "tokens": [1, "2"]}, "body.tokens.1", "int_type"),
        ({"namespace": "m", "tokens": [True]}, "body.tokens.0", "int_type"),
        ({"namespace": "m", "tokens": [1.0]}, "body.tokens.0", "int_type"),
        ({"namespace": "m", "tokens": [-1]}, "body.tokens.0", "greater_than_equal"),
        ({"namespace": "m", "tokens": [1 << 32]}, "body.tokens.0", "less_than"),
        ({"namespace": "m", "tokens": "12"}, "body.tokens", "list_type"),
        ({"namespace": "m", "hashes": ["0"]}, "body.hashes.0", "string_pattern_mismatch"),
        ({"namespace": "m", "hashes": ["zz" * 32]}, "body.hashes.0", "string_pattern_mismatch"),
        ({"namespace": "m", "hashes": ["00" * 65]}, "body.hashes.0", "string_pattern_mismatch"),
        ({"namespace": "m", "tokens": [1], "extra": "abc"}, "body.extra", "string_pattern_mismatch"),
        ({"namespace": "m", "tokens": [1], "salt": 7}, "body.salt", "string_type"),
        ([], "body", "model_attributes_type"),
        (None, "body", "missing"),
    ],
)
async def test_what_does_not_fit_the_model_is_422(
    client: httpx.AsyncClient, body: object, location: str, kind: str
) -> None:
    answer = problem(await client.post("/v1/match", json=body), 422)
    assert answer["type"] == "urn:kvtide:problem:invalid-request"
    (flaw,) = answer["errors"]
    assert (flaw["location"], flaw["kind"]) == (location, kind)
    assert location in answer["detail"]


async def test_a_million_bad_tokens_get_a_short_answer(client: httpx.AsyncClient) -> None:
    body = json.dumps({"namespace": "m", "tokens": [-1] * 100_000})
    answer = await client.post("/v1/match", content=body, headers=JSON)
    problem(answer, 422)
    assert len(answer.content) < 1000


async def test_many_unknown_fields_get_a_bounded_answer(client: httpx.AsyncClient) -> None:
    body = {"namespace": "m", "tokens": [1], **{f"field{n}": n for n in range(1000)}}
    answer = problem(await client.post("/v1/match", json=body), 422)
    assert len(answer["errors"]) == problems.MAX_FLAWS
    assert "and 999 more" in answer["detail"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 422),
        (b"", 422),
        (b'{"namespace": "m", "tokens": [1]} trailing', 422),
        (b'{"\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"namespace": "m", "tokens": [' + b"9" * 5000 + b"]}", 400),
    ],
)
async def test_what_is_no_json_is_refused(client: httpx.AsyncClient, content: bytes, status: int) -> None:
    problem(await client.post("/v1/match", content=content, headers=JSON), status)


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (kvtide.KVTideError("x"), 500, "kvtide-error"),
        (kvtide.InvalidRequest("x"), 422, "invalid-request"),
        (kvtide.GeometryMismatch("x"), 409, "geometry-mismatch"),
        (kvtide.UnsupportedLayer("x"), 422, "unsupported-layer"),
        (kvtide.UnknownNamespace("x"), 404, "unknown-namespace"),
        (kvtide.NoRoom("x", leased=1, dirty=2), 507, "no-room"),
        (kvtide.DeadlineExceeded("x"), 504, "deadline-exceeded"),
        (kvtide.TransferFailed("x"), 500, "transfer-failed"),
        (kvtide.DeviceUnavailable("x"), 503, "device-unavailable"),
        (kvtide.CacheClosed("x"), 503, "cache-closed"),
        (kvtide.Detached("x"), 409, "detached"),
        (kvtide.QueueFull("x"), 503, "queue-full"),
        (kvtide.WouldBlockLoop("x"), 500, "would-block-loop"),
    ],
)
async def test_own_errors_keep_their_names(
    client: httpx.AsyncClient, fake: Any, error: kvtide.KVTideError, status: int, name: str
) -> None:
    fake.answer = error
    answer = await client.post("/v1/match", json={"namespace": "m", "tokens": [1]})
    body = problem(answer, status)
    assert body["type"] == f"urn:kvtide:problem:{name}"
    assert "x" in body["detail"]
    assert ("retry-after" in answer.headers) == (status == 503)


async def test_an_unexpected_error_is_a_500_that_the_log_explains(
    client: httpx.AsyncClient, fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake.answer = ZeroDivisionError(f"{SALT} {TOKEN}")
    with caplog.at_level(logging.DEBUG):
        answer = await client.post("/v1/match", json={"namespace": "m", "tokens": [TOKEN], "salt": SALT})
    body = problem(answer, 500)
    assert body["instance"].startswith("urn:uuid:")
    (record,) = [record for record in caplog.records if record.name == "kvtide.service"]
    assert body["instance"] in record.getMessage()
    assert "ZeroDivisionError" in record.getMessage()
    assert "in held" in record.getMessage()


@pytest.mark.parametrize(
    "error", [None, ZeroDivisionError(f"{SALT} {TOKEN}"), kvtide.QueueFull("busy"), "invalid"]
)
async def test_neither_log_nor_answer_carries_tokens_or_salts(
    client: httpx.AsyncClient, fake: Any, caplog: pytest.LogCaptureFixture, error: Exception | str | None
) -> None:
    body: dict[str, Any] = {"namespace": "m", "tokens": [TOKEN], "salt": SALT}
    if error == "invalid":
        body["tokens"].append(-TOKEN)
        body["salt"] = SALT * 100
    elif error is not None:
        fake.answer = error
    with caplog.at_level(logging.DEBUG):
        answer = await client.post("/v1/match", json=body)
    for text in (caplog.text, answer.text):
        assert SALT not in text
        assert str(TOKEN) not in text


async def test_an_error_after_the_answer_began_is_logged_and_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[str] = []

    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "http", "method": "GET", "path": "/x\ny"}
    await problems.InternalErrors(half)(scope, None, send)  # type: ignore[arg-type]
    assert sent == ["http.response.start"]
    assert "ZeroDivisionError" in caplog.text
    assert "x\ny" not in caplog.text


def test_every_own_error_has_a_status() -> None:
    def family(error: type[kvtide.KVTideError]) -> list[type[kvtide.KVTideError]]:
        return [error, *(each for child in error.__subclasses__() for each in family(child))]

    for error in family(kvtide.KVTideError):
        made = error("because")
        assert 400 <= problems.of_error(made).status < 600
