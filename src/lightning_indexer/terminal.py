"""What a person sees: text as it comes, the table of a comparison, the progress of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from .tinylm.demo import ModeResult
from .tinylm.sharing_check import SharingOutcome
from .tinylm.training import Progress as TrainingProgress


@contextmanager
def streamed_texts(
    console: Console, prompts: Sequence[str]
) -> Iterator[Callable[[int, list[int]], None]]:
    """Shows each prompt and, behind it, its new bytes as they are verified.

    Yields the callback to hand to the generator. Without a terminal the texts are printed once,
    complete.
    """
    received = [bytearray() for _ in prompts]

    def render() -> Group:
        return Group(
            *(
                Text.assemble((prompt, "bold"), (new.decode(errors="replace"), "green"), "\n")
                for prompt, new in zip(prompts, received, strict=True)
            )
        )

    with Live(render(), console=console, auto_refresh=False) as live:

        def on_tokens(prompt: int, tokens: list[int]) -> None:
            received[prompt].extend(tokens)
            live.update(render(), refresh=console.is_terminal)

        yield on_tokens
        live.update(render(), refresh=True)


def comparison_table(
    card: Mapping[str, Any],
    modes: Mapping[str, ModeResult],
    overlap_by_step: Sequence[float] | None,
) -> Table:
    """One column a mode: rounds, acceptance, the draft's indexer rows, time."""
    table = Table(
        title="Speculative decoding, same text by every way",
        caption=f"{card['parameters']:,} parameters,"
        f" validation {card['validation_nats_per_byte']} nats a byte",
    )
    table.add_column("")
    for name in modes:
        table.add_column(name, justify="right")

    def row(label: str, cell: Callable[[ModeResult], str]) -> None:
        table.add_row(label, *(cell(result) for result in modes.values()))

    row("new bytes", lambda r: str(r.new_tokens))
    row("verification rounds", lambda r: str(r.rounds))
    row("bytes a round", lambda r: f"{r.new_tokens / max(r.rounds, 1):.2f}")
    row("drafted / accepted", lambda r: f"{r.drafted} / {r.accepted}" if r.drafted else "–")
    row("acceptance by position", lambda r: _shares(r.acceptance_by_position))
    row("draft indexer rows computed", lambda r: str(r.indexer_rows_computed))
    row("draft indexer rows skipped", lambda r: str(r.indexer_rows_skipped))
    if overlap_by_step is not None:
        cells = [_shares(overlap_by_step) if name == "shared" else "–" for name in modes]
        table.add_row("overlap with fresh, by step", *cells)
    row("seconds", lambda r: f"{r.seconds:.2f}")
    return table


def sharing_table(outcome: SharingOutcome) -> Table:
    """What was found and checked of sharing; what did not run has no row."""
    table = Table(title="Sharing one selection a draft round", show_header=False)
    table.add_row("capability", outcome.capability)
    if (checked := outcome.checked) is not None:
        table.add_row("selection buffers driven", str(checked.num_buffers))
        table.add_row(
            "requests / token rows checked", f"{checked.requests} / {checked.rows_checked}"
        )
    if (stats := outcome.stats) is not None:
        table.add_row("rounds / draft forwards", f"{stats.rounds} / {stats.forwards}")
        table.add_row("rows computed", str(stats.rows_computed))
        table.add_row("rows reused", str(stats.rows_reused))
        table.add_row("rows compacted", str(stats.rows_compacted))
    if outcome.overlap_by_step is not None:
        table.add_row("overlap with fresh, by step", _shares(outcome.overlap_by_step))
    return table


@contextmanager
def training_bar(console: Console) -> Iterator[Callable[[TrainingProgress], None]]:
    """A progress bar with losses; yields the callback to hand to the trainer."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=None)

        def on_step(report: TrainingProgress) -> None:
            drafts = " ".join(f"{loss:.2f}" for loss in report.drafts)
            phase = "sparse" if report.sparse else "dense"
            description = f"{phase}  loss {report.target:.3f}  drafts {drafts}"
            bar.update(task, completed=report.step, total=report.steps, description=description)

        yield on_step


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "–"
