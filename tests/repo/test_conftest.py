"""What tests/conftest.py promises, tried on small test files in a pytest of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def outcome(tmp_path: Path, source: str) -> str:
    """Run `source` as a test file under the project's settings and return what pytest prints."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_a_blocked_loop_fails_the_test(tmp_path: Path) -> None:
    source = "import time\nasync def test_blocks():\n    time.sleep(0.6)\n"
    assert "the event loop was blocked: Executing" in outcome(tmp_path, source)


def test_a_loop_blocked_on_purpose_does_not(tmp_path: Path) -> None:
    source = (
        "import time, pytest\n"
        '@pytest.mark.blocks_loop("on purpose")\n'
        "async def test_blocks():\n    time.sleep(0.6)\n"
    )
    assert "1 passed" in outcome(tmp_path, source)


def test_warnings_are_errors_and_the_loop_debugs(tmp_path: Path) -> None:
    source = (
        "import asyncio, warnings\n"
        "async def test_debug():\n    assert asyncio.get_running_loop().get_debug()\n"
        "def test_warns():\n    warnings.warn('x')\n"
    )
    printed = outcome(tmp_path, source)
    assert "1 failed, 1 passed" in printed
    assert "UserWarning: x" in printed


def test_gpu_tests_are_skipped_with_a_reason(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    source = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    raise AssertionError\n"
    assert "needs a CUDA device" in outcome(tmp_path, source)
