"""Triton kernels of the LoRA modes (flex_triton.py has the conventions).

Shape suffixes besides: R rank (padded to a power of two of at least 16), P parts of a projection (q, k, v are three), S splits
of a sum over the input features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from flex_kernels import gelu_mul_reference, gelu_tanh, rms_norm, rms_norm_reference, silu_mul_reference
from flex_triton import cdiv, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs

MAX_PARTS = 3
MAX_FUSED_ROWS = 256


def padded_rank(rank: int) -> int:
    return max(16, next_power_of_2(rank))


# ---------------------------------------------------------------------------------------------------------------------
# y + block-diagonal low-rank product, alone or with what follows the projection
# ---------------------------------------------------------------------------------------------------------------------


def add_low_rank(y_TN: Tensor, xa_TPR: Tensor, b_RN: Tensor, sizes: Sequence[int], scale_N: Tensor | None = None) -> Tensor:
    """`y + xa_p B_pᵀ` for each part p of the row, times `scale_N` where given (DoRA); a new contiguous `[T, N]`.

    `sizes` are the parts' widths, at most 3; `xa_TPR` is `[T, P * R]`; `b_RN` has each output's own row of B as a column, with
    the adapter's scaling folded in. y is rounded to its dtype before and after; the product and the sum are fp32, as PEFT's are.
    """
    run = add_low_rank_triton if use_triton(y_TN) else add_low_rank_reference
    return run(y_TN, xa_TPR, b_RN, sizes, scale_N)


def add_low_rank_reference(y_TN, xa_TPR, b_RN, sizes, scale_N=None) -> Tensor:
    parts = zip(xa_TPR.float().split(b_RN.shape[0], dim=1), b_RN.float().split(list(sizes), dim=1))
    total_TN = y_TN.float() + torch.cat([xa_TR @ part_RN for xa_TR, part_RN in parts], dim=1)
    return (total_TN if scale_N is None else total_TN * scale_N).to(y_TN.dtype)


def low_rank_silu_mul(y_TN: Tensor, xa_TPR: Tensor, b_RN: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """`silu_mul(add_low_rank(...))` for [gate | up]: `[T, N / 2]`."""
    run = low_rank_silu_mul_triton if use_triton(y_TN) else low_rank_silu_mul_reference
    return run(y_TN, xa_TPR, b_RN, scale_N)


def low_rank_silu_mul_reference(y_TN, xa_TPR, b_RN, scale_N=None) -> Tensor:
    return silu_mul_reference(add_low_rank_reference(y_TN, xa_TPR, b_RN, [y_TN.shape[1] // 2] * 2, scale_N))


def low_rank_gelu_mul(y_TN: Tensor, xa_TPR: Tensor, b_RN: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """The same with gelu in its tanh approximation."""
    run = low_rank_gelu_mul_triton if use_triton(y_TN) else low_rank_gelu_mul_reference
    return run(y_TN, xa_TPR, b_RN, scale_N)


def low_rank_gelu_mul_reference(y_TN, xa_TPR, b_RN, scale_N=None) -> Tensor:
    gate_up_TN = add_low_rank_reference(y_TN, xa_TPR, b_RN, [y_TN.shape[1] // 2] * 2, scale_N)
    return gelu_mul_reference(*gate_up_TN.chunk(2, dim=-1))


def low_rank_add_norm(
    y_STN: Tensor, xa_STR: Tensor, b_RN: Tensor, residual_TN: Tensor, norm_N: Tensor, eps: float, scale_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm(add_low_rank(...), norm, eps, residual)` of a projection of one part -> (normed_TN, total_TN).

    The product comes as fp32 sums of S splits, or rounded with S = 1.
    """
    if not use_triton(y_STN):
        return low_rank_add_norm_reference(y_STN, xa_STR, b_RN, residual_TN, norm_N, eps, scale_N)
    if len(residual_TN) > MAX_FUSED_ROWS:  # a program per row would read B once for each row
        y_TN, xa_TR = (x.sum(0).to(residual_TN.dtype) if len(x) > 1 else x[0] for x in (y_STN, xa_STR))
        return rms_norm(add_low_rank_triton(y_TN, xa_TR, b_RN, [y_TN.shape[1]], scale_N), norm_N, eps, residual_TN)
    return low_rank_add_norm_triton(y_STN, xa_STR, b_RN, residual_TN, norm_N, eps, scale_N)


