"""The demo as users run it, and the parts that judge it."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtide
from kvtide.app import demo
from kvtide.app.demo_identity import StoredCopies, distance, spread
from kvtide.app.demo_measure import Row
from kvtide.app.demo_table import speedup_median, summary, table
from kvtide.app.demo_text import STORY, PieceTokenizer, read_document

SOURCE = Path(__file__).resolve().parents[2] / "src"


def kvtide_demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`kvtide demo` in a process of its own, away from the repository's root."""
    script = "import sys; from kvtide.app.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, "demo", "--device", "cpu", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "title": "question",
        "prompt_tokens": 100,
        "reused_tokens": 96,
        "ttft_cold_ms": 100.0,
        "ttft_warm_ms": 10.0,
        "prefill_ms": 99.0,
        "load_ms": 4.0,
        "tail_ms": 5.0,
        "loaded_bytes": 1000,
        "stored_bytes": 100,
        "by_tier": {"host": 96},
        "shortfall": {},
        "identical": True,
        "tokens_identical": True,
        "bytes_identical": True,
        "logits_distance": 0.0,
        "logits_bound": None,
    }
    return Row(**{**values, **changes})


class TestAsRun:
    def test_json_is_the_last_line_and_has_its_shape(self, tmp_path: Path) -> None:
        ran = kvtide_demo(tmp_path, "--preset", "tiny", "--tokens", "200", "--new-tokens", "4", "--json")
        assert ran.returncode == 0, ran.stderr
        result = json.loads(ran.stdout.splitlines()[-1])
        assert (result["device"], result["model"], result["identical"]) == ("cpu", "tiny", True)
        assert result["speedup_median"] > 0
        requests = result["requests"]
        assert len(requests) == len(STORY)
        assert requests[0]["reused_tokens"] == 0
        for request in requests:
            assert {
                "prompt_tokens",
                "reused_tokens",
                "ttft_cold_ms",
                "ttft_warm_ms",
                "identical",
                "by_tier",
            } <= request.keys()
            assert request["identical"]
            assert request["bytes_identical"]
            assert request["reused_tokens"] < request["prompt_tokens"]
            assert sum(request["by_tier"].values()) == request["reused_tokens"]
        # Questions reuse the document, and every turn of the chat what was said before it.
        assert all(request["reused_tokens"] >= 192 for request in requests[1:])
        turns = [request["reused_tokens"] for request in requests if request["title"].startswith("chat")]
        assert turns == sorted(set(turns))

    def test_table_and_rest_beside_it(self, tmp_path: Path) -> None:
        own = tmp_path / "own.txt"
        own.write_text("A text of one's own, said again and again. " * 60)
        ran = kvtide_demo(
            tmp_path, "--preset", "tiny", "--file", str(own), "--new-tokens", "2", "--serve", "--port", "0"
        )
        assert ran.returncode == 0, ran.stderr
        assert all(turn.title in ran.stdout for turn in STORY)
        assert "Every answer is the same" in ran.stdout
        assert "REST: http://127.0.0.1:" in ran.stderr
        stats = next(line for line in ran.stdout.splitlines() if line.startswith("/v1/stats: "))
        assert json.loads(stats.removeprefix("/v1/stats: "))

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("--file", "missing.txt"), "missing.txt"),
            (("--preset", "tiny", "--tokens", "20"), "too short"),
            (("--model", "./nowhere"), "nowhere"),
        ],
    )
    def test_what_cannot_be_run(self, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
        ran = kvtide_demo(tmp_path, *words)
        assert ran.returncode == 2
        assert says in ran.stderr
        assert "Traceback" not in ran.stderr


class TestReport:
    def parsed(self, *words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        demo.add_arguments(parser)
        return parser.parse_args(words)

    @pytest.mark.parametrize(("identical", "status"), [(True, 0), (False, 1)])
    def test_status_says_whether_anything_differs(
        self, capsys: pytest.CaptureFixture[str], identical: bool, status: int
    ) -> None:
        args = self.parsed("--preset", "tiny", "--device", "cpu", "--tokens", "64", "--json")
        reading = demo._prepare(args)
        assert demo._report(reading, args, [row(), row(identical=identical)], None) == status
        assert json.loads(capsys.readouterr().out)["identical"] is identical

    def test_median_leaves_the_miss_out(self) -> None:
        miss = row(reused_tokens=0, ttft_warm_ms=100.0)
        assert speedup_median([miss, row(), row(ttft_warm_ms=20.0)]) == 7.5
        assert speedup_median([miss]) is None

    def test_summary_names_what_differs(self) -> None:
        wrong = dataclasses.replace(row(), title="the wrong one", identical=False)
        assert "the wrong one" in summary([row(), wrong], gpu=False, random=True)
        assert table([row(), wrong], "running").row_count == 3

    @pytest.mark.parametrize("words", [("--tokens", "0"), ("--model", "x", "--preset", "tiny")])
    def test_arguments_that_make_no_sense(self, words: tuple[str, ...]) -> None:
        with pytest.raises(SystemExit):
            self.parsed(*words)


class TestText:
    def test_the_shipped_text_is_long_enough(self) -> None:
        text = read_document(None)
        assert len(PieceTokenizer(text, 512).encode(text)) >= 8192

    @pytest.mark.parametrize("pieces", [0, 8, 512])
    def test_tokens_give_the_text_back(self, pieces: int) -> None:
        tokenizer = PieceTokenizer(read_document(None), pieces)
        text = "We the People of Köln, 東京 and elsewhere;\n\n\tdo  ordain: 1787."
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert max(tokenizer.encode(text)) < 256 + pieces

    def test_an_empty_file(self, tmp_path: Path) -> None:
        empty = tmp_path / "empty.txt"
        empty.write_text("\n")
        with pytest.raises(kvtide.InvalidRequest, match="empty"):
            read_document(empty)


class TestIdentity:
    def past(self, tokens: int, seed: int = 0) -> DynamicCache:
        generator = torch.Generator().manual_seed(seed)
        past = DynamicCache()
        for layer in range(2):
            keys, values = torch.randn((2, 1, 2, tokens, 4), generator=generator)
            past.update(keys, values, layer)
        return past

    def loaded(self, past: DynamicCache, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone()) for layer in past.layers
        ]

    def test_pieces_that_were_stored_one_after_the_other(self) -> None:
        tokens, past = list(range(64)), self.past(64)
        copies = StoredCopies(16)
        copies.keep(tokens[:39], 0, past)
        # A block of which only the first half is the same: its bytes are another run's.
        copies.keep([*range(40), *[99] * 8], 32, self.past(64, seed=1))
        copies.keep(tokens, 32, past)
        assert copies.equal(tokens, self.loaded(past, 64), 64)
        assert copies.equal(tokens, self.loaded(past, 48), 48)
        assert not copies.equal([*range(48), 99], self.loaded(past, 64), 64)

    @pytest.mark.parametrize("at", [0, 31, 32, 63])
    def test_one_bit_is_enough(self, at: int) -> None:
        tokens, past = list(range(64)), self.past(64)
        copies = StoredCopies(16)
        copies.keep(tokens[:39], 0, past)
        copies.keep(tokens, 32, past)
        loaded = self.loaded(past, 64)
        loaded[1][1].view(torch.int32)[0, 1, at, 3] ^= 1
        assert not copies.equal(tokens, loaded, 64)

    def test_signed_zeros_differ(self) -> None:
        past = self.past(16)
        past.layers[0].keys.zero_()
        copies = StoredCopies(16)
        copies.keep(list(range(16)), 0, past)
        loaded = self.loaded(past, 16)
        loaded[0][0].neg_()
        assert not copies.equal(list(range(16)), loaded, 16)

    def test_distances(self) -> None:
        runs = [torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, -3.0])]
        assert distance(runs[0], runs[1]) == 1.0
        assert spread(runs) == 3.0
