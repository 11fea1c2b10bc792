"""The demo's table, as it fills, and its summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtide.app.demo_measure import Row

if TYPE_CHECKING:
    from rich.table import Table


def table(rows: Sequence[Row], running: str | None = None) -> Table:
    """One line a request; `running` names the one that is under way."""
    from rich import box
    from rich.table import Table

    view = Table(
        title="Time to the first token without the cache (cold) and with it (warm), in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    view.add_column("request", no_wrap=True)
    for name in ("prompt", "reused", "cold", "warm", "faster", "MB in", "out"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("hit", no_wrap=True)
    view.add_column("same", no_wrap=True)
    for row in rows:
        view.add_row(
            row.title,
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            f"{row.ttft_cold_ms:,.0f}",
            f"{row.ttft_warm_ms:,.0f}",
            "-" if row.speedup is None else f"[bold]{row.speedup:.1f}x[/bold]",
            f"{row.loaded_bytes / 1e6:,.1f}",
            f"{row.stored_bytes / 1e6:,.1f}",
            ", ".join(name for name, tokens in row.by_tier.items() if tokens) or "miss",
            "[green]yes[/green]" if row.identical else "[bold red]NO[/bold red]",
        )
    if running is not None:
        view.add_row(running, *["..."] * 9, style="dim")
    return view


def speedup_median(rows: Sequence[Row]) -> float | None:
    """The median over the requests that reused something; None if none did."""
    speedups = [row.speedup for row in rows if row.speedup is not None]
    return statistics.median(speedups) if speedups else None


def summary(rows: Sequence[Row], *, gpu: bool, random: bool) -> str:
    """What the table comes to, for people."""
    hits = [row for row in rows if row.reused_tokens]
    lines = []
    if hits:
        reused = sum(row.reused_tokens for row in hits)
        prompts = sum(row.prompt_tokens for row in hits)
        lines.append(
            f"The first token came {speedup_median(rows):.1f} times sooner (median of {len(hits)} requests): "
            f"{reused:,} of {prompts:,} prompt tokens were loaded, not computed."
        )
        prefill = statistics.median(row.prefill_ms for row in hits)
        load = statistics.median(row.load_ms for row in hits)
        tail = statistics.median(row.tail_ms for row in hits)
        lines.append(
            f"Medians: prefill {prefill:,.1f} ms without the cache; load {load:,.1f} ms "
            f"and the tail step {tail:,.1f} ms with it."
        )
    else:
        lines.append("Nothing was reused: the text is too short for a full block.")
    differing = [row.title for row in rows if not row.identical]
    if differing:
        lines.append(f"DIFFERENT with the cache: {', '.join(differing)}.")
    elif gpu:
        same = sum(row.tokens_identical for row in rows)
        lines.append(
            "Every byte loaded is the byte that was stored, and the first token's logits are as close to "
            "the run without the cache as such runs are to each other. "
            f"({same} of {len(rows)} answers have the same tokens; "
            "in bf16, runs without any cache differ too.)"
        )
    else:
        lines.append("Every answer is the same, token by token, with the cache and without it.")
    if random:
        lines.append("The weights are random, so the answers are gibberish; --model takes a real model.")
    return "\n".join(lines)
