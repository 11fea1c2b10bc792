"""What every test runs under: a debugging event loop, Triton's interpreter without a GPU, no blocked loop."""

import json
import logging
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# `python -m pytest` puts the repository root first on the path, where our kernels/ would hide the package
# of that name that transformers imports.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]

# For the loops that tests and their child processes make themselves; pytest-asyncio's own get asyncio_debug.
os.environ["PYTHONASYNCIODEBUG"] = "1"

import torch  # noqa: E402

HAVE_CUDA = torch.cuda.is_available()
if not HAVE_CUDA:
    # Triton decides when a kernel is decorated, so this stands before any test imports one.
    os.environ["TRITON_INTERPRET"] = "1"

# Far above what a loaded two-core machine does by itself, far below what a user would put up with.
BLOCKED_S = 0.5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with its reason, what needs a GPU that is not there."""
    if HAVE_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class _BlockedLoop(logging.Handler):
    """Keeps asyncio's own reports of callbacks that held the loop."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reports: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # asyncio logs "Executing %s took %.3f seconds" in debug mode.
        if str(record.msg).startswith("Executing") and isinstance(record.args, tuple):
            seconds = record.args[-1]
            if isinstance(seconds, float) and seconds >= BLOCKED_S:
                self.reports.append(record.getMessage())


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("blocks_loop"):
        yield
        return
    handler = _BlockedLoop()
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if handler.reports:
        pytest.fail("the event loop was blocked: " + "; ".join(handler.reports), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List measurements that are older than the code which they measured."""
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    now = runpy.run_path(str(ROOT / "benchmarks" / "record.py"))["code_hash"]() if results else ""
    for path in results:
        if json.loads(path.read_text())["code"] != now:
            terminalreporter.write_line(f"older than the code it measured: {path.relative_to(ROOT)}")