def low_rank_add_norm_reference(y_STN, xa_STR, b_RN, residual_TN, norm_N, eps, scale_N=None) -> tuple[Tensor, Tensor]:
    total_TN = add_low_rank_reference(y_STN.sum(0), xa_STR.sum(0), b_RN, [y_STN.shape[2]], scale_N)
    return rms_norm_reference(total_TN.to(residual_TN.dtype), norm_N, eps, residual_TN)


@jit
def _low_rank_tile(
    y_ptr, xa_ptr, b_ptr, scale_ptr, rows, row_mask, cols, col_mask, part, y_stride, xa_stride, b_stride,
    R: tl.constexpr, HAS_SCALE: tl.constexpr,
):
    """y + xa B of a tile that lies in one part, fp32."""
    ranks = tl.arange(0, R)
    xa = tl.load(xa_ptr + rows[:, None] * xa_stride + (part * R + ranks)[None, :], mask=row_mask[:, None], other=0.0)
    b = tl.load(b_ptr + ranks[:, None] * b_stride + cols[None, :], mask=col_mask[None, :], other=0.0)
    y = tl.load(y_ptr + rows[:, None] * y_stride + cols[None, :], mask=row_mask[:, None] & col_mask[None, :], other=0.0)
    total = y.to(tl.float32) + tl.dot(xa, b, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale_ptr + cols, mask=col_mask, other=0.0)[None, :]
    return total


