"""What a draft gains from other selections: acceptance by position, rows computed, overlap.

Continues held-out prompts with demo models of several training seeds, under four ways to choose
the keys of draft steps 1..K−1 and two options beside plain sharing:

- fresh: every step selects; shared: step 0's selection is reused;
- append: shared, and the round's own new positions are seen too (`append_new_positions`);
- refresh n: shared, and steps n, 2n, … select afresh (`refresh_every`).

Overlap is that of the rows in use with a fresh selection, of which a refreshed row is one. Rows do
not count the prompts'. Texts must be the same for all of them, else the exit code is 1. Nothing
here is timed. `lightning-indexer train --seed N --out DIR` makes models other than the shipped one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_indexer.tinylm.checkpoint import SHIPPED, load
from lightning_indexer.tinylm.corpus import python_topics
from lightning_indexer.tinylm.demo import Mode, ModeResult, measure_overlap, run_mode
from lightning_indexer.tinylm.evaluation import held_out_job
from lightning_indexer.tinylm.model import TinyLM


@dataclass(frozen=True)
class Variant:
    """A way to choose the keys of draft steps."""

    name: str
    mode: Mode
    options: dict[str, Any]


VARIANTS = (
    Variant("fresh", "fresh", {}),
    Variant("shared", "shared", {}),
    Variant("append", "shared", {"append_new_positions": True}),
    Variant("refresh 2", "shared", {"refresh_every": 2}),
    Variant("refresh 3", "shared", {"refresh_every": 3}),
    Variant("append, refresh 2", "shared", {"append_new_positions": True, "refresh_every": 2}),
)


def main() -> int:
    arguments = _arguments()
    texts_differ = False
    rows = []
    for directory in arguments.models:
        lm, card = load(directory)
        for steps in arguments.draft_tokens:
            results = [_measure(lm, variant, steps, arguments) for variant in VARIANTS]
            texts_differ |= any(r.tokens != results[0][0].tokens for r, _ in results)
            for variant, (result, overlap) in zip(VARIANTS, results, strict=True):
                rows.append(_row(card, steps, variant, result, overlap))
    _show(rows)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(texts_differ)


def _measure(
    lm: TinyLM, variant: Variant, steps: int, arguments: argparse.Namespace
) -> tuple[ModeResult, list[float]]:
    job = held_out_job(
        lm,
        python_topics(),
        num_speculative_steps=steps,
        num_prompts=arguments.prompts,
        **variant.options,
    )
    overlap = measure_overlap(lm, job) if variant.mode == "shared" else []
    result = run_mode(lm, variant.mode, job)
    prompts = sum(len(prompt) for prompt in job.prompts)
    result.indexer_rows_computed -= prompts  # every variant selects for them, once
    return result, overlap


def _row(
    card: dict[str, Any], steps: int, variant: Variant, result: ModeResult, overlap: list[float]
) -> dict[str, Any]:
    return {
        "seed": card["seed"],
        "K": steps,
        "variant": variant.name,
        "acceptance": round(result.accepted / result.drafted, 4),
        "acceptance_by_position": result.acceptance_by_position,
        "rounds": result.rounds,
        "rows_computed": result.indexer_rows_computed,
        "rows_skipped": result.indexer_rows_skipped,
        "overlap_by_step": [share or None for share in overlap],  # a refresh is not measured
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Held-out drafts by how their keys were chosen")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=200).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, default=[SHIPPED], metavar="DIR")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3, 5], metavar="K")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE", help="one line a row")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
