"""The wheel built from a clean checkout holds every module and data file, under kvtide/ and nowhere else."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("app", "core", "kernels", "storage")
SUFFIXES = (".py", ".txt", ".json", ".html", ".md")


def git(*args: str) -> str:
    """Run git in the repository and return what it prints; skip outside of a checkout."""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no git here")
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Paths of the files git knows, relative to the root."""
    # In a checkout of something else around an unpacked archive, git answers for that.
    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT:
        pytest.skip("not a git checkout of its own")
    return [path for path in git("ls-files", "-z").split("\0") if path]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git knows (the index: HEAD in CI), built offline."""
    # The index, exported, is what a clone will be: a file that somebody forgot to add is missing here too.
    tree = tmp_path_factory.mktemp("checkout")
    git("checkout-index", "--all", f"--prefix={tree}{os.sep}")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "-w", str(out), str(tree)], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file(wheel: Path, tracked: list[str]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"kvtide/{p}" for p in tracked if p.split("/")[0] in PARTS and p.endswith(SUFFIXES)}
    wanted |= {p.removeprefix("src/") for p in tracked if p.startswith("src/kvtide/") and p.count("/") == 2}
    wanted -= {f"kvtide/{part}" for part in PARTS}  # the links themselves
    assert "kvtide/py.typed" in wanted
    assert wanted - names == set()


def test_every_data_file_of_the_parts_has_a_suffix_that_is_packaged(tracked: list[str]) -> None:
    left_out = [p for p in tracked if p.split("/")[0] in PARTS and not p.endswith(SUFFIXES)]
    assert left_out == [], "add the suffix to package-data in pyproject.toml and to SUFFIXES"


def test_the_wheel_installs_nothing_beside_kvtide(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtide"}


def test_the_unpacked_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import kvtide, kvtide.app, kvtide.core, kvtide.kernels, kvtide.storage\n"
        "print(kvtide.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_the_command_and_the_licence_are_in_it(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
    assert "kvtide = kvtide.app.cli:main" in archive.read(entry_points).decode()
    assert any(n.endswith("LICENSE") and ".dist-info/" in n for n in archive.namelist())
