"""Training of the demo model, in miniature: reproducible, resumable, learning the right things."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_indexer.tinylm import checkpoint
from lightning_indexer.tinylm.config import MINIATURE
from lightning_indexer.tinylm.corpus import Corpus, python_topics, split_text
from lightning_indexer.tinylm.evaluation import draft_held_out
from lightning_indexer.tinylm.losses import window_losses
from lightning_indexer.tinylm.model import TinyLM, random_model
from lightning_indexer.tinylm.training import Progress, TrainingPlan, train, validate
from lightning_indexer.tinylm.window import run_layer, select_top

pytestmark = pytest.mark.once

PLAN = TrainingPlan(steps=12, batch_size=2, warmup_steps=4, dense_fraction=0.5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return split_text("the quick brown fox jumps over the lazy dog; " * 60, source="a sentence")


def weights(lm: TinyLM) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in lm.parameters()])


class Killed(Exception):
    pass


def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    corpus: Corpus, tmp_path: Path
) -> None:
    expected = weights(train(MINIATURE, PLAN, corpus))

    def kill_at_9(progress: Progress) -> None:
        if progress.step == 9:
            raise Killed

    path = tmp_path / "run.ckpt"
    with pytest.raises(Killed):
        train(MINIATURE, PLAN, corpus, checkpoint=path, checkpoint_every=4, progress=kill_at_9)
    steps = []
    resumed = train(
        MINIATURE, PLAN, corpus, checkpoint=path, progress=lambda p: steps.append(p.step)
    )
    assert steps == [9, 10, 11, 12]  # from the checkpoint of step 8
    assert torch.equal(weights(resumed), expected)


def test_weights_depend_on_the_seed_and_not_on_threads(corpus: Corpus) -> None:
    plan = replace(PLAN, steps=3)
    expected = weights(train(MINIATURE, plan, corpus))
    torch.set_num_threads(2)
    try:
        again = weights(train(MINIATURE, plan, corpus))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(again, expected)
    assert not torch.equal(weights(train(MINIATURE, replace(plan, seed=1), corpus)), expected)


@pytest.mark.parametrize("other", [{"steps": 13}, {"seed": 1}])
def test_checkpoint_of_another_run_is_refused(
    corpus: Corpus, tmp_path: Path, other: dict[str, int]
) -> None:
    path = tmp_path / "run.ckpt"
    train(MINIATURE, replace(PLAN, steps=2), corpus, checkpoint=path, checkpoint_every=1)
    with pytest.raises(ValueError, match="plan"):
        train(MINIATURE, replace(PLAN, **other), corpus, checkpoint=path)


def test_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 66"):
        train(MINIATURE, PLAN, split_text("too short", source="nothing"))


def test_progress_reports_every_step_and_losses_fall(corpus: Corpus) -> None:
    reports: list[Progress] = []
    train(MINIATURE, replace(PLAN, steps=60), corpus, progress=reports.append)
    assert [report.step for report in reports] == list(range(1, 61))
    assert [report.sparse for report in reports] == [False] * 30 + [True] * 30
    assert all(len(report.drafts) == PLAN.draft_depth for report in reports)
    assert reports[-1].target < 0.8 * reports[0].target
    assert reports[-1].drafts[-1] < 0.8 * reports[0].drafts[-1]


def test_index_loss_teaches_the_indexers_alone(corpus: Corpus) -> None:
    lm = random_model(0)
    ids = corpus.train[:66].to(torch.int64).unsqueeze(0)
    losses = window_losses(lm, ids, depth=2, sparse=True, share=True, learn_index=True)
    losses.index.backward()
    taught = {name for name, p in lm.named_parameters() if p.grad is not None and p.grad.any()}
    assert taught == {name for name, _ in lm.named_parameters() if ".indexer." in name}


def test_main_losses_leave_the_indexers_alone(corpus: Corpus) -> None:
    lm = random_model(0)
    ids = corpus.train[:66].to(torch.int64).unsqueeze(0)
    losses = window_losses(lm, ids, depth=2, sparse=True, share=False, learn_index=False)
    (losses.target + sum(losses.drafts)).backward()
    idle = {name for name, p in lm.named_parameters() if p.grad is None}
    assert idle == {name for name, _ in lm.named_parameters() if ".indexer." in name}


def test_rows_see_no_later_row() -> None:
    lm = random_model(1).to(torch.float64)
    positions, cut = torch.arange(40), 25
    x = torch.randn(2, 40, MINIATURE.hidden_size, dtype=torch.float64)
    other = torch.cat([x[:, :cut], torch.randn_like(x[:, cut:])], dim=1)
    for layer in lm.model.layers:
        for sparse in (True, False):
            first, second = (
                run_layer(layer, some, positions, sparse=sparse, learn_index=False)
                for some in (x, other)
            )
            torch.testing.assert_close(first.rows[:, :cut], second.rows[:, :cut])
            assert not torch.equal(first.rows[:, cut:], second.rows[:, cut:])


def test_window_selection_prefers_the_smaller_position_among_ties() -> None:
    scores = torch.tensor([[[0.0, 1.0, 0.0, 0.0, 2.0], [1.0, float("-inf"), 0.0, 0.0, 0.0]]])
    expected = torch.tensor([[[1, 1, 0, 0, 1], [1, 0, 1, 1, 0]]], dtype=torch.bool)
    assert torch.equal(select_top(scores, 3), expected)


def test_saved_weights_load_unchanged(corpus: Corpus, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=2)
    lm = train(MINIATURE, plan, corpus)
    card = checkpoint.describe(lm, plan, corpus, command="none")
    checkpoint.save(lm, card, tmp_path)
    loaded, again = checkpoint.load(tmp_path)
    assert loaded.config == MINIATURE
    assert torch.equal(weights(loaded), weights(lm))
    assert again["data_sha256"] == corpus.sha256
    assert again["parameters"] == weights(lm).numel()
    assert again["validation_nats_per_byte"] == pytest.approx(
        validate(lm, corpus).target.item(), abs=1e-4
    )


def test_shipped_weights_are_what_their_card_says() -> None:
    lm, card = checkpoint.load()
    size = (checkpoint.SHIPPED / checkpoint.WEIGHTS_NAME).stat().st_size
    assert size <= 4_000_000
    assert card["parameters"] == weights(lm).numel()
    text = python_topics()
    nats = validate(lm, text).target.item()
    assert nats <= 1.35
    if card["data_sha256"] == text.sha256:  # else this is another CPython's text
        assert nats == pytest.approx(card["validation_nats_per_byte"], abs=1e-3)


@pytest.mark.parametrize("share", [True, False])
def test_shipped_draft_is_accepted_on_held_out_prompts(share: bool) -> None:
    lm, _ = checkpoint.load()
    result = draft_held_out(lm, python_topics(), share=share, num_prompts=16)
    assert result.accepted >= 0.75 * result.drafted
