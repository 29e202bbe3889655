"""Every kernel as it is launched, compiled for every supported GPU: it fits, and spills nothing."""

import pytest

from compiled import compiled_for
from lightning_indexer.offline.case import TARGETS

pytest.importorskip("triton")
pytestmark = pytest.mark.once

#: What one program may allocate, of the smallest GPU of each target.
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spills(target: str) -> None:
    problems = []
    compiled = compiled_for(target)
    for _, kernel in compiled:
        name = f"{kernel.op} [{kernel.label}]"
        expected = kernel.expected_tensor_op
        if kernel.error is not None:
            problems.append(f"{name}: {kernel.error}")
            continue
        if kernel.spill_bytes:
            problems.append(f"{name}: spills {kernel.spill_bytes} bytes")
        if kernel.shared_bytes > SHARED_KIB[target] * 1024:
            problems.append(f"{name}: needs {kernel.shared_bytes} bytes of shared memory")
        if expected is not None and not any(expected in op for op in kernel.tensor_ops):
            problems.append(f"{name}: no {expected} among {list(kernel.tensor_ops)}")
    assert not problems, "\n".join(problems)
    ops = {case.op for case, _ in compiled}
    assert {"mqa_logits", "paged_mqa_logits", "topk_indices", "compact_topk_indices"} <= ops
