"""`check-sharing` reports what it proved of the shipped draft, and ends with 1 and the reason."""

import json

import pytest
from typer.testing import CliRunner

from lightning_indexer import cli
from lightning_indexer.cli import app
from lightning_indexer.tinylm import sharing_check

pytestmark = pytest.mark.once  # the shipped model takes minutes in the interpreter

STEPS = sharing_check.DRAFT_TOKENS
REQUESTS = len(sharing_check.PROMPTS)


def run(*arguments: str):
    return CliRunner().invoke(app, ["check-sharing", *arguments])


def build_with(spoil):
    """A `build_for_check` whose draft `spoil` has had in hand."""

    def build(lm):
        target, draft = sharing_check.build_for_check(lm)
        spoil(draft)
        return target, draft

    return build


def test_the_shipped_draft_shares_and_the_counters_say_so(tmp_path):
    file = tmp_path / "out.json"
    result = run("--json", str(file))
    assert result.exit_code == 0, result.output
    assert "sharing is active and right" in result.output
    found = json.loads(file.read_text())
    assert found["reason"] is None
    assert "set_skip_topk and compact_topk_indices" in found["capability"]
    assert found["checked"]["num_buffers"] == 1
    assert found["checked"]["requests"] == 3
    stats = found["stats"]
    assert stats["rows_reused"] == stats["rows_compacted"] * (STEPS - 1) > 0
    assert stats["forwards"] == stats["rounds"] * STEPS
    assert stats["rows_compacted"] <= stats["rounds"] * REQUESTS
    assert len(found["overlap_by_step"]) == STEPS - 1
    assert all(0 < overlap <= 1 for overlap in found["overlap_by_step"])


def test_sharing_turned_off_ends_with_1_and_the_reason(tmp_path):
    file = tmp_path / "out.json"
    result = run("--no-share", "--json", str(file))
    assert result.exit_code == 1
    assert "not active: index_share_for_mtp_iteration is off" in " ".join(result.output.split())
    found = json.loads(file.read_text())
    assert found["checked"] is found["stats"] is found["overlap_by_step"] is None
    assert found["reason"].startswith("not active")


def test_a_wrong_compaction_ends_with_1_and_the_reason(monkeypatch):
    def spoil(draft):
        right = draft.compact_topk_indices
        draft.compact_topk_indices = lambda rows: right(rows.flip(0))

    monkeypatch.setattr(cli, "build_for_check", build_with(spoil))
    result = run()
    assert result.exit_code == 1
    assert "not right: after compaction row 0 of buffer 0" in " ".join(result.output.split())


def test_a_draft_without_the_callables_is_named(monkeypatch):
    def spoil(draft):
        draft.set_skip_topk = None

    monkeypatch.setattr(cli, "build_for_check", build_with(spoil))
    with pytest.warns(RuntimeWarning, match="lacks set_skip_topk"):
        result = run()
    assert result.exit_code == 1
    assert "not active: TinyDraft lacks set_skip_topk" in " ".join(result.output.split())
