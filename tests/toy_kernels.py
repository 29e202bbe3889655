"""Small jitted kernels whose loops and branches the counting rule is tried on."""

import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """One loop."""
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(n):
        acc += tl.load(x_ptr + i * BLOCK + offs)
    tl.store(out_ptr + offs, acc)


@triton.jit
def _fixed_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """One loop whose number of iterations compilers know."""
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(64):
        acc += tl.load(x_ptr + i * n + offs)
    tl.store(out_ptr + offs, acc)


@triton.jit
def _nested_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """A loop in a loop; the outer one has work of its own."""
    offs = tl.arange(0, BLOCK)
    row = tl.full((), 0, tl.int32)
    while row < n:
        acc = tl.zeros((BLOCK,), tl.float32)
        column = tl.full((), 0, tl.int32)
        while column < n:
            acc += tl.load(x_ptr + column * BLOCK + offs)
            column += 1
        tl.store(out_ptr + row * BLOCK + offs, acc)
        row += 1


@triton.jit
def _branch_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The same helper in two branches, of which a launch takes one."""
    offs = tl.arange(0, BLOCK)
    if n > 100:
        acc = _scaled_sum(x_ptr, offs, n, 1.5, BLOCK)
        tl.store(out_ptr + offs, acc)
    else:
        acc = _scaled_sum(x_ptr + 16, offs, n * 2, 2.5, BLOCK)
        tl.store(out_ptr + offs, acc - 1.0)


@triton.jit
def _scaled_sum(x_ptr, offs, n, scale, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    i = tl.full((), 0, tl.int32)
    while i < n:
        acc += tl.load(x_ptr + i * BLOCK + offs) * scale
        i += 1
    return acc
