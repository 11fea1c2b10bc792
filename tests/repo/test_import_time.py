"""`import kvtide` is cheap: what is heavy loads at first use."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

LIMIT_S = 0.3
HEAVY = {
    "torch",
    "triton",
    "cuda",
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "transformers",
    "numpy",
    "rich",
}

# Timed inside, so that the start of the interpreter is not counted.
PROBE = """
import sys, time
began = time.perf_counter()
import kvtide
seconds = time.perf_counter() - began
import json
print(json.dumps({"seconds": seconds, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""

SRC = Path(__file__).resolve().parents[2] / "src"


def probe(cwd: Path) -> tuple[float, set[str]]:
    """Import kvtide in a fresh interpreter: seconds, and the top-level modules loaded by then."""
    script = f"import sys; sys.path.insert(0, {str(SRC)!r})\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return answer["seconds"], set(answer["modules"])


def test_import_takes_under_0_3_s_and_loads_nothing_heavy(tmp_path: Path) -> None:
    probes = [probe(tmp_path) for _ in range(5)]
    for _, modules in probes:
        assert not modules & HEAVY
    assert statistics.median(seconds for seconds, _ in probes) < LIMIT_S
