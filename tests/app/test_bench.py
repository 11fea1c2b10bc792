"""`kvtide bench core`: the numbers are there; how good they are, the command says."""

import json

import pytest

from kvtide.app import cli
from kvtide.app.bench import Measurement, as_json
from kvtide.app.bench_core import measure

SMALL = ["bench", "core", "--blocks", "5000", "--repeat", "3"]


@pytest.mark.blocks_loop(reason="it measures synchronous work, in a loop of its own")
def test_measures_hashing_matching_and_memory() -> None:
    hashing, matching, memory = measure(blocks=5_000, repeat=3)
    assert (hashing.target, matching.target, memory.target) == (4.0, 1.0, 400.0)
    assert "32,768 tokens" in hashing.name
    assert "2,048 blocks among 6,144" in matching.name
    assert hashing.value > 0
    # A node alone is larger than this; a tier that held nothing would be smaller.
    assert memory.value > 100


def test_a_missed_target_is_shown() -> None:
    assert Measurement("x", 4.0, "ms", 4.0).within
    assert not Measurement("x", 4.1, "ms", 4.0).within


@pytest.mark.blocks_loop(reason="it measures synchronous work, in a loop of its own")
def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["unit"] for each in answer["measurements"]] == ["ms", "ms", "bytes"]
    assert all({"name", "value", "target", "within"} <= each.keys() for each in answer["measurements"])
    assert answer.keys() == as_json([]).keys()


@pytest.mark.blocks_loop(reason="it measures synchronous work, in a loop of its own")
def test_the_table_has_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(SMALL) == 0
    printed = capsys.readouterr().out
    for word in ("hashing", "matching", "index memory", "bytes"):
        assert word in printed


@pytest.mark.parametrize("words", [["--blocks", "0"], ["--repeat", "many"]])
def test_wrong_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "core", *words])
    assert "is not a positive number" in capsys.readouterr().err
