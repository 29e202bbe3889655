"""Public reports of wrong devices, streams and platforms; each names its source.

What needs a GPU, or two, says so; the rest tells as much as a CPU can.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_indexer as li
from fault_cases import OPS
from fault_tools import Arguments
from lightning_indexer.kernels import backend
from lightning_indexer.kernels.backend import Target
from lightning_indexer.offline.case import CompileCase
from lightning_indexer.offline.compile import all_cases
from lightning_indexer.testing import reference
from lightning_indexer.testing.compare import assert_matches
from scoring import BF16, FP8, FP16, FP32, score_bound

ROOT = Path(__file__).resolve().parents[1]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
KIB = 1024
#: GPUs that give a program 99 KiB of shared memory; 12.0 alone is a target.
SMALL = (86, 89, 120, 121)


def _arguments(op: str, device: str) -> Arguments:
    """Arguments of an op in whole numbers: no sum rounds, on any device."""
    return {name: _moved(value, device) for name, value in OPS[op].valid().items()}


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(x, device) for x in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        value = (2 * value.float()).round().to(value.dtype)
    return value.to(device)


def _outcome(op: str, arguments: Arguments) -> list[torch.Tensor]:
    """What the op returns and what it has written, on their devices."""
    returned = OPS[op].call(**arguments)
    tensors = [*(returned if isinstance(returned, tuple) else [returned]), *arguments.values()]
    return [x for x in tensors if isinstance(x, torch.Tensor)]


def _assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(*((x.float() if x.dtype == FP8 else x).cpu() for x in (a, b)))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_every_op_gives_on_a_gpu_what_it_gives_on_a_cpu(op: str) -> None:
    # vllm-project/vllm#47164: a launch that one generation of GPUs has, tried on another
    got = _outcome(op, _arguments(op, "cuda"))
    assert all(x.is_cuda for x in got)
    _assert_same(got, _outcome(op, _arguments(op, "cpu")))


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("current, other", [(0, 1), (1, 0)])
@pytest.mark.parametrize("op", OPS)
def test_every_op_runs_where_its_tensors_are(op: str, current: int, other: int) -> None:
    # deepseek-ai/DeepSelect#3 and linkedin/Liger-Kernel#1303 (launched on the current device),
    # deepseek-ai/FlashMLA#158 (asked the current device for its multiprocessors)
    with torch.cuda.device(current):
        got = _outcome(op, _arguments(op, f"cuda:{other}"))
        assert torch.cuda.current_device() == current
    assert all(x.device == torch.device("cuda", other) for x in got)
    _assert_same(got, _outcome(op, _arguments(op, "cpu")))


@pytest.mark.gpu
@two_gpus
def test_tensors_of_two_gpus_are_refused() -> None:
    # deepseek-ai/DeepSelect#3: auxiliary tensors on another device were accepted.
    logits, ends = torch.rand(1, 256, device="cuda:1"), torch.tensor([256], device="cuda:0")
    with pytest.raises(ValueError, match=r"row_ends.*cuda:1.*cuda:0"):
        li.topk_indices(logits, 8, None, ends)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_every_op_runs_on_the_current_stream(op: str) -> None:
    # deepseek-ai/DeepSelect#3: launched on a stream that did not wait for the inputs
    arguments, ready = _arguments(op, "cuda"), _arguments(op, "cuda")
    _outcome(op, _arguments(op, "cuda"))  # compiles
    tensors = [(a, ready[n]) for n, a in arguments.items() if isinstance(a, torch.Tensor)]
    for late, _ in tensors:
        late.view(torch.uint8).zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        for late, value in tensors:
            late.view(torch.uint8).copy_(value.view(torch.uint8))
        got = _outcome(op, arguments)
    stream.synchronize()
    _assert_same(got, _outcome(op, _arguments(op, "cpu")))


@pytest.fixture
def two_kinds_of_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Device 0 an H200 and current, device 1 a smaller and older one; no GPU is needed."""

    class Properties:
        gcnArchName = ""

        def __init__(self, count: int) -> None:
            self.multi_processor_count = count

    def index_of(device: Any) -> int:
        return torch.device("cuda", device).index if isinstance(device, int) else device.index

    caches = backend._device_target, backend._device_multiprocessors
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: Properties((132, 68)[index_of(i)])
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda i: ((9, 0), (8, 6))[index_of(i)]
    )
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.once
@pytest.mark.usefixtures("two_kinds_of_gpu")
@pytest.mark.parametrize(
    "device, count, target", [("cuda:0", 132, 90), ("cuda:1", 68, 86), ("cuda", 132, 90)]
)
def test_a_device_is_asked_for_itself_whichever_is_current(
    device: str, count: int, target: int
) -> None:
    # deepseek-ai/FlashMLA#158: multiprocessors of GPU 0, whose guard came too late
    for _ in range(2):  # cached by device
        assert backend.multiprocessors(torch.device(device)) == count
        assert backend.target_of(torch.device(device)) == Target("cuda", target)


