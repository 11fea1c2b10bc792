"""The command line: what it loads, what it refuses, and a real `kvtide serve`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import kvtide
from kvtide.app import cli

SRC = Path(__file__).resolve().parents[2] / "src"
BOUND_S = 60.0
MAIN = "import sys; from kvtide.app.cli import main; sys.exit(main())"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error"}


def kvtide_command(*words: str, cwd: Path, script: str = MAIN) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


@contextmanager
def serving(cwd: Path, *words: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`kvtide serve` on a free port: the process and its URL."""
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "serve", "--port", "0", "--host-memory", "64MiB", *words],
        cwd=cwd,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                found = re.search(r"serving on (http://\S+)", line)
                if found:
                    yield process, found[1]
                    break
            else:
                raise AssertionError("it did not start")
        finally:
            process.kill()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvtide {kvtide.__version__}\n"


def test_help_names_the_commands_and_loads_none(tmp_path: Path) -> None:
    script = (
        "import sys, json\nfrom kvtide.app.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = kvtide_command(cwd=tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert name in done.stdout
    loaded = {name.partition(".")[0] for name in json.loads(done.stderr)}
    assert not loaded & {"torch", "fastapi", "uvicorn", "pydantic", "transformers", "rich", "numpy"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "COMMAND"),
        (["cook"], "invalid choice: 'cook'"),
        (["serve", "--port", "70000"], "'70000' is not a port; 0 to 65535"),
        (["serve", "--port", "-1"], "--port"),
        (["serve", "--port", "http"], "'http' is not a port"),
        (["serve", "--host-memory", "4GB"], "'4GB' is not a size"),
        (["serve", "--policy", "fifo"], "invalid choice: 'fifo'"),
        (["serve", "--tune"], "unrecognized arguments: --tune"),
        (["bench"], "the following arguments are required"),
    ],
)
def test_wrong_words_are_refused_clearly(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "says"), [("1KiB", "less than one extent"), ("900TiB", "more than this machine's")]
)
def test_a_host_memory_that_cannot_be_is_refused_clearly(
    memory: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--host-memory", memory]) == 2
    assert says in capsys.readouterr().err


def test_the_openapi_document_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--openapi"]) == 0
    assert json.loads(capsys.readouterr().out)["info"]["title"] == "kvtide"


def test_own_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: object) -> int:
        raise kvtide.NoRoom("full", leased=1)

    monkeypatch.setattr("kvtide.app.serve.run", fails)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err.startswith("kvtide serve: NoRoom: full")


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtide.app.serve.run", interrupted)
    assert cli.main(["serve"]) == 130


def test_a_port_in_use_is_a_clear_error_and_exit_status_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = kvtide_command("serve", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_that_others_reach_needs_a_word(tmp_path: Path) -> None:
    done = kvtide_command("serve", "--host", "0.0.0.0", "--port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert "--allow-remote" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_without_torch_and_ends_when_asked(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as (process, url), httpx.Client(base_url=url) as client:
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/stats").status_code == 200
        answer = client.post("/v1/match", json={"namespace": "never seen", "tokens": [1, 2, 3]})
        assert answer.status_code == 404
        assert answer.json()["type"] == "urn:kvtide:problem:unknown-namespace"
        if sys.platform == "linux":
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(BOUND_S) == 0
        assert time.monotonic() - began < 8
