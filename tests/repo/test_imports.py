"""Imports run one way: app -> storage -> core, kernels; core and kernels never meet."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Per part: the other parts it may import, and the packages from outside (None: whatever is declared).
PARTS: dict[str, frozenset[str]] = {
    "app": frozenset({"storage", "core", "kernels"}),
    "storage": frozenset({"core", "kernels"}),
    "core": frozenset(),
    "kernels": frozenset(),
}
OUTSIDE: dict[str, frozenset[str] | None] = {
    "app": None,
    "storage": frozenset({"torch", "aiofiles", "xxhash"}),
    "core": frozenset(),
    "kernels": frozenset({"torch", "triton", "cuda"}),
}


def imported(source: str, module: str) -> list[tuple[int, str]]:
    """Every module that `source` names in an import, anywhere in it, with its line.

    Relative imports are made absolute: `module` is the package the source lies in, "kvtide.core" for
    core/index.py.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base == "kvtide":  # `from kvtide import core` imports the part, not a name of the root
                found += [(node.lineno, f"kvtide.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, base))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
            in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            found.append((node.lineno, node.args[0].value))
    return found


def violations(source: str, part: str, module: str | None = None) -> list[str]:
    """What `source`, as a file of `part`, imports against the rules."""
    wrong = []
    for line, name in imported(source, module or f"kvtide.{part}"):
        top, _, rest = name.partition(".")
        if top == "kvtide":
            other = rest.partition(".")[0]
            if other == part or other in PARTS[part]:
                continue
            if other not in PARTS and part == "app":  # the public API, or a name of it
                continue
            wrong.append(f"line {line}: {part} imports {name}")
        elif top in PARTS:
            wrong.append(f"line {line}: write kvtide.{name}, not {name}")
        elif top in sys.stdlib_module_names:
            continue
        else:
            allowed = OUTSIDE[part]
            if allowed is not None and top not in allowed:
                wrong.append(f"line {line}: {part} imports {name}")
    return wrong


@pytest.mark.parametrize("part", PARTS)
def test_imports_run_one_way(part: str) -> None:
    files = sorted((ROOT / part).rglob("*.py"))
    assert files, f"{part}/ is empty"
    wrong = []
    for file in files:
        inside = file.parent.relative_to(ROOT).parts
        module = ".".join(["kvtide", *inside])
        wrong += [f"{file.relative_to(ROOT)}: {w}" for w in violations(file.read_text(), part, module)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import torch"),
        ("core", "import numpy as np"),
        ("core", "from kvtide.kernels.device import Device"),
        ("core", "from kvtide import storage"),
        ("core", "from ..kernels import device"),
        ("core", "import kvtide"),
        ("core", "from kvtide import Settings"),
        ("core", "def f():\n    from kvtide.app import cli"),
        ("core", "import importlib\nimportlib.import_module('kvtide.storage.host')"),
        ("kernels", "import numpy"),
        ("kernels", "import kvtide.core.blocks"),
        (
            "kernels",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvtide.core import blocks",
        ),
        ("kernels", "from core.blocks import Block"),
        ("storage", "from kvtide.app.settings import Settings"),
        ("storage", "import fastapi"),
        ("storage", "import triton"),
        ("app", "from kernels import device"),
        ("app", "import core.blocks"),
    ],
)
def test_a_planted_violation_is_found(part: str, source: str) -> None:
    assert len(violations(source, part)) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import asyncio, hashlib\nfrom kvtide.core.blocks import Block\nfrom . import index"),
        (
            "kernels",
            "import torch, triton\nfrom cuda.bindings import runtime\nfrom kvtide.kernels import device",
        ),
        ("storage", "import mmap\nfrom kvtide.core import protocols\nfrom kvtide import kernels"),
        (
            "app",
            "import rich, kvtide\nfrom kvtide.storage.host import Arena\nfrom kvtide import __version__",
        ),
    ],
)
def test_what_is_allowed_passes(part: str, source: str) -> None:
    assert violations(source, part) == []