@pytest.mark.interpreter
@pytest.mark.parametrize("op", OPS)
def test_every_launch_is_under_the_guard_of_a_tensors_device(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # linkedin/Liger-Kernel#1303: no torch.cuda.device around a launch
    from triton.runtime.interpreter import InterpretedFunction

    guards, launches, run = [], [], InterpretedFunction.run

    @contextmanager
    def guard(tensor: torch.Tensor) -> Iterator[None]:
        guards.append(tensor)
        yield
        guards.pop()

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(len(guards))
        return run(self, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_indexer.kernels.") and hasattr(module, "on_device_of"):
            monkeypatch.setattr(module, "on_device_of", guard)
    monkeypatch.setattr(InterpretedFunction, "run", launch)
    OPS[op].call(**OPS[op].valid())
    assert launches
    assert all(launches)


@pytest.mark.once
def test_every_launch_in_the_sources_is_guarded_there_or_by_its_callers() -> None:
    # linkedin/Liger-Kernel#1303, for ops that the table above lacks
    launching: Counter[bool] = Counter()
    unguarded, called_outside = set(), set()
    for path in (Path(li.__file__).parent / "kernels").glob("*.py"):
        for function, call, guarded in _calls(ast.parse(path.read_text())):
            if isinstance(call.func, ast.Subscript):
                launching[guarded] += 1
                unguarded |= set() if guarded else {function}
            elif not guarded:
                called_outside.add(ast.unparse(call.func))
    assert launching[True] > 10  # else this test looks in the wrong place
    assert not unguarded & called_outside


def _calls(
    node: ast.AST, function: str = "", guarded: bool = False
) -> Iterator[tuple[str, ast.Call, bool]]:
    """Calls below `node`: the function each is in, and whether under `with on_device_of(...)`."""
    if isinstance(node, ast.FunctionDef):
        function, guarded = node.name, False
    if isinstance(node, ast.With):
        guarded |= any("on_device_of(" in ast.unparse(item) for item in node.items)
    if isinstance(node, ast.Call):
        yield function, node, guarded
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, function, guarded)


@pytest.mark.once
def test_no_kernel_asks_for_what_one_generation_has() -> None:
    # vllm-project/vllm#47164: clusters of programs, which SM 12.0 launches otherwise or not at all
    words = "num_ctas", "cluster", "descriptor", "warp_specialize", "launch_pdl", "cooperative"
    names = [
        part
        for path in (Path(li.__file__).parent / "kernels").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for part in (getattr(node, "attr", None), getattr(node, "arg", None))
        if isinstance(part, str)
    ]
    assert "num_warps" in names  # else this test looks in the wrong place
    assert not [name for name in names if any(word in name for word in words)]


@pytest.mark.once
@pytest.mark.parametrize("arch", SMALL)
def test_gpus_of_little_shared_memory_get_compiled_kernels_that_fit(arch: int) -> None:
    # flashinfer-ai/flashinfer#5058: 128 KiB asked of GPUs that give a program 99.
    # vllm-project/vllm#47164: a generation was taken for another, which can do more.
    compiled = _compiled_bytes(80) | _compiled_bytes(120)
    problems = []
    for case in all_cases(Target("cuda", arch)):
        needed = compiled.get(_launch(case), "compiled for neither sm_80 nor sm_120")
        if needed not in range(99 * KIB + 1):
            problems.append(f"{case.op} [{case.label}]: {needed}")
    assert not problems, "\n".join(problems)


def _launch(case: CompileCase) -> str:
    """All that a kernel is compiled from, but for the target."""
    options = case.num_warps, case.num_stages, case.max_registers, case.fp_fusion
    constants = dict(case.constexprs)
    if "*u8" not in repr(case.signature):
        constants.pop("NATIVE_FP8", None)  # changes nothing where nothing is fp8
    return repr((case.kernel.fn.__name__, case.signature, constants, options))


@cache
def _compiled_bytes(arch: int) -> dict[str, int]:
    """Shared memory of the kernels of a target, as reported; 0 of what the report lacks.

    test_compiled_figures holds the report to what there is, and to what it needs.
    """
    report = json.loads((ROOT / "bench" / "compiled" / "report.json").read_text())
    rows = {
        (row["op"], row["kernel"], row["case"]): row["shared_bytes"]
        for row in report["rows"]
        if row["target"] == f"sm_{arch}"
    }
    return {
        _launch(case): rows.get((case.op, case.kernel.fn.__name__, case.label), 0)
        for case in all_cases(Target("cuda", arch))
    }


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtypes", [(FP8, FP8), (BF16, BF16), (FP16, FP8), (FP32, FP32)])
def test_largest_scoring_tiles_launch_on_this_gpu(
    dtypes: tuple[torch.dtype, torch.dtype], head_dim: int
) -> None:
    # flashinfer-ai/flashinfer#5058. Triton refuses a kernel that needs more than the GPU has.
    g = torch.Generator().manual_seed(head_dim)
    q = torch.randn(17, 64, head_dim, generator=g).to(dtypes[0])
    k = torch.randn(513, head_dim, generator=g).to(dtypes[1])
    weights, scale = torch.rand(17, 64, generator=g), torch.rand(513, generator=g)
    ends = torch.arange(513 - 17 + 1, 514, dtype=torch.int32)
    inputs = {"q": q, "k": k, "weights": weights, "row_starts": ends * 0, "row_ends": ends}
    k_scale = scale if dtypes[1] == FP8 else None
    moved = {name: x.cuda() for name, x in inputs.items()}
    got = li.mqa_logits(**moved, k_scale=None if k_scale is None else k_scale.cuda())
    # fp8 tensor cores align products before adding them, and keep some 13 bits of each
    bound = score_bound(q, k, weights, k_scale) * (2**11 if dtypes[0] == FP8 else 2)
    assert_matches(got.cpu(), reference.mqa_logits(**inputs, k_scale=k_scale), bound)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 9001, 40_000, 300_000])
def test_every_plan_of_a_selection_launches_on_this_gpu(length: int) -> None:
    # flashinfer-ai/flashinfer#5058, of selections
    logits = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    got = li.topk_indices(logits.cuda(), 2048)
    assert torch.equal(got.cpu(), reference.topk_indices(logits, 2048))
