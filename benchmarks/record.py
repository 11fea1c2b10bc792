"""Run a command that ends with one line of JSON, and keep that with what it was measured on.

    python benchmarks/record.py NAME-MACHINE [--out DIR] -- kvtide demo --preset llama-3-8b --json

writes DIR/NAME-MACHINE.json: bench, machine, versions, command, code (a hash of kernels/ and
storage/ as they are) and result. `make test` lists the files whose code has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "cuda-bindings", "transformers")


def code_hash(root: Path = ROOT) -> str:
    """SHA-256 over the names and bytes of the sources that move bytes."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("kernels", "storage") for p in (root / folder).glob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def machine() -> dict[str, object]:
    """GPU with its driver, where there is one, processor cores, system."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (FileNotFoundError, subprocess.CalledProcessError):
        gpus = []
    return {"gpus": [gpu for gpu in gpus if gpu], "cores": os.cpu_count(), "system": platform.system()}


def versions() -> dict[str, str]:
    """Python and the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Returns the command's status; writes nothing if it failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    ran = subprocess.run(args.command, stdout=subprocess.PIPE, text=True)
    lines = ran.stdout.strip().split("\n")
    if ran.returncode:
        print(ran.stdout, file=sys.stderr)
        return ran.returncode
    document = {
        "bench": args.name,
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(args.command),
        "code": code_hash(),
        "result": json.loads(lines[-1]),
    }
    target = args.out / f"{args.name}.json"
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
