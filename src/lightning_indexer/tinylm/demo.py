"""The main job: the same prompts decoded plainly, with fresh and with shared selections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..indexer.block_table import BlockTable
from ..speculator.config import SpeculatorConfig
from ..speculator.generate import GenerationResult, generate
from ..speculator.mtp import MTPSpeculator
from ..speculator.overlap import OverlapProbe
from ..speculator.recorded import RecordedRunner
from ..speculator.runner import EagerRunner
from .model import TinyLM
from .runtime import TinyTarget, build

Mode = Literal["greedy", "fresh", "shared"]
Graph = Literal["eager", "recorded"]
MODES: tuple[Mode, ...] = ("greedy", "fresh", "shared")

PAGE_SIZE = 64
#: Target rows in a round; longer prompts are run in chunks.
MAX_NUM_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate.

    Attributes:
        prompts: UTF-8 bytes of each prompt.
        max_new_tokens: bytes to generate for each.
        draft_tokens: K, drafts a round.
        graph: how the draft's steps are executed.
        append_new_positions: of `MTPSpeculator`, in mode "shared".
        refresh_every: likewise.
    """

    prompts: Sequence[bytes]
    max_new_tokens: int
    draft_tokens: int
    graph: Graph = "eager"
    append_new_positions: bool = False
    refresh_every: int | None = None

    def check(self, max_model_len: int) -> None:
        """Raises ValueError for a prompt that is empty or leaves no room for the new bytes."""
        if not 1 <= self.max_new_tokens < max_model_len:
            raise ValueError(
                f"max_new_tokens must be in [1, {max_model_len}), the model's context,"
                f" got {self.max_new_tokens}"
            )
        longest = max_model_len - self.max_new_tokens
        for i, prompt in enumerate(self.prompts, start=1):
            if not 1 <= len(prompt) <= longest:
                raise ValueError(
                    f"prompt {i} must be 1 to {longest} bytes long (a context of {max_model_len}"
                    f" less {self.max_new_tokens} new ones), got {len(prompt)}"
                )


@dataclass(kw_only=True)
class ModeResult:
    """One mode's texts and counters; indexer rows are the draft's."""

    texts: list[str]
    new_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_by_position: list[float]
    indexer_rows_computed: int
    indexer_rows_skipped: int
    seconds: float
    tokens: list[list[int]] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """The fields, without the raw tokens."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


def run_mode(
    lm: TinyLM, mode: Mode, job: Job, *, on_tokens: Callable[[int, list[int]], None] | None = None
) -> ModeResult:
    """Generates in one mode, with fresh caches.

    Args:
        lm: weights.
        mode: "greedy" has no draft; "fresh" reselects at every draft step; "shared" selects once
            a round.
        job: prompts and limits.
        on_tokens: hears of each prompt's new bytes as they are verified.
    """
    target, speculator, block_table = _set_up(lm, mode, job)
    if speculator is not None and job.graph == "recorded":
        speculator.capture()
    begin = time.perf_counter()
    result = _generate(target, speculator, block_table, job, on_tokens)
    seconds = time.perf_counter() - begin
    stats = speculator.stats if speculator is not None else None
    return ModeResult(
        texts=[bytes(tokens).decode(errors="replace") for tokens in result.tokens],
        new_tokens=sum(len(tokens) for tokens in result.tokens),
        rounds=result.rounds,
        drafted=result.drafted,
        accepted=result.accepted,
        acceptance_by_position=[round(a, 4) for a in result.acceptance_by_position()],
        indexer_rows_computed=stats.rows_computed if stats is not None else 0,
        indexer_rows_skipped=stats.rows_reused if stats is not None else 0,
        seconds=round(seconds, 4),
        tokens=result.tokens,
    )


def measure_overlap(lm: TinyLM, job: Job) -> list[float]:
    """Mean overlap of shared with fresh selections at draft steps 1..K−1 (an untimed run)."""
    target, speculator, block_table = _set_up(lm, "shared", job)
    if speculator is None:
        return []
    probe = OverlapProbe(speculator)
    speculator.observer = probe
    _generate(target, speculator, block_table, job, None)
    return [round(overlap, 4) for overlap in probe.by_step()]


def _set_up(
    lm: TinyLM, mode: Mode, job: Job
) -> tuple[TinyTarget, MTPSpeculator | None, BlockTable]:
    config, reqs = lm.config, len(job.prompts)
    block_table = BlockTable(
        reqs,
        config.max_model_len,
        num_pages=reqs * -(-config.max_model_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    rows = _max_rows(job)
    shares = mode == "shared"
    appends = shares and job.append_new_positions
    target, draft = build(
        lm,
        num_pages=block_table.num_free_pages,
        max_num_tokens=rows,
        page_size=PAGE_SIZE,
        append_columns=max(job.draft_tokens - 1, 0) if appends else 0,
    )
    if mode == "greedy":
        return target, None, block_table
    recorded = job.graph == "recorded"
    speculator = MTPSpeculator(
        draft,
        SpeculatorConfig(
            num_speculative_steps=job.draft_tokens,
            max_num_reqs=reqs,
            max_num_tokens=rows,
            max_model_len=config.max_model_len,
            hidden_size=config.hidden_size,
            page_size=PAGE_SIZE,
            prefill_sizes=_graph_sizes(reqs * (job.draft_tokens + 1)) if recorded else (),
            decode_sizes=_graph_sizes(reqs) if recorded else (),
            fused_steps=(job.draft_tokens,) if recorded and job.draft_tokens > 1 else (),
        ),
        draft_config={"index_share_for_mtp_iteration": shares},
        runner=RecordedRunner() if recorded else EagerRunner(),
        append_new_positions=appends,
        refresh_every=job.refresh_every if shares else None,
    )
    return target, speculator, block_table


def _generate(
    target: TinyTarget,
    speculator: MTPSpeculator | None,
    block_table: BlockTable,
    job: Job,
    on_tokens: Callable[[int, list[int]], None] | None,
) -> GenerationResult:
    return generate(
        target,
        [list(prompt) for prompt in job.prompts],
        job.max_new_tokens,
        block_table=block_table,
        speculator=speculator,
        max_num_batched_tokens=_max_rows(job),
        on_tokens=on_tokens,
    )


def _max_rows(job: Job) -> int:
    return max(MAX_NUM_TOKENS, len(job.prompts) * (job.draft_tokens + 1))


def _graph_sizes(most: int) -> tuple[int, ...]:
    """Halving from the largest: a batch is padded to less than twice its rows."""
    sizes = {most}
    while most > 1:
        most = -(-most // 2)
        sizes.add(most)
    return tuple(sorted(sizes))
