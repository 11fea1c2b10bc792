"""Committed measurements say what they were measured on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_names_machine_versions_command_and_code(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["bench"] == path.stem
    assert {"machine", "versions", "command", "code"} <= result.keys()
    assert len(result["code"]) == 64


def test_record_keeps_the_last_line_and_writes_nothing_after_a_failure(tmp_path: Path) -> None:
    record = [sys.executable, str(ROOT / "benchmarks" / "record.py")]
    good = [*record, "good", "--out", str(tmp_path), "--", sys.executable, "-c", 'print("x\\n{\\"a\\": 1}")']
    subprocess.run(good, check=True, capture_output=True)
    assert json.loads((tmp_path / "good.json").read_text())["result"] == {"a": 1}
    bad = [*record, "bad", "--out", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(3)"]
    assert subprocess.run(bad, check=False, capture_output=True).returncode == 3
    assert not (tmp_path / "bad.json").exists()