@jit
def _add_low_rank_kernel(
    y_ptr, xa_ptr, b_ptr, scale_ptr, out_ptr, T, y_stride, xa_stride, b_stride, n0, n1, n2,
    R: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # No tile spans two parts: the grid is the parts' tiles one after another.
    tile = tl.program_id(0)
    part, start, end = 0, 0, n0
    tiles = tl.cdiv(n0, BLOCK_N)
    if tile >= tiles:
        tile -= tiles
        part, start, end = 1, n0, n0 + n1
        tiles = tl.cdiv(n1, BLOCK_N)
        if tile >= tiles:
            tile -= tiles
            part, start, end = 2, n0 + n1, n0 + n1 + n2
    rows = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    cols = start + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < T, cols < end
    total = _low_rank_tile(
        y_ptr, xa_ptr, b_ptr, scale_ptr, rows, row_mask, cols, col_mask, part, y_stride, xa_stride, b_stride, R, HAS_SCALE
    )
    out_ptrs = out_ptr + rows[:, None] * (n0 + n1 + n2) + cols[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@jit
def _low_rank_gate_kernel(
    y_ptr, xa_ptr, b_ptr, scale_ptr, out_ptr, T, I, y_stride, xa_stride, b_stride,
    R: tl.constexpr, GELU: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    dtype = out_ptr.dtype.element_ty
    rows = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < T, cols < I
    gate = _low_rank_tile(
        y_ptr, xa_ptr, b_ptr, scale_ptr, rows, row_mask, cols, col_mask, 0, y_stride, xa_stride, b_stride, R, HAS_SCALE
    )
    up = _low_rank_tile(
        y_ptr + I, xa_ptr, b_ptr + I, scale_ptr + I if HAS_SCALE else scale_ptr, rows, row_mask, cols, col_mask, 1,
        y_stride, xa_stride, b_stride, R, HAS_SCALE,
    )  # fmt: skip
    gate = gate.to(dtype).to(tl.float32)
    if GELU:
        activated = gelu_tanh(gate)
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    activated = activated.to(dtype).to(tl.float32)
    out = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows[:, None] * I + cols[None, :], out, mask=row_mask[:, None] & col_mask[None, :])


@jit
def _low_rank_add_norm_kernel(
    y_ptr, xa_ptr, b_ptr, scale_ptr, residual_ptr, norm_ptr, out_ptr, total_ptr, eps,
    y_split_stride, y_stride, b_stride, residual_stride,
    N: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(y_ptr + split * y_split_stride + row * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
    for first in range(0, R, UNROLL):
        for i in tl.static_range(UNROLL):
            xa = 0.0
            for split in tl.static_range(SPLITS):
                xa += tl.load(xa_ptr + split * y_split_stride + row * y_stride + first + i).to(tl.float32)
            y += xa * tl.load(b_ptr + (first + i) * b_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        y *= tl.load(scale_ptr + cols, mask=mask, other=0.0)
    total = (y.to(dtype).to(tl.float32) + residual).to(dtype)
    tl.store(total_ptr + row * N + cols, total, mask=mask)
    total = total.to(tl.float32)
    normed = (total * tl.rsqrt(tl.sum(total * total) / N + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + cols, (normed * norm).to(dtype), mask=mask)


def _check(y_TN: Tensor, xa_TPR: Tensor, b_RN: Tensor, sizes: Sequence[int]) -> None:
    R, N = b_RN.shape
    assert y_TN.stride(1) == xa_TPR.stride(1) == b_RN.stride(1) == 1 and padded_rank(R) == R
    assert len(sizes) <= MAX_PARTS and sum(sizes) == N == y_TN.shape[1] and xa_TPR.shape[1] == len(sizes) * R


def _tile(T: int) -> tuple[int, int]:
    """(BLOCK_T, BLOCK_N). A decode step is bound by latency: small tiles, so that every SM has some."""
    return (32, 64) if T <= MAX_FUSED_ROWS else (64, 128)


def add_low_rank_triton(y_TN, xa_TPR, b_RN, sizes, scale_N=None) -> Tensor:
    _check(y_TN, xa_TPR, b_RN, sizes)
    T, N = y_TN.shape
    out_TN = torch.empty((T, N), dtype=y_TN.dtype, device=y_TN.device)
    if T:
        block_t, block_n = _tile(T)
        _add_low_rank_kernel[sum(cdiv(size, block_n) for size in sizes), cdiv(T, block_t)](
            y_TN, xa_TPR, b_RN, scale_N, out_TN, T, y_TN.stride(0), xa_TPR.stride(0), b_RN.stride(0),
            *sizes, *[0] * (MAX_PARTS - len(sizes)),
            R=b_RN.shape[0], HAS_SCALE=scale_N is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4, **pdl_options(T),
        )  # fmt: skip
    return out_TN


def low_rank_silu_mul_triton(y_TN, xa_TPR, b_RN, scale_N=None) -> Tensor:
    return _low_rank_gate(y_TN, xa_TPR, b_RN, scale_N, gelu=False)


def low_rank_gelu_mul_triton(y_TN, xa_TPR, b_RN, scale_N=None) -> Tensor:
    return _low_rank_gate(y_TN, xa_TPR, b_RN, scale_N, gelu=True)


def _low_rank_gate(y_TN: Tensor, xa_TPR: Tensor, b_RN: Tensor, scale_N: Tensor | None, gelu: bool) -> Tensor:
    T, I = y_TN.shape[0], y_TN.shape[1] // 2
    _check(y_TN, xa_TPR, b_RN, [I, I])
    out_TI = torch.empty((T, I), dtype=y_TN.dtype, device=y_TN.device)
    if T:
        block_t, block_n = _tile(T)
        _low_rank_gate_kernel[cdiv(I, block_n), cdiv(T, block_t)](
            y_TN, xa_TPR, b_RN, scale_N, out_TI, T, I, y_TN.stride(0), xa_TPR.stride(0), b_RN.stride(0),
            R=b_RN.shape[0], GELU=gelu, HAS_SCALE=scale_N is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4,
            **pdl_options(T),
        )  # fmt: skip
    return out_TI


def low_rank_add_norm_triton(y_STN, xa_STR, b_RN, residual_TN, norm_N, eps, scale_N=None) -> tuple[Tensor, Tensor]:
    S, T, N = y_STN.shape
    _check(y_STN[0], xa_STR[0], b_RN, [N])
    assert residual_TN.stride(1) == 1 and xa_STR.stride() == y_STN.stride()
    out_TN, total_TN = torch.empty((2, T, N), dtype=residual_TN.dtype, device=residual_TN.device)
    if T:
        block = next_power_of_2(N)
        _low_rank_add_norm_kernel[(T,)](
            y_STN, xa_STR, b_RN, scale_N, residual_TN, norm_N, out_TN, total_TN, eps,
            y_STN.stride(0), y_STN.stride(1), b_RN.stride(0), residual_TN.stride(0),
            N=N, R=b_RN.shape[0], SPLITS=S, HAS_SCALE=scale_N is not None, BLOCK=block, UNROLL=8,
            num_warps=min(max(block // 512, 1), 16), **pdl_options(T),
        )  # fmt: skip
    return out_TN, total_TN


# ---------------------------------------------------------------------------------------------------------------------
# Merging: out = base + scaling * left @ right, for many weights at once
# ---------------------------------------------------------------------------------------------------------------------


def merge_low_rank(
    outs: Sequence[Tensor], bases: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor], scalings: Sequence[float]
) -> None:
    """`outs[i] = bases[i] + scalings[i] * lefts[i] @ rights[i]`, in fp32 and rounded once, as PEFT merges fp32 A and B.

    `[M, N] = [M, N] + [M, r] @ [r, N]`, of any shapes and floating dtypes; `outs[i]` may be `bases[i]`. Weights of one kind
    (shape, dtype, strides) are one launch, so that a refresh of a whole model is bound by memory and not by launches.
    """
    run = merge_low_rank_triton if outs and use_triton(outs[0]) else merge_low_rank_reference
    run(outs, bases, lefts, rights, scalings)


def merge_low_rank_reference(outs, bases, lefts, rights, scalings) -> None:
    for out, base, left, right, scaling in zip(outs, bases, lefts, rights, scalings):
        out.copy_(torch.addmm(base.float(), left.float(), right.float(), alpha=scaling))


@jit
def _merge_low_rank_kernel(
    pointers_ptr, scalings_ptr, jobs, M, N, rank, out_stride, base_stride, left_stride, left_stride_r, right_stride_r, right_stride,
    OUT: tl.constexpr, BASE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):
    job = tl.program_id(1)
    out_ptr = tl.load(pointers_ptr + job).to(tl.pointer_type(OUT))
    base_ptr = tl.load(pointers_ptr + jobs + job).to(tl.pointer_type(BASE))
    left_ptr = tl.load(pointers_ptr + 2 * jobs + job).to(tl.pointer_type(LEFT))
    right_ptr = tl.load(pointers_ptr + 3 * jobs + job).to(tl.pointer_type(RIGHT))
    if ALIGNED:
        out_ptr, base_ptr = tl.multiple_of(out_ptr, 16), tl.multiple_of(base_ptr, 16)
        left_ptr, right_ptr = tl.multiple_of(left_ptr, 16), tl.multiple_of(right_ptr, 16)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < M, cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    rows = rows.to(tl.int64)
    base = tl.load(base_ptr + rows[:, None] * base_stride + cols[None, :], mask=mask, other=0.0)
    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, rank, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        rank_mask = ranks < rank
        left = tl.load(
            left_ptr + rows[:, None] * left_stride + ranks[None, :] * left_stride_r,
            mask=row_mask[:, None] & rank_mask[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            right_ptr + ranks[:, None] * right_stride_r + cols[None, :] * right_stride,
            mask=rank_mask[:, None] & col_mask[None, :], other=0.0,
        )  # fmt: skip
        # Three tf32 products carry fp32's bits and run on the tensor cores; fp32 dots would outlast the memory traffic.
        if LEFT == RIGHT and LEFT != tl.float32:
            delta = tl.dot(left, right, delta)
        else:
            delta = tl.dot(left.to(tl.float32), right.to(tl.float32), delta, input_precision="tf32x3")
    total = base.to(tl.float32) + tl.load(scalings_ptr + job) * delta
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], total.to(OUT), mask=mask)


def merge_low_rank_triton(outs, bases, lefts, rights, scalings) -> None:
    kinds: dict[tuple, list[int]] = defaultdict(list)
    for i, tensors in enumerate(zip(outs, bases, lefts, rights)):
        assert tensors[0].stride(1) == tensors[1].stride(1) == 1
        kinds[tuple((t.shape, t.stride(), t.dtype) for t in tensors)].append(i)
    dtypes = {getattr(torch, name): getattr(tl, name) for name in ("float32", "float16", "bfloat16")}
    for members in kinds.values():
        tensors = [[kind[i] for i in members] for kind in (outs, bases, lefts, rights)]
        addresses = [[t.data_ptr() for t in kind] for kind in tensors]
        out, base, left, right = (kind[0] for kind in tensors)
        (M, N), device = out.shape, out.device
        block_m = block_n = 64  # 128 registers a thread: four programs on an SM hide each other's loads
        grid = (cdiv(M, block_m) * cdiv(N, block_n), len(members))
        _merge_low_rank_kernel[grid](
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.tensor([scalings[i] for i in members], dtype=torch.float32, device=device),
            len(members), M, N, left.shape[1], out.stride(0), base.stride(0), *left.stride(), *right.stride(),
            OUT=dtypes[out.dtype], BASE=dtypes[base.dtype], LEFT=dtypes[left.dtype], RIGHT=dtypes[right.dtype],
            ALIGNED=all(address % 16 == 0 for kind in addresses for address in kind),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=16, num_warps=4, num_stages=1,
        )  # fmt: skip
