"""Whether the demo model's draft shares its selection, and the right one: found by running it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..indexer.block_table import BlockTable
from ..speculator.check import IndexSharingError, SharingReport, check_index_sharing
from ..speculator.config import SpeculatorConfig
from ..speculator.generate import generate
from ..speculator.mtp import MTPSpeculator
from ..speculator.sharing import CALLABLES, resolve_sharing
from ..speculator.stats import SpeculatorStats
from .model import TinyLM
from .runtime import TinyDraft, TinyTarget, build

PAGE_SIZE, NUM_PAGES = 64, 8
MAX_NUM_TOKENS = 256
PROMPTS = (b"The for statement is used to", b"A class definition is an executable")
NEW_TOKENS, DRAFT_TOKENS = 16, 3


@dataclass(frozen=True, kw_only=True)
class SharingOutcome:
    """What was found out; None is what `reason` kept from running.

    Attributes:
        capability: what the draft has or lacks.
        reason: why sharing is not active or not right; None when it is both.
        checked: what `check_index_sharing` looked at.
        stats: counters of a short generation with this draft.
        overlap_by_step: of shared with fresh selections, in that generation.
    """

    capability: str
    reason: str | None = None
    checked: SharingReport | None = None
    stats: SpeculatorStats | None = None
    overlap_by_step: list[float] | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def check_sharing(target: TinyTarget, draft: TinyDraft, *, share: bool = True) -> SharingOutcome:
    """Looks for the capability, proves it with `check_index_sharing`, then counts a generation.

    Args:
        target: verifies the drafts of the generation.
        draft: what is checked, made with `target` by `build_for_check`.
        share: False turns `index_share_for_mtp_iteration` off in the draft's config.
    """
    draft_config = draft.config if share else {"index_share_for_mtp_iteration": False}
    sharing = resolve_sharing(draft, draft_config)
    if sharing.model is None:
        capability = f"lacks {sharing.missing}" if sharing.missing else "not asked for"
        reason = sharing.missing and f"{type(draft).__name__} lacks {sharing.missing}"
        off = "index_share_for_mtp_iteration is off in the draft's config"
        return SharingOutcome(capability=capability, reason=f"not active: {reason or off}")
    capability = f"{' and '.join(CALLABLES)} on {type(sharing.model).__name__}"
    try:
        checked = check_index_sharing(
            draft,
            hidden_size=draft.config.hidden_size,
            index_topk=draft.config.index_topk,
            page_size=PAGE_SIZE,
        )
    except IndexSharingError as error:
        return SharingOutcome(capability=capability, reason=f"not right: {error}")
    speculator = _generate(target, draft, draft_config)
    assert speculator.overlap is not None, "measured: the draft shares"
    return SharingOutcome(
        capability=capability,
        reason=None if speculator.stats.rows_reused else "not active: no row was reused",
        checked=checked,
        stats=speculator.stats,
        overlap_by_step=[round(overlap, 4) for overlap in speculator.overlap.by_step()],
    )


def build_for_check(lm: TinyLM) -> tuple[TinyTarget, TinyDraft]:
    """Target and draft with the caches that `check_sharing` needs."""
    return build(lm, num_pages=NUM_PAGES, max_num_tokens=MAX_NUM_TOKENS, page_size=PAGE_SIZE)


def _generate(target: TinyTarget, draft: TinyDraft, draft_config: Any) -> MTPSpeculator:
    """The speculator that has drafted a short generation."""
    limits = SpeculatorConfig(
        num_speculative_steps=DRAFT_TOKENS,
        max_num_reqs=len(PROMPTS),
        max_num_tokens=MAX_NUM_TOKENS,
        max_model_len=draft.config.max_model_len,
        hidden_size=draft.config.hidden_size,
        page_size=PAGE_SIZE,
    )
    speculator = MTPSpeculator(draft, limits, draft_config=draft_config, measure_overlap_every=1)
    table = BlockTable(len(PROMPTS), limits.max_model_len, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    generate(
        target,
        [list(prompt) for prompt in PROMPTS],
        NEW_TOKENS,
        block_table=table,
        speculator=speculator,
    )
    return speculator
