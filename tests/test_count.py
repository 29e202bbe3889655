"""The rule by which machine instructions are counted, on toy kernels and hand-made code."""

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("triton")

import toy_kernels
from lightning_indexer.offline.assembly import Line, parse_amdgcn, parse_sass
from lightning_indexer.offline.attribution import attribute
from lightning_indexer.offline.case import TARGETS, CompileCase, Work
from lightning_indexer.offline.compile import CompiledKernel, compile_case
from lightning_indexer.offline.count import Count, count
from lightning_indexer.offline.flow import control_flow
from lightning_indexer.offline.places import loop_place, skipped_place
from lightning_indexer.offline.source import scopes

pytestmark = pytest.mark.once

BLOCK = 1024  # 8 elements a thread on NVIDIA GPUs, 4 on AMD's


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory):
    """Source lines in the user's cache may be those of another checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def work(trips, skipped=()):
    return Work("element", {}, units=BLOCK, programs=1, bytes=8, trips=trips, skipped=skipped)


def compiled(kernel, target, *works) -> CompiledKernel:
    case = CompileCase(
        "toy",
        kernel.__name__,
        kernel,
        {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"},
        {"BLOCK": BLOCK},
        divisible=("x_ptr", "out_ptr", "n"),
        dtype="fp32",
        work=works,
    )
    return compile_case(case, target)


def counts(kernel, target, *works) -> tuple[Count, ...]:
    result = compiled(kernel, target, *works)
    assert result.error is None and result.uncounted is None
    return result.counts


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("_sum_kernel", target) for target in TARGETS),
        ("_fixed_kernel", "sm_90"),  # on gfx942 it counts too high, as documented
        ("_fixed_kernel", "sm_120"),
    ],
)
def test_a_loop_weighs_its_trips_unrolled_or_not(name, target):
    kernel = getattr(toy_kernels, name)
    trips = (0, 64, 128, 256)
    found = counts(kernel, target, *(work({name: n}) for n in trips))
    totals = [count.instructions for count in found]
    first, second, third = (b - a for a, b in pairwise(totals))
    assert second == pytest.approx(first, rel=0.05)
    assert third == pytest.approx(2 * second, rel=0.01)
    iteration = second / 64
    elements = BLOCK // 256 if target == "gfx942" else BLOCK // 128
    # an addition an element, some loads, and a share of the loop's own instructions
    assert elements < iteration < 4 * elements
    assert all(count.in_loops <= count.instructions for count in found)
    assert found[0].in_loops == 0


def test_trips_that_unrolling_does_not_divide_run_in_the_remainder():
    works = [work({"_sum_kernel": trips}) for trips in range(4, 9)]
    found = counts(toy_kernels._sum_kernel, "sm_90", *works)
    for one, more in pairwise(found):
        assert 8 < more.instructions - one.instructions < 40


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_inner_trips_are_multiplied_by_outer_ones(target):
    name = "_nested_kernel"
    trips = [(0, 0), (8, 0), (8, 64), (16, 64), (16, 128)]
    found = counts(
        toy_kernels._nested_kernel,
        target,
        *(work({f"{name}#1": outer, f"{name}#2": inner}) for outer, inner in trips),
    )
    nothing, outer, both, twice_outer, twice_both = (count.instructions for count in found)
    assert outer > nothing
    inner = (both - outer) / (8 * 64)
    assert inner >= 1
    assert twice_outer - nothing == pytest.approx(2 * (both - nothing))
    assert twice_both - twice_outer == pytest.approx(inner * 16 * 64, rel=0.05)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_a_skipped_branch_is_reported_apart(target):
    trips = {"_scaled_sum@1": 64, "_scaled_sum@2": 640}
    both, first, second = counts(
        toy_kernels._branch_kernel,
        target,
        work(trips),
        work(trips, skipped=("_branch_kernel:else#1",)),
        work({"_scaled_sum": 640}, skipped=("_scaled_sum@1",)),
    )
    assert both.fallback == 0
    assert first.fallback > 0 and second.fallback > 0
    assert 5 * first.in_loops < second.in_loops < 20 * first.in_loops
    assert both.in_loops == pytest.approx(first.in_loops + second.in_loops, rel=0.01)


@pytest.mark.parametrize(
    ("trips", "skipped", "says"),
    [
        ({}, (), "no trips for the loop _nested_kernel#1 at toy_kernels.py"),
        ({"_nested_kernel#1": 1}, (), "no trips for the loop _nested_kernel#2 at toy_kernels.py"),
        ({"_nested_kernel": 1}, (), "has 2 loops, say which"),
        ({"_nested_kernel#3": 1}, (), "has 2 loops"),
        ({"_nested#1": 1}, (), "calls no function _nested"),
        ({"_nested_kernel#1": 1}, ("_nested_kernel:then#1",), "has 0 if statements"),
        ({"_nested_kernel#1": 1}, ("_nested_kernel#2",), "names a loop"),
        ({"_nested_kernel:then#1": 1}, (), "names a branch"),
        ({"not a name": 1}, (), "is no place like"),
        ({}, ("_nested_kernel",), "nothing is left of the kernel"),
    ],
)
def test_a_case_cannot_leave_a_loop_out(trips, skipped, says):
    result = compiled(toy_kernels._nested_kernel, "sm_90", work(trips, skipped))
    assert result.error is None and result.registers > 0
    assert says in str(result.uncounted)


def test_an_error_of_the_compiler_is_returned():
    case = CompileCase("toy", "", toy_kernels._sum_kernel, {"x_ptr": "*fp32"}, {}, work=())
    assert "KeyError" in str(compile_case(case, "sm_90").error)


SASS = """
_toy:
.text._toy:
	//## File "/a/kernel.py", line 7 inlined at "/a/kernel.py", line 20
	//## File "/a/kernel.py", line 20
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   NOP ;
.L_x_1:
	//## File "/a/kernel.py", line 21
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0030*/                   FADD R1, R2, R3 ;
        /*0040*/                   BRA.U UP0, `(.L_x_2) ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/               @P0 EXIT ;
        /*0068*/               @P0 CALL.REL.NOINC `(.L_x_4) ;
        /*0070*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_u64) ;
        /*0080*/                   BRX R2 -0x90 (*"BRANCH_TARGETS .L_x_3,.L_x_4"*) ;
