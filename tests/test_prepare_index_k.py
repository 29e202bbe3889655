from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm

from counting import AGREEMENT, BATCHES, counts_examples, tallies
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.mqa_logits import mqa_logits
from lightning_indexer.kernels.prepare_index_k import prepare_index_k
from lightning_indexer.kernels.prepare_index_q import prepare_index_q
from lightning_indexer.kernels.prepare_ragged_index_k import prepare_ragged_index_k
from lightning_indexer.kernels.read_index_k import read_index_k
from lightning_indexer.kernels.rope_rows import CPU_TILE
from lightning_indexer.kernels.write_index_k import write_index_k
from lightning_indexer.testing import prepare_reference, reference
from lightning_indexer.testing.caches import FLOATS, QUANTISED, Pool, make_pool
from lightning_indexer.testing.compare import assert_matches
from prepared import DTYPES, PLAIN, REGIMES, TURNED, Rotation, draw, in_regime, rotations, same

U = 2.0**-24


@dataclass(frozen=True)
class Case:
    kind: str
    count: int
    head_dim: int
    pages: int
    page_size: int
    rotation: Rotation
    scale_format: str
    eps: float
    bias: bool
    dtype: torch.dtype
    norm_dtype: torch.dtype
    slot_dtype: torch.dtype
    regime: str
    strided: bool
    seed: int

    def pool(self) -> Pool:
        return make_pool(self.kind, self.pages, self.page_size, self.head_dim, self.seed)

    def tensors(self) -> tuple:
        """k, norm_weight, norm_bias, positions, cos, sin."""
        g = torch.Generator().manual_seed(self.seed)
        k = draw((self.count, self.head_dim), self.dtype, self.strided, g)
        weight, bias = (draw((self.head_dim,), self.norm_dtype, self.strided, g) for _ in "wb")
        tables = self.rotation.tables(self.count, self.strided, g)
        return in_regime(k, self.regime, g), weight, bias if self.bias else None, *tables

    def slots(self) -> torch.Tensor:
        """Mostly in the cache, some twice, some −1 or outside."""
        g = torch.Generator().manual_seed(self.seed + 1)
        capacity = self.pages * self.page_size
        shape = (self.count, 2) if self.strided else (self.count,)
        slots = torch.randint(-2, capacity + 2, shape, generator=g, dtype=self.slot_dtype)
        return slots[:, 1] if self.strided else slots

    def options(self) -> dict:
        return self.rotation.options() | {"eps": self.eps}

    def cache_options(self) -> dict:
        return {"page_size": self.page_size, "scale_format": self.scale_format}


def cases(kinds: tuple[str, ...], **fixed: object) -> st.SearchStrategy[Case]:
    draws = {
        "kind": st.sampled_from(kinds),
        "count": st.integers(1, 9),
        "pages": st.integers(1, 3),
        "page_size": st.sampled_from([1, 4, 8]),
        "scale_format": st.sampled_from(["fp32", "ue8m0"]),
        "eps": st.sampled_from([1e-6, 1e-5, 0.5]),
        "bias": st.booleans(),
        "dtype": st.sampled_from(DTYPES),
        "norm_dtype": st.sampled_from(DTYPES),
        "slot_dtype": st.sampled_from([torch.int32, torch.int64]),
        "regime": st.sampled_from(REGIMES),
        "strided": st.booleans(),
        "seed": st.integers(0, 2**31),
    } | {name: st.just(value) for name, value in fixed.items()}
    dims = st.sampled_from([4, 12, 16, 32])
    return dims.flatmap(
        lambda d: st.builds(Case, head_dim=st.just(d), rotation=rotations(d), **draws)
    )


