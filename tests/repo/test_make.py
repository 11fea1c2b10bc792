"""The commands that the README and CI start from."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*args: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make and return what it printed."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    # Under `make test` this would be a sub-make, with the flags of the outer one.
    outer = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS"}}
    return subprocess.run(
        ["make", *args],
        cwd=cwd,
        env={**outer, **(env or {})},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", ".venv/bin/kvtide demo"),
        ("test", ".venv/bin/pytest"),
        ("lint", ".venv/bin/mypy"),
        ("bench", ".venv/bin/kvtide bench core"),
        ("clean", "rm -rf build dist"),
    ],
)
def test_target_runs_its_command(target: str, command: str) -> None:
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


def test_torch_index_url_is_for_torch_alone() -> None:
    done = make("--dry-run", "--always-make", "setup", env={"TORCH_INDEX_URL": "https://example.invalid/cpu"})
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    with_index = [line for line in installs if "--index-url" in line]
    assert len(installs) == 2
    assert len(with_index) == 1
    assert "^torch==" in with_index[0]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what set-up reads, and a stand-in for Python that notes what it was asked to run."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_an_old_python_is_refused_with_a_reason(clone: Path) -> None:
    old = clone / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("setup", env={"PYTHON": str(old)}, cwd=clone)
    assert done.returncode != 0
    assert "needs Python 3.11" in done.stderr
    assert not (clone / ".venv").exists()


def test_without_gpu_it_says_what_to_set_and_goes_on(clone: Path) -> None:
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU here")
    # A virtual environment whose pip and Python are stand-ins: torch is not there, every install succeeds.
    stand_in = clone / ".venv" / "bin"
    stand_in.mkdir(parents=True)
    for name, status in (("pip", 0), ("python", 1)):
        (stand_in / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {clone}/calls\nexit {status}\n')
        (stand_in / name).chmod(0o755)
    python = clone / "python-new"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)

    env = {"PYTHON": str(python), "TORCH_INDEX_URL": ""}
    done = make("setup", env=env, cwd=clone)
    assert done.returncode == 0, done.stderr
    assert "TORCH_INDEX_URL=<URL of the CPU wheel index of PyTorch> make setup" in done.stdout
    assert "install --quiet -e .[test,transformers] -c constraints.txt" in (clone / "calls").read_text()

    assert "nothing to be done" in make("setup", env=env, cwd=clone).stdout.lower()
    with (clone / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    done = make("setup", env={**env, "TORCH_INDEX_URL": "https://example.invalid/cpu"}, cwd=clone)
    assert "TORCH_INDEX_URL=" not in done.stdout
    calls = (clone / "calls").read_text()
    assert "--no-deps --index-url https://example.invalid/cpu torch==" in calls
    assert calls.count("-e .[test,transformers]") == 2


def test_ci_run_is_executable_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_constraints_pin_torch_without_a_build_and_no_cuda_package() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all("==" in line and "+" not in line for line in lines)
    names = {line.split("==")[0].lower() for line in lines}
    assert "torch" in names
    assert not [name for name in names if name.startswith("nvidia-")]


def test_every_declared_dependency_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {d.split(">=")[0].lower() for d in declared} <= pinned