.L_x_3:
        /*0090*/                   BRA.DIV UR4, `(.L_x_5) ;
.L_x_4:
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   BRA `(.L_x_5);
$__internal_0_$__cuda_sm20_div_u64:
        /*00c0*/                   MUFU.RCP R1, R2 ;
        /*00d0*/                   RET.REL.NODEC R8 `(_toy) ;
"""


def test_sass_gives_instructions_lines_and_flow():
    parsed = [i for i in parse_sass(SASS) if i.name]
    assert [i.name for i in parsed][:3] == ["LDC", "LDG.E.128", "FADD"]
    assert parsed[0].chain == (Line("/a/kernel.py", 20), Line("/a/kernel.py", 7))
    assert parsed[1].chain == (Line("/a/kernel.py", 21),)
    flows = {i.name: i.flow for i in parsed}
    assert [i.flow for i in parsed if "CALL" in i.name] == ["branch", "call"]
    assert flows["BRA.U"] == "branch" and flows["BRX"] == "jump" and flows["BRA.DIV"] == "next"
    assert next(i for i in parsed if i.name == "BRX").targets == (".L_x_3", ".L_x_4")


def test_natural_loops_nest_and_own_what_inner_ones_do_not():
    flow = control_flow(parse_sass(SASS))
    outer, inner = flow.loops
    assert inner.parent is outer and outer.parent is None
    names = [i.name for block in outer.own for i in flow.blocks[block].instructions]
    assert names == ["LDG.E.128", "BRA"]
    assert inner.blocks == inner.own
    assert flow.called == {"$__internal_0_$__cuda_sm20_div_u64": 2}
    unreachable = {"BRA", "MUFU.RCP"}  # for diverged warps, and the called routine
    last = [flow.blocks[block].instructions[-1].name for block in flow.reachable]
    assert not unreachable & {last[-1]}


AMDGCN = """
	.file	1 "/a" "kernel.py"
	.file	2 "/b/c" "helper.py"
	.loc	1 20 0 prologue_end             ; kernel.py:20:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_nop 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	.loc	2 358 12 ; helper.py:358:12 @[ kernel.py:34:20 @[ kernel.py:21:25 ] ]
	v_add_u32_e32 v11, v11, v12
	.loc	1 0 0 is_stmt 0                 ; :0:0
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	s_endpgm
"""


def test_amdgcn_gives_instructions_lines_and_flow():
    parsed = [i for i in parse_amdgcn(AMDGCN) if i.name]
    assert [i.name.split("_")[0] for i in parsed] == ["s", "v", "s", "s"]
    assert parsed[1].chain == (
        Line("/a/kernel.py", 21),
        Line("/a/kernel.py", 34),
        Line("/b/c/helper.py", 358),
    )
    assert parsed[2].chain == ()
    (loop,) = control_flow(parse_amdgcn(AMDGCN)).loops
    assert (
        sum(len(control_flow(parse_amdgcn(AMDGCN)).blocks[b].instructions) for b in loop.own) == 2
    )


JOIN = """
	//## File "{file}", line {condition}
        /*0000*/              @P0 BRA `(.L_x_1) ;
	//## File "{file}", line {then}
        /*0010*/                   MOV R0, R1 ;
        /*0020*/                   BRA `(.L_x_2) ;
.L_x_1:
	//## File "{file}", line {other}
        /*0030*/                   MOV R0, R1 ;
        /*0040*/                   MOV R0, R1 ;
.L_x_2:
        /*0050*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("branch", "expected"), [("else", Count(4.0, 0.0, 2)), ("then", Count(4.0, 0.0, 2))]
)
def test_a_join_is_executed_whichever_side_its_line_is_on(branch, expected):
    lines = {
        "condition": line_of("if n > 100").number,
        "then": line_of("tl.store(out_ptr + offs, acc)", nth=2).number,
        "other": line_of("acc - 1.0").number,
    }
    code = parse_sass(JOIN.format(file=toy_kernels.__file__, **lines))
    assert count(attribute(code), work({}, skipped=(f"_branch_kernel:{branch}#1",))) == expected


MERGED = """
	//## File "{file}", line {outer}
        /*0000*/                   MOV R0, R1 ;
.L_x_1:
	//## File "{file}", line {inner}
        /*0010*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0020*/                   FADD R1, R2, R4 ;
        /*0030*/                   FADD R1, R2, R4 ;
	//## File "{file}", line {outer}
        /*0040*/                   STG.E desc[UR4][R2.64], R1 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_a_loop_of_one_trip_dissolves_in_the_loop_around_it():
    lines = {
        "inner": line_of("acc += tl.load(x_ptr + column * BLOCK + offs)").number,
        "outer": line_of("tl.store(out_ptr + row * BLOCK + offs, acc)").number,
    }
    code = parse_sass(MERGED.format(file=toy_kernels.__file__, **lines))
    trips = {"_nested_kernel#1": 8, "_nested_kernel#2": 1}
    assert count(attribute(code), work(trips)) == Count(2 + 8 * 5, 8 * 5, 0)


POLL = """
	//## File "{file}", line {line}
        /*0000*/                   MOV R0, R1 ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11+0x8000], R20 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
"""
WATERFALL = """
	.file	1 "{file}"
	.loc	1 {line} 12 ; toy_kernels.py:{line}:12
	v_mov_b32 v8, v0
.LBB0_1:
	v_readfirstlane_b32 s8, v0
	buffer_load_dwordx4 v[4:7], v8, s[8:11], 0 offen
	s_cbranch_execnz .LBB0_1
; %bb.2:
	s_endpgm
"""


@pytest.mark.parametrize(("parse", "text"), [(parse_sass, POLL), (parse_amdgcn, WATERFALL)])
def test_loops_that_compilers_made_count_once(parse, text):
    line = line_of("acc += tl.load(x_ptr + column * BLOCK + offs)")
    code = parse(text.format(file=line.file, line=line.number))
    assert count(attribute(code), work({})) == Count(
        len([i for i in code if i.name]), 2.0 + ("v_" in text), 0
    )


def line_of(text: str, nth: int = 0) -> Line:
    lines = Path(toy_kernels.__file__).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if text in line]
    return Line(toy_kernels.__file__, found[nth])


def test_a_place_is_found_through_inlined_functions():
    call = line_of("_scaled_sum(x_ptr + 16")
    path = scopes((call, line_of("* scale")))
    for name in ("_scaled_sum", "_scaled_sum#1", "_scaled_sum@2", "_branch_kernel/_scaled_sum@2#1"):
        assert loop_place(name).ends(path), name
    for name in ("_scaled_sum@1", "_scaled_sum#2", "_scaled_sum/_scaled_sum", "_branch_kernel"):
        assert not loop_place(name).ends(path), name
    for name in ("_branch_kernel:else#1", "_scaled_sum@2", "_branch_kernel", "_scaled_sum"):
        assert skipped_place(name).holds(path), name
    for name in ("_branch_kernel:then#1", "_scaled_sum@1"):
        assert not skipped_place(name).holds(path), name


def test_the_name_that_says_most_wins():
    trips = {"_scaled_sum": 1, "_scaled_sum@2": 64}
    (by_name,) = counts(toy_kernels._branch_kernel, "sm_90", work(trips))
    spelt_out = {"_branch_kernel/_scaled_sum@1": 1, "_branch_kernel/_scaled_sum@2": 64}
    (by_path,) = counts(toy_kernels._branch_kernel, "sm_90", work(spelt_out))
    assert by_name == by_path
