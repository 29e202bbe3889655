"""Which layers select and which reuse, from a model's config."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counting import counts_examples
from lightning_indexer.indexer.layer_plan import layer_roles, stage_roles

pytestmark = pytest.mark.once


GLM_52 = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}


def _full(**config) -> list[int]:
    return [i for i, role in enumerate(layer_roles(config)) if role == "full"]


def test_glm_52_has_21_full_layers():
    # ikawrakow/ik_llama.cpp#2063: own top-k on all 78 layers cost perplexity
    full = _full(**GLM_52)
    assert full == [0, 1, *range(2, 78, 4)]
    assert len(full) == 21
    assert 39 not in full  # sgl-project/sglang#28537: a stage that begins there needs indices


def test_default_offset_is_two():
    # PrimeIntellect-ai/prime-rl#2541: FFSSSFSSS is what the engines serve
    assert _full(num_hidden_layers=9, index_topk_freq=4) == [0, 1, 5]


@pytest.mark.parametrize("draft_layers", [0, 1, 3])
def test_draft_layers_follow_and_are_always_full(draft_layers):
    # vllm-project/vllm-ascend#14451: a backbone's "S" made the draft start in skip mode
    roles = layer_roles(
        {
            "num_hidden_layers": 4,
            "num_nextn_predict_layers": draft_layers,
            "index_topk_pattern": "FSSS",
        }
    )
    assert roles == ("full", "shared", "shared", "shared", *["full"] * draft_layers)


def test_pattern_that_covers_draft_layers_cannot_make_them_share():
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "index_topk_pattern": "FSSS"}
    assert layer_roles(config) == ("full", "shared", "shared", "full")


def test_first_layer_is_full_whatever_the_pattern_says():
    assert layer_roles({"num_hidden_layers": 2, "index_topk_pattern": "SS"}) == ("full", "shared")


def test_every_layer_is_full_without_a_plan():
    assert layer_roles(SimpleNamespace(num_hidden_layers=3)) == ("full",) * 3


@pytest.mark.parametrize("pattern", ["FSFS", list("FSFS"), ["full", "shared", "full", "shared"]])
@pytest.mark.parametrize("name", ["indexer_types", "index_topk_pattern"])
@pytest.mark.parametrize("wrap", [dict, lambda config: SimpleNamespace(**config)])
def test_spellings_of_a_pattern_are_equal(name, pattern, wrap):
    config = wrap({"num_hidden_layers": 4, name: pattern})
    assert layer_roles(config) == ("full", "shared", "full", "shared")


def test_precedence():
    config = {
        "num_hidden_layers": 3,
        "indexer_types": ["full", "full", "shared"],
        "index_topk_pattern": "FSF",
        "index_topk_freq": 1,
    }
    assert layer_roles(config) == ("full", "full", "shared")
    del config["indexer_types"]
    assert layer_roles(config) == ("full", "shared", "full")
    del config["index_topk_pattern"]
    assert layer_roles(config) == ("full", "full", "full")


def test_fields_that_are_none_are_absent():
    config = {"num_hidden_layers": 2, "indexer_types": None, "index_topk_freq": None}
    assert layer_roles(config) == ("full", "full")


@given(st.integers(1, 90), st.integers(1, 9), st.integers(0, 9), st.integers(0, 2))
@counts_examples("layer_roles")
def test_frequency_rule(layers, freq, offset, drafts):
    roles = layer_roles(
        {
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": drafts,
            "index_topk_freq": freq,
            "index_skip_topk_offset": offset,
        }
    )
    assert len(roles) == layers + drafts
    for layer in range(1, layers):
        on_grid = layer < offset or (layer - offset + 1) % freq == 0
        assert roles[layer] == ("full" if on_grid else "shared")
    assert roles[0] == "full"
    assert set(roles[layers:]) <= {"full"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers must be at least 1, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_hidden_layers": 3, "index_topk_pattern": "FS"}, "each of 3 layers, got 2"),
        ({"num_hidden_layers": 2, "index_topk_pattern": "FX"}, "got 'X'"),
        ({"num_hidden_layers": 2, "indexer_types": ["full", "half"]}, "got 'half'"),
        ({"num_hidden_layers": 2, "index_topk_freq": 0}, "index_topk_freq must be at least 1"),
    ],
)
def test_bad_config_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        layer_roles(config)


def test_stage_of_glm_52_that_begins_at_39_needs_a_selection_from_the_stage_before():
    # sgl-project/sglang#28537: layer 39 is shared; its rows are layer 38's
    roles = layer_roles(GLM_52)
    needed = r"first must be a full layer .* unless receives_selection, got layer 39"
    with pytest.raises(ValueError, match=needed) as refusal:
        stage_roles(roles, 39, 78)
    assert "[0, 1, 2, 6, 10, " in str(refusal.value)  # where it could begin
    assert stage_roles(roles, 39, 78, receives_selection=True)[:4] == (*["shared"] * 3, "full")
    assert stage_roles(roles, 0, 39) == roles[:39]
    assert stage_roles(roles, 38, 78) == roles[38:]


plans = st.lists(st.sampled_from(["full", "shared"]), max_size=20).map(lambda r: ["full", *r])


@given(plans, st.data(), st.booleans())
@counts_examples("layer_roles")
def test_stage_runs_if_its_first_layer_selects_or_is_handed_a_selection(roles, data, receives):
    first = data.draw(st.integers(0, len(roles) - 1))
    end = data.draw(st.integers(first + 1, len(roles)))
    if roles[first] == "full" or receives:
        stage = stage_roles(roles, first, end, receives_selection=receives)
        assert list(stage) == roles[first:end]
    else:
        with pytest.raises(ValueError, match=f"got layer {first}, which is shared"):
            stage_roles(roles, first, end, receives_selection=receives)


@given(plans, st.sets(st.integers(1, 19), max_size=4))
@counts_examples("layer_roles")
def test_stages_that_hand_selections_on_are_the_whole_model(roles, cuts):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(roles)), len(roles)]
    stages = [
        stage_roles(roles, first, end, receives_selection=first > 0)
        for first, end in pairwise(bounds)
    ]
    assert [role for stage in stages for role in stage] == roles


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("bounds", [(0, 0), (2, 1), (-1, 2), (0, 4), (3, 4), (3, 3)])
def test_stage_outside_the_layers_is_refused(bounds, receives):
    message = rf"\[first, end\) must lie in \[0, 3\), got \[{bounds[0]}, {bounds[1]}\)"
    with pytest.raises(ValueError, match=message):
        stage_roles(("full",) * 3, *bounds, receives_selection=receives)
