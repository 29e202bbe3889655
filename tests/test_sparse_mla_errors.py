"""What `sparse_mla_attention` refuses, naming the argument and what it got; nothing is written."""

from collections.abc import Callable

import pytest
import torch

from lightning_indexer.kernels.sparse_mla_attention import sparse_mla_attention

Change = Callable[[dict], dict]


def valid() -> dict:
    return {
        "q": torch.ones(3, 2, 24),
        "kv": torch.ones(5, 24),
        "indices": torch.zeros(3, 4, dtype=torch.int32),
        "scale": 0.5,
        "v_dim": 16,
        "out": torch.full((3, 2, 16), 7.0),
        "lse": torch.full((3, 2), 7.0),
    }


def valid_fp8() -> dict:
    tensors = {
        "q": torch.ones(3, 2, 576).bfloat16(),
        "kv": torch.zeros(5, 656, dtype=torch.uint8),
        "out": torch.full((3, 2, 512), 7.0).bfloat16(),
    }
    return valid() | tensors | {"v_dim": 512}


# (argument named, what it becomes, error, words of the message)
BAD: list[tuple[str, Change, type[Exception], str]] = [
    ("q", lambda a: {"q": None}, TypeError, "NoneType"),
    ("q", lambda a: {"q": a["q"].double()}, TypeError, "float64"),
    ("q", lambda a: {"q": a["q"][0]}, ValueError, r"\[2, 24\]"),
    ("q", lambda a: {"q": torch.ones(3, 0, 24)}, ValueError, "1 to 128 heads, got 0"),
    ("q", lambda a: {"q": torch.ones(3, 129, 24)}, ValueError, "1 to 128 heads, got 129"),
    ("q", lambda a: {"q": torch.ones(3, 2, 577)}, ValueError, "1 to 576 columns, got 577"),
    ("q", lambda a: {"q": torch.ones(3, 2, 0)}, ValueError, "1 to 576 columns, got 0"),
    ("kv", lambda a: {"kv": [1]}, TypeError, "list"),
    ("kv", lambda a: {"kv": a["kv"].half()}, TypeError, "float16"),
    ("kv", lambda a: {"kv": a["kv"][:, :23]}, ValueError, r"\[5, 23\]"),
    ("kv", lambda a: {"kv": a["kv"][None]}, ValueError, r"\[1, 5, 24\]"),
    ("kv", lambda a: {"kv": a["kv"].to("meta")}, ValueError, "meta"),
    ("indices", lambda a: {"indices": a["indices"].float()}, TypeError, "float32"),
    ("indices", lambda a: {"indices": a["indices"][1:]}, ValueError, r"\[2, 4\]"),
    ("indices", lambda a: {"indices": a["indices"][0]}, ValueError, r"\[4\]"),
    ("indices", lambda a: {"indices": a["indices"].to("meta")}, ValueError, "meta"),
    ("scale", lambda a: {"scale": "1"}, TypeError, "str"),
    ("scale", lambda a: {"scale": True}, TypeError, "bool"),
    ("scale", lambda a: {"scale": float("nan")}, ValueError, "nan"),
    ("scale", lambda a: {"scale": float("-inf")}, ValueError, "-inf"),
    ("v_dim", lambda a: {"v_dim": 0}, ValueError, "got 0"),
    ("v_dim", lambda a: {"v_dim": 1.0}, TypeError, "float"),
    ("v_dim", lambda a: {"v_dim": 25}, ValueError, "at most 24, got 25"),
    ("out", lambda a: {"out": a["out"].half()}, TypeError, "float16"),
    ("out", lambda a: {"out": a["out"][:, :, 1:]}, ValueError, r"\[3, 2, 15\]"),
    ("out", lambda a: {"out": a["out"].to("meta")}, ValueError, "meta"),
    ("out", lambda a: {"out": a["out"][:1].expand(3, 2, 16)}, ValueError, "overlap"),
    ("lse", lambda a: {"lse": a["lse"].half()}, TypeError, "float16"),
    ("lse", lambda a: {"lse": a["lse"][1:]}, ValueError, r"\[2, 2\]"),
    ("lse", lambda a: {"lse": a["lse"][:1].expand(3, 2)}, ValueError, "overlap"),
]
BAD_FP8: list[tuple[str, Change, type[Exception], str]] = [
    ("q", lambda a: {"q": a["q"].float()}, TypeError, "float32"),
    ("q", lambda a: {"q": a["q"][..., :512]}, ValueError, "576 columns .* got 512"),
    ("v_dim", lambda a: {"v_dim": 500}, ValueError, "must be 512 .* got 500"),
    ("kv", lambda a: {"kv": a["kv"][:, :655]}, ValueError, r"\[5, 655\]"),
    ("kv", lambda a: {"kv": a["kv"].view(5, 1, 656)}, ValueError, r"\[5, 1, 656\]"),
    ("kv", lambda a: {"kv": torch.zeros(656, 5).byte().t()}, ValueError, r"\(1, 5\)"),
    ("kv", lambda a: {"kv": torch.zeros(5, 658).byte()[:, :656]}, ValueError, r"\(658, 1\)"),
    ("kv", lambda a: {"kv": torch.zeros(5, 660).byte()[:, 1:657]}, ValueError, "got 1"),
]


@pytest.mark.parametrize("name, change, error, words", BAD)
def test_refuses(name: str, change: Change, error: type[Exception], words: str) -> None:
    _assert_refused(valid(), name, change, error, words)


@pytest.mark.parametrize("name, change, error, words", BAD_FP8)
def test_refuses_with_656_byte_rows(
    name: str, change: Change, error: type[Exception], words: str
) -> None:
    _assert_refused(valid_fp8(), name, change, error, words)


def _assert_refused(
    arguments: dict, name: str, change: Change, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{name}\\b.*({words})"):
        sparse_mla_attention(**arguments | change(arguments))
    assert (arguments["out"] == 7).all() and (arguments["lse"] == 7).all()


@pytest.mark.parametrize("arguments", [valid(), valid_fp8()], ids=["floats", "fp8"])
def test_accepts_the_valid_arguments(arguments: dict) -> None:
    sparse_mla_attention(**arguments)
    assert not (arguments["out"] == 7).any() and not (arguments["lse"] == 7).any()


@pytest.mark.parametrize("slot", [-2, 5])
def test_check_mode_refuses_slots_outside_the_cache(
    monkeypatch: pytest.MonkeyPatch, slot: int
) -> None:
    arguments = valid()
    arguments["indices"][1, 2] = slot
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match=rf"^indices must be in \[-1, 5\), got {slot}"):
        sparse_mla_attention(**arguments)
    assert (arguments["out"] == 7).all() and (arguments["lse"] == 7).all()
    monkeypatch.delenv("LIGHTNING_INDEXER_CHECK")
    sparse_mla_attention(**arguments)
    assert (arguments["out"] == 1).all()