@given(case=cases(QUANTISED + FLOATS))
@counts_examples("prepare_index_k")
@tallies(AGREEMENT, "prepare_index_k")
def test_every_byte_follows_from_the_definition_and_nothing_else_changes(case: Case) -> None:
    pool, tensors, slots = case.pool(), case.tensors(), case.slots()
    keys = prepare_reference.prepare_index_k(*tensors, **case.options(), dtype=torch.float32)
    expected = pool.clone()
    expected.cache.copy_(reference.write_index_k(pool.cache, keys, slots, **case.cache_options()))
    prepare_index_k(*tensors, pool.cache, slots, **case.options(), **case.cache_options())
    assert same(pool.backing, expected.backing)


@given(case=cases(QUANTISED))
@counts_examples("prepare_ragged_index_k")
def test_ragged_keys_are_those_that_a_cache_would_hold(case: Case) -> None:
    tensors = case.tensors()
    keys, scales = prepare_ragged_index_k(
        *tensors, **case.options(), scale_format=case.scale_format
    )
    cache = torch.zeros(1, case.count, case.head_dim + 4, dtype=torch.uint8)
    options = case.options() | {"page_size": case.count, "scale_format": case.scale_format}
    prepare_index_k(*tensors, cache, torch.arange(case.count), **options)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([case.count])
    values, stored = read_index_k(cache, table, length, page_size=case.count)
    assert torch.equal(keys.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales, stored)


@given(case=cases(FLOATS, dtype=torch.float32, norm_dtype=torch.float32))
@counts_examples("prepare_ragged_index_k")
@tallies(AGREEMENT, "prepare_ragged_index_k")
def test_float_keys_are_as_near_to_float64_as_rounding_allows(case: Case) -> None:
    case = replace(case, regime="normal" if case.regime == "special" else case.regime)
    tensors, options = case.tensors(), case.options()
    keys, scales = prepare_ragged_index_k(*tensors, **options, scale_format=None)
    assert scales is None
    exact = prepare_reference.prepare_index_k(*tensors, **options)
    assert_matches(keys, exact, key_bound(case, *tensors).nan_to_num(nan=1.0))


def key_bound(case: Case, k, weight, bias, positions, cos, sin) -> torch.Tensor:
    """Error of keys [n, D]: of the mean, the deviation, the norm, the rotation, the transform."""
    x, width = k.double(), case.head_dim
    terms = width.bit_length() + 2  # sum of D by pairs, and a division
    centered = x - x.mean(1, keepdim=True)
    e_centered = (terms * x.abs().mean(1, keepdim=True) + centered.abs()) * U
    variance = centered.square().mean(1, keepdim=True)
    e_variance = (2 * centered.abs() * e_centered + e_centered.square()).mean(1, keepdim=True)
    e_variance = e_variance + (terms + 2) * U * variance
    deviation = (variance + case.eps).sqrt()
    e_factor = e_variance / (2 * (variance + case.eps)) + 3 * U  # relative, as are roundings
    size = centered.abs() / deviation
    error = e_centered / deviation + size * (e_factor + 2 * U)
    size, error = size * weight.abs(), error * weight.abs()
    if bias is not None:
        size = size + bias.abs()
    error = error + U * size
    if case.rotation.half:
        turn = (cos.abs() + sin.abs()).amax().double().clamp(min=1.0) if cos.numel() else 1.0
        size, error = (t.amax(1, keepdim=True).expand_as(x) * turn for t in (size, error))
        error = error + 2 * U * size
    if case.rotation.hadamard:
        error = (error + (width.bit_length() + 1) * U * size).sum(1, keepdim=True) * width**-0.5
    return 1.02 * error.expand_as(x) + 2.0**-140


def example(kind: str = "nominal 4-D", rotation: Rotation = PLAIN, **changes: object) -> Case:
    case = Case(
        *(kind, 9, 16, 2, 4, rotation, "ue8m0", 1e-6, True, torch.bfloat16, torch.float32),
        *(torch.int64, "normal"),
        strided=False,
        seed=3,
    )
    return replace(case, **changes)


