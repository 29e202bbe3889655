import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counting import AGREEMENT, BATCHES, POISONED, counts_examples, tallies
from lightning_indexer.indexer.rope import apply_rope, rope_tables
from lightning_indexer.kernels.backend import INTERPRET
from lightning_indexer.kernels.prepare_index_q import prepare_index_q
from lightning_indexer.kernels.rope_rows import CPU_TILE
from lightning_indexer.kernels.select_topk import select_topk
from lightning_indexer.offline.case import TARGETS, CompileCase
from lightning_indexer.offline.compile import _triton_compile
from lightning_indexer.offline.cubin import disassemble
from lightning_indexer.offline.prepare_index_q import cases as compiled_cases
from lightning_indexer.testing import prepare_reference
from lightning_indexer.testing.compare import assert_matches
from prepared import DTYPES, PLAIN, REGIMES, TURNED, Rotation, draw, in_regime, rotations, same

U = 2.0**-24
POISON = 77


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int
    head_dim: int
    rotation: Rotation
    scale_format: str | None
    scale: float | None
    dtype: torch.dtype
    weight_dtype: torch.dtype
    regime: str
    strided: bool
    seed: int

    def tensors(self) -> tuple:
        """q, weights, positions, cos, sin."""
        g = torch.Generator().manual_seed(self.seed)
        q = draw((self.rows, self.heads, self.head_dim), self.dtype, self.strided, g)
        weights = draw((self.rows, self.heads), self.weight_dtype, self.strided, g)
        tables = self.rotation.tables(self.rows, self.strided, g)
        return in_regime(q, self.regime, g), weights, *tables

    def options(self) -> dict:
        formats = {"scale_format": self.scale_format, "scale": self.scale}
        return self.rotation.options() | formats

    def out(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
        """A view to write to, and the poisoned buffers around it."""
        shape = self.rows + 2, self.heads + 2, 2 * self.head_dim + 2
        dtype = torch.uint8 if self.scale_format is not None else self.dtype
        queries = torch.full(shape, POISON, dtype=dtype)
        weights = torch.full(shape[:2], float(POISON))
        view = queries[1:-1, 1:-1, 1:-1:2]
        if dtype == torch.uint8:
            view = view.view(torch.float8_e4m3fn)
        return (view, weights[1:-1, 1:-1]), (queries, weights)


def cases(**fixed: object) -> st.SearchStrategy[Case]:
    draws = {
        "rows": st.integers(1, 4),
        "heads": st.integers(1, 5),
        "scale_format": st.sampled_from(["fp32", "ue8m0", None]),
        "scale": st.sampled_from([None, 1.0, -0.3]),
        "dtype": st.sampled_from(DTYPES),
        "weight_dtype": st.sampled_from(DTYPES),
        "regime": st.sampled_from(REGIMES),
        "strided": st.booleans(),
        "seed": st.integers(0, 2**31),
    } | {name: st.just(value) for name, value in fixed.items()}
    dims = st.sampled_from([1, 2, 7, 12, 16, 32])
    return dims.flatmap(
        lambda d: st.builds(Case, head_dim=st.just(d), rotation=rotations(d), **draws)
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


@given(case=cases())
@counts_examples("prepare_index_q")
@tallies(AGREEMENT, "prepare_index_q")
@tallies(POISONED, "prepare_index_q")
def test_every_bit_follows_from_the_definition(case: Case) -> None:
    tensors = case.tensors()
    out, buffers = case.out()
    returned = prepare_index_q(*tensors, **case.options(), out=out)
    assert returned is out
    x, weights = prepare_reference.prepare_index_q(*tensors, **case.options(), dtype=torch.float32)
    assert same(bits(out[0]), x if case.scale_format is not None else x.to(case.dtype))
    assert same(out[1], weights)
    bits(out[0]).fill_(POISON)
    out[1].fill_(POISON)
    assert all((buffer == POISON).all() for buffer in buffers)


@given(case=cases(scale_format=None, dtype=torch.float32))
@counts_examples("prepare_index_q")
@tallies(AGREEMENT, "prepare_index_q")
def test_floats_are_as_near_to_float64_as_rounding_allows(case: Case) -> None:
    if case.regime == "special":
        case = replace(case, regime="normal")
    tensors, options = case.tensors(), case.options()
    x, weights = prepare_index_q(*tensors, **options)
    exact, exact_weights = prepare_reference.prepare_index_q(*tensors, **options)
    # Two products and a sum err by 2·2⁻²⁴ of what is added, each stage and both factors of the
    # transform by 2⁻²⁴ more. 2⁻¹⁴⁰ is for products below the normal numbers.
    q, _, positions, cos, sin = tensors
    options["hadamard"] = False
    added = [
        prepare_reference.prepare_index_q(
            q.abs(), tensors[1], positions, cos.abs(), sign * sin.abs(), **options
        )[0]
        for sign in (-1, 1)  # of the first of a pair, of the second
    ]
    size, stages = torch.maximum(*added), 0
    if case.rotation.hadamard:
        stages = case.head_dim.bit_length() + 1
        size = size.sum(-1, keepdim=True).expand_as(exact) * case.head_dim**-0.5
    assert_matches(x, exact, (1.01 * (2 + stages) * U * size + 2.0**-140).nan_to_num(nan=1.0))
    assert_matches(weights, exact_weights, 1.01 * 2 * U * exact_weights.abs())


def example(rotation: Rotation = PLAIN, **changes: object) -> Case:
    case = Case(
        *(3, 5, 16, rotation, "ue8m0", None, torch.bfloat16, torch.float32, "normal"),
        strided=False,
        seed=3,
    )
    return replace(case, **changes)


def test_scores_of_folded_queries_are_those_of_the_floats() -> None:
    # Small integers of a fixed maximum are exact in e4m3 with a power-of-two scale: each head's own
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-4, 5, (3, 4, 16), generator=g).float()
    q[:, :, 0] = 448.0
    own_scale = 2.0 ** torch.arange(-6, 6).view(3, 4)
    q *= own_scale[:, :, None]
    weights, tables = torch.rand(3, 4, generator=g), (torch.ones(9, 4), torch.zeros(9, 4))
    rope = {"rope_style": "half_split"}
    positions = torch.tensor([0, 3, 8])
    x, folded = prepare_index_q(q, weights, positions, *tables, **rope, scale_format="ue8m0")
    y, plain = prepare_index_q(q, weights, positions, *tables, **rope, scale_format=None)
    assert torch.equal(x.float() * own_scale[:, :, None], y) and torch.equal(y, q)
    assert torch.equal(folded, plain * own_scale)
    assert_matches(plain, weights.double() * 16**-0.5 * 4**-0.5, 2.0**-23)
    k = torch.randn(20, 16, generator=g).to(torch.float8_e4m3fn)
    window = torch.zeros(3, dtype=torch.int32), torch.full((3,), 20, dtype=torch.int32)
    scale = torch.ones(20)
    kept = select_topk(x, k, folded, *window, 5, k_scale=scale)
    assert torch.equal(select_topk(y, k.float(), plain, *window, 5), kept)


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_rotates_as_the_layer_does(style: str) -> None:
    # Bit for bit: what LightningIndexer.query and head_weights compute in fp32.
    g = torch.Generator().manual_seed(0)
    q, weights = torch.randn(6, 3, 16, generator=g), torch.randn(6, 3, generator=g)
    cos, sin = (t.float() for t in rope_tables(40, 8, 1e4))
    positions = torch.tensor([0, 1, 5, 17, 38, 39])
    x, folded = prepare_index_q(
        q, weights, positions, cos, sin, rope_style=style, scale_format=None
    )
    expected = apply_rope(q, cos[positions][:, None], sin[positions][:, None], style)
    assert torch.equal(x, expected)
    assert torch.equal(folded, weights * (3**-0.5 * 16**-0.5))
    chosen = cos[positions], sin[positions]
    rows = prepare_index_q(q, weights, None, *chosen, rope_style=style, scale_format=None)
    assert torch.equal(rows[0], expected)


def test_transform_is_the_hadamard_matrix() -> None:
    q = torch.eye(16)[:, None].contiguous()
    tables = torch.ones(16, 0), torch.ones(16, 0)
    options = {"rope_style": "half_split", "hadamard": True, "scale_format": None}
    x, _ = prepare_index_q(q, torch.ones(16, 1), None, *tables, **options)
    sign = [[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]
    assert torch.equal(x[:, 0], torch.tensor(sign) / 4)
    again, _ = prepare_index_q(x, torch.ones(16, 1), None, *tables, **options)
    assert torch.equal(again, q)  # orthonormal and symmetric


@pytest.mark.parametrize("head_dim", [2, 32])
def test_transform_multiplies_once_after_all_additions(head_dim: int) -> None:
    # D^-0.5 is rounded here: multiplied in before, it would change bits.
    rotation = replace(TURNED, half=head_dim // 2)
    case = example(rotation, head_dim=head_dim, dtype=torch.float32, scale_format=None)
    x, _ = prepare_index_q(*case.tensors(), **case.options())
    expected, _ = prepare_reference.prepare_index_q(
        *case.tensors(), **case.options(), dtype=torch.float32
    )
    assert same(x, expected)


@pytest.mark.parametrize("position", [-1, 12, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("hadamard", [False, True])
def test_position_outside_the_tables_selects_nothing(position: int, hadamard: bool) -> None:
    case = example(replace(PLAIN, hadamard=hadamard))
    q, weights, _, cos, sin = case.tensors()
    positions = torch.tensor([2, position, 3])
    x, folded = prepare_index_q(q, weights, positions, cos, sin, **case.options())
    k, scale = torch.ones(6, 16).to(torch.float8_e4m3fn), torch.ones(6)
    window = torch.zeros(3, dtype=torch.int32), torch.full((3,), 6, dtype=torch.int32)
    kept = select_topk(x, k, folded, *window, 2, k_scale=scale)
    assert kept[1].tolist() == [-1, -1] and (kept[[0, 2]] >= 0).all()
    rotary = slice(None) if hadamard else slice(8)
    assert (bits(x)[1, :, rotary] == 0x7F).all()
    assert not (bits(x)[[0, 2]] == 0x7F).all(-1).any()


def test_check_mode_rejects_positions_outside_the_tables_before_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_INDEXER_CHECK", "1")
    case = example()
    q, weights, _, cos, sin = case.tensors()
    for bad in (-2, 12):
        out, buffers = case.out()
        with pytest.raises(ValueError, match=r"positions must be in \[-1, 12\)"):
            positions = torch.tensor([0, bad, 11])
            prepare_index_q(q, weights, positions, cos, sin, **case.options(), out=out)
        assert all((buffer == POISON).all() for buffer in buffers)
    prepare_index_q(q, weights, torch.tensor([0, -1, 11]), cos, sin, **case.options())


@pytest.mark.parametrize("rotation", [PLAIN, TURNED])
@tallies(BATCHES, "prepare_index_q")
def test_bits_of_a_row_do_not_depend_on_the_batch(rotation: Rotation) -> None:
    # more heads than a program takes, more rows than the CPU prepares at a time
    rows = 4 if INTERPRET else CPU_TILE // (20 * 128) + 3
    case = example(rotation, rows=rows, heads=20, head_dim=128)
    q, weights, positions, cos, sin = case.tensors()
    whole = prepare_index_q(q, weights, positions, cos, sin, **case.options())
    for t in (0, rows - 4, rows - 3, rows - 1):
        one = slice(t, t + 1)
        alone = prepare_index_q(q[one], weights[one], positions[one], cos, sin, **case.options())
        assert same(bits(alone[0])[0], bits(whole[0])[t]) and same(alone[1][0], whole[1][t])


def test_no_rows_give_no_queries() -> None:
    x, weights = prepare_index_q(*example(rows=0).tensors(), **example().options())
    assert x.shape == (0, 5, 16) and weights.shape == (0, 5)


@pytest.mark.parametrize("rotation", [TURNED, replace(PLAIN, positions="none")])
def test_op_passes_opcheck(rotation: Rotation) -> None:
    case = example(rotation)
    out = [torch.zeros(3, 5, 16, dtype=torch.uint8), torch.zeros(3, 5)]
    op = torch.ops.lightning_indexer.prepare_index_q.default
    flags = (True, True, rotation.hadamard, False, 0.25)
    torch.library.opcheck(op, (*case.tensors(), *flags), {"out": out})


def test_compiles_without_graph_breaks() -> None:
    case = example(TURNED)
    expected = prepare_index_q(*case.tensors(), **case.options())
    compiled = torch.compile(prepare_index_q, fullgraph=True, backend="aot_eager")
    got = compiled(*case.tensors(), **case.options())
    assert all(same(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


@pytest.mark.once
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiled_rotation_holds_no_fused_multiply_add(target: str) -> None:
    # It would round once where the definition rounds twice.
    pytest.importorskip("triton")
    case = next(c for c in compiled_cases(TARGETS[target]) if c.label.startswith("bf16→bf16"))

    def fused(case: CompileCase) -> int:
        compiled, _ = _triton_compile(case, TARGETS[target])
        if "cubin" in compiled.asm:
            return sum(i.name.startswith("FFMA") for i in disassemble(compiled.asm["cubin"]))
        return len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mac|mad)_f32", compiled.asm["amdgcn"]))

    assert fused(case) == 0
    assert fused(replace(case, fp_fusion=True)) > 0
