"""What the kernel files share: Triton if there is any, the choice between kernel and reference, dependent launch.

Every op of those files comes three times: `op_triton` (the kernel), `op_reference` (plain PyTorch of the same signature: what
the kernel is tested against, and what runs on a CPU) and `op`, which picks one by the tensor's device and whose docstring is
the contract. All kernels are safe inside a CUDA graph: grids depend on shapes only, lengths and filters are read on the GPU,
outputs are allocated by the op. Set TRITON_INTERPRET=1 before the first import to run the kernels themselves on a CPU.

Shape suffixes: T tokens, B decode rows, C hidden, I intermediate, E packed q|k|v width, H query heads, D head size, N token
slots of the pool (num_pages * page_size) or output features, K input features, P pages of a row, R rotary dims, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton wheel for this platform: the references run instead
    triton = tl = TensorDescriptor = None


def jit(fn):
    return triton.jit(fn) if triton is not None else fn


def use_triton(x: Tensor) -> bool:
    """Not while torch.compile traces: it is given the references, to fuse them (flex_compile.py)."""
    return x.is_cuda and triton is not None and not torch.compiler.is_compiling()


@cache
def cuda_capability() -> int:
    """Of the GPU that the kernels are compiled for: 90 is Hopper. 0 in the interpreter and on other makers' GPUs."""
    if triton.knobs.runtime.interpret:
        return 0
    target = driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


PDL_ROWS = range(1, 257)


def pdl_options(rows: int, shares_sm: bool = False) -> dict[str, bool]:
    """Launch options of a kernel over so many rows: programmatic dependent launch where it pays.

    The kernel then starts while the one before it drains, and waits before its first read; captured in CUDA graphs too. None
    may touch memory before `wait_for_inputs`. `shares_sm`: several of its programs fit on an SM though each should have one to
    itself; started early they would crowd the SMs that are free first, so with few rows they start in turn. A decode step of
    Qwen3-4B's shapes on an H200 gets 2 % faster at 64 and 128 rows, and no different at 256. Needs Hopper or later.
    """
    dependent = rows in PDL_ROWS and cuda_capability() >= 90
    return {"PDL": dependent, "launch_pdl": dependent and not (shares_sm and rows <= 64)}


@jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