@pytest.mark.parametrize("kind", ["nominal 4-D", "float32 permuted"])
@pytest.mark.parametrize("rotation", [PLAIN, TURNED])
def test_writes_what_write_index_k_makes_of_the_prepared_keys(
    kind: str, rotation: Rotation
) -> None:
    # Many programs, repeated slots: of equal slots the last one wins whole.
    case = example(kind, rotation, count=300)
    pool, expected, tensors, slots = case.pool(), case.pool(), case.tensors(), case.slots()
    floats = tensors[0].float(), *tensors[1:]
    keys, _ = prepare_ragged_index_k(*floats, **case.options(), scale_format=None)
    write_index_k(expected.cache, keys, slots, **case.cache_options())
    prepare_index_k(*tensors, pool.cache, slots, **case.options(), **case.cache_options())
    assert torch.equal(pool.backing, expected.backing)


def test_norm_agrees_with_the_layers() -> None:
    # torch's layer norm, within both sides' rounding: mean 3 and deviation 2 cost few digits.
    g = torch.Generator().manual_seed(0)
    k, weight, bias = 3 + 2 * torch.randn(40, 128, generator=g), *torch.randn(2, 128, generator=g)
    tables = torch.ones(40, 0), torch.ones(40, 0)
    options = {"eps": 1e-6, "rope_style": "half_split", "scale_format": None}
    keys, _ = prepare_ragged_index_k(k, weight, bias, None, *tables, **options)
    expected = layer_norm(k.double(), (128,), weight.double(), bias.double(), eps=1e-6)
    assert_matches(keys, expected, 2.0**-19)


def test_constant_key_is_the_bias() -> None:
    bias = torch.linspace(-1, 1, 16)
    tables = torch.ones(2, 0), torch.ones(2, 0)
    keys, _ = prepare_ragged_index_k(
        *(torch.full((2, 16), 5.0), torch.ones(16), bias, None, *tables),
        **{"eps": 1e-6, "rope_style": "half_split", "scale_format": None},
    )
    assert torch.equal(keys, bias.expand(2, 16))


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_transform_on_both_sides_keeps_scores(style: str) -> None:
    case = example(rotation=replace(PLAIN, rope_style=style), dtype=torch.float32)
    k, *rest = case.tensors()
    q, weights = torch.randn(2, 9, 3, 16, generator=torch.Generator().manual_seed(1))[0], None
    weights = torch.rand(9, 3, generator=torch.Generator().manual_seed(2))
    positions, (cos, sin) = torch.arange(9), rest[3:]
    window = torch.zeros(9, dtype=torch.int32), torch.full((9,), 9, dtype=torch.int32)

    def scores(hadamard: bool) -> torch.Tensor:
        options = {"rope_style": style, "hadamard": hadamard, "scale_format": None}
        x, w = prepare_index_q(q, weights, positions, cos, sin, **options)
        keys, _ = prepare_ragged_index_k(k, *rest[:2], positions, cos, sin, eps=1e-6, **options)
        return mqa_logits(x, keys, w, *window)

    plain = scores(False)
    assert plain.abs().amax() > 0.1
    assert_matches(scores(True), plain.double(), 2.0**-18 * float(plain.abs().amax()))


@pytest.mark.parametrize("position", [-1, 12, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("hadamard", [False, True])
def test_position_outside_the_tables_writes_a_key_that_scores_nan(
    position: int, hadamard: bool
) -> None:
    case = example(rotation=replace(PLAIN, hadamard=hadamard), count=3)
    k, weight, bias, _, cos, sin = case.tensors()
    positions = torch.tensor([2, position, 3])
    keys, scale = prepare_ragged_index_k(k, weight, bias, positions, cos, sin, **case.options())
    window = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    q = torch.ones(1, 2, 16).to(torch.float8_e4m3fn)
    scores = mqa_logits(q, keys, torch.ones(1, 2), *window, k_scale=scale)
    assert scores.isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("bad", [{"slots": -2}, {"slots": 8}, {"positions": 12}])
def test_check_mode_rejects_bad_contents_before_writing(
    monkeypatch: pytest.MonkeyPatch, bad: dict[str, int]
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    case = example(count=3)
    (k, weight, bias, _, cos, sin), pool, options = case.tensors(), case.pool(), case.options()
    options |= case.cache_options()
    positions, slots = torch.tensor([1, 2, 11]), torch.tensor([3, -1, 7])
    before = pool.clone()
    {"slots": slots, "positions": positions}[next(iter(bad))][2] = next(iter(bad.values()))
    with pytest.raises(ValueError, match=next(iter(bad))):
        prepare_index_k(k, weight, bias, positions, cos, sin, pool.cache, slots, **options)
    assert torch.equal(pool.backing, before.backing)
    # a row that is not written may hold any position
    positions, slots = torch.tensor([1, 99, 11]), torch.tensor([3, -1, 7])
    prepare_index_k(k, weight, bias, positions, cos, sin, pool.cache, slots, **options)
    assert not torch.equal(pool.backing, before.backing)


@pytest.mark.parametrize("count, pages", [(0, 2), (3, 0)])
def test_no_keys_or_no_pages_write_nothing(count: int, pages: int) -> None:
    case = example(count=count, pages=pages)
    pool, slots = case.pool(), torch.zeros(count).int()
    before = pool.clone()
    options = case.options() | case.cache_options()
    prepare_index_k(*case.tensors(), pool.cache, slots, **options)
    assert torch.equal(pool.backing, before.backing)
    if not count:
        keys, scales = prepare_ragged_index_k(*case.tensors(), **case.options())
        assert keys.shape == (0, 16) and scales.shape == (0,)


@pytest.mark.parametrize("rotation", [PLAIN, TURNED])
@tallies(BATCHES, "prepare_ragged_index_k")
def test_bits_of_a_key_do_not_depend_on_the_batch(rotation: Rotation) -> None:
    # more keys than a program takes, or the CPU prepares at a time
    count = 20 if INTERPRET else CPU_TILE // 128 + 3
    case = example(rotation=rotation, count=count, head_dim=128, dtype=torch.float32)
    k, weight, bias, positions, cos, sin = case.tensors()
    options = case.options() | {"scale_format": None}
    whole, _ = prepare_ragged_index_k(k, weight, bias, positions, cos, sin, **options)
    for i in (0, 7, 8, count - 4, count - 3, count - 1):
        one = slice(i, i + 1)
        alone, _ = prepare_ragged_index_k(k[one], weight, bias, positions[one], cos, sin, **options)
        assert same(alone[0], whole[i])


@pytest.mark.parametrize("kind", ["one layer of a pool", "bfloat16"])
def test_ops_pass_opcheck(kind: str) -> None:
    case = example(kind, TURNED)
    ops, flags = torch.ops.lightning_indexer, (1e-6, True, True, True)
    cache, tensors = case.pool().cache, case.tensors()
    torch.library.opcheck(
        ops.prepare_index_k.default, (cache, *tensors, case.slots(), *flags, 4, False)
    )
    out = [torch.zeros(9, 16, dtype=torch.uint8), torch.zeros(9)]
    out = out if kind != "bfloat16" else [torch.zeros(9, 16, dtype=torch.bfloat16)]
    no_bias = *tensors[:2], None, *tensors[3:]
    torch.library.opcheck(
        ops.prepare_ragged_index_k.default, (*no_bias, *flags, False), {"out": out}
    )


def test_compiles_without_graph_breaks() -> None:
    case = example(rotation=TURNED)
    pool, expected, options = case.pool(), case.pool(), case.options() | case.cache_options()
    prepare_index_k(*case.tensors(), expected.cache, case.slots(), **options)
    compiled = torch.compile(prepare_index_k, fullgraph=True, backend="aot_eager")
    compiled(*case.tensors(), pool.cache, case.slots(), **options)
    assert torch.equal(pool.backing, expected.backing)
