"""Triton kernels of the LoRA modes (flex_triton.py has the conventions).

Shape suffixes besides: R rank (padded to a power of two of at least 16), P parts of a projection (q, k, v are three), S splits
of a sum over the input features, of y and of x Aᵀ each its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flex_kernels import gelu_mul_reference, gelu_tanh, silu_mul_reference
from flex_triton import cdiv, cuda_capability, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs

MAX_PARTS = 3
MAX_DECODE_ROWS = 256
SMS = 132  # of an H200
MERGE_TILE = (128, 64, 16, 8)  # BLOCK_M, BLOCK_N, BLOCK_R, num_warps: 128 registers a thread, so two programs on an SM


def padded_rank(rank: int) -> int:
    return max(16, next_power_of_2(rank))


# ---------------------------------------------------------------------------------------------------------------------
# y + block-diagonal low-rank product, alone or with what follows the projection
# ---------------------------------------------------------------------------------------------------------------------


def add_low_rank(
    y_STN: Tensor, xa_STPR: Tensor, b_RN: Tensor, sizes: Sequence[int], scale_N: Tensor | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`y + xa_p B_pᵀ` for each part p of the row, times `scale_N` where given (DoRA), plus `residual_TN`: `[T, N]` in B's dtype.

    `sizes` are the parts' widths, at most 3; `xa_STPR` is `[S, T, P * R]`; `b_RN` has each output's own row of B as a column,
    with the adapter's scaling folded in. y and xa come rounded with S = 1, or as fp32 sums that are still to be added up. xa is
    rounded to B's dtype, as PEFT's is; all else is fp32 and is rounded before the residual is added, as in PEFT's layer. Rounded after
    it, a low-rank part far below y's last bit would break the ties in which two rounded numbers often end, always towards itself: an
    adapter after its first updates then cost twice the error of one that is all zeros (SmolLM2-135M in bf16).
    """
    run = add_low_rank_triton if use_triton(y_STN) else add_low_rank_reference
    return run(y_STN, xa_STPR, b_RN, sizes, scale_N, residual_TN)


def add_low_rank_reference(y_STN, xa_STPR, b_RN, sizes, scale_N=None, residual_TN=None) -> Tensor:
    xa_TPR = xa_STPR.float().sum(0).to(b_RN.dtype).float()
    parts = zip(xa_TPR.split(b_RN.shape[0], dim=1), b_RN.float().split(list(sizes), dim=1))
    total_TN = y_STN.float().sum(0) + torch.cat([xa_TR @ part_RN for xa_TR, part_RN in parts], dim=1)
    if scale_N is not None:
        total_TN = total_TN * scale_N
    total_TN = total_TN.to(b_RN.dtype)
    return total_TN if residual_TN is None else total_TN + residual_TN


def low_rank_silu_mul(y_STN: Tensor, xa_STPR: Tensor, b_RN: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """`silu_mul(add_low_rank(...))` for [gate | up]: `[T, N / 2]`."""
    run = low_rank_silu_mul_triton if use_triton(y_STN) else low_rank_silu_mul_reference
    return run(y_STN, xa_STPR, b_RN, scale_N)


def low_rank_silu_mul_reference(y_STN, xa_STPR, b_RN, scale_N=None) -> Tensor:
    return silu_mul_reference(add_low_rank_reference(y_STN, xa_STPR, b_RN, [b_RN.shape[1] // 2] * 2, scale_N))


def low_rank_gelu_mul(y_STN: Tensor, xa_STPR: Tensor, b_RN: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """The same with gelu in its tanh approximation."""
    run = low_rank_gelu_mul_triton if use_triton(y_STN) else low_rank_gelu_mul_reference
    return run(y_STN, xa_STPR, b_RN, scale_N)


def low_rank_gelu_mul_reference(y_STN, xa_STPR, b_RN, scale_N=None) -> Tensor:
    gate_up_TN = add_low_rank_reference(y_STN, xa_STPR, b_RN, [b_RN.shape[1] // 2] * 2, scale_N)
    return gelu_mul_reference(*gate_up_TN.chunk(2, dim=-1))


@jit
def _low_rank_tile(
    y_ptr, xa_ptr, b_ptr, scale_ptr, rows, row_mask, cols, col_mask, part, y_split_stride, y_stride, xa_split_stride, xa_stride,
    b_stride, R: tl.constexpr, Y_SPLITS: tl.constexpr, XA_SPLITS: tl.constexpr, HAS_SCALE: tl.constexpr,
):
    """y + xa B of a tile that lies in one part, fp32."""
    ranks = tl.arange(0, R)
    mask = row_mask[:, None] & col_mask[None, :]
    y_ptrs = y_ptr + rows[:, None] * y_stride + cols[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    xa_ptrs = xa_ptr + rows[:, None] * xa_stride + (part * R + ranks)[None, :]
    xa = tl.load(xa_ptrs, mask=row_mask[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + ranks[:, None] * b_stride + cols[None, :], mask=col_mask[None, :], other=0.0)
    for split in tl.static_range(1, Y_SPLITS):
        y += tl.load(y_ptrs + split * y_split_stride, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, XA_SPLITS):
        xa += tl.load(xa_ptrs + split * xa_split_stride, mask=row_mask[:, None], other=0.0).to(tl.float32)
    total = y + tl.dot(xa.to(b.dtype), b, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale_ptr + cols, mask=col_mask, other=0.0)[None, :]
    return total


@jit
def _add_low_rank_kernel(
    y_ptr, xa_ptr, b_ptr, scale_ptr, residual_ptr, out_ptr, T, y_split_stride, y_stride, xa_split_stride, xa_stride, b_stride,
    residual_stride, n0, n1, n2,
    R: tl.constexpr, Y_SPLITS: tl.constexpr, XA_SPLITS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
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
    mask = row_mask[:, None] & col_mask[None, :]
    if HAS_RESIDUAL:  # asked for with the rest
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0)
    total = _low_rank_tile(
        y_ptr, xa_ptr, b_ptr, scale_ptr, rows, row_mask, cols, col_mask, part, y_split_stride, y_stride, xa_split_stride,
        xa_stride, b_stride, R, Y_SPLITS, XA_SPLITS, HAS_SCALE,
    )  # fmt: skip
    total = total.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * (n0 + n1 + n2) + cols[None, :], total, mask=mask)


@jit
def _low_rank_gate_kernel(
    y_ptr, xa_ptr, b_ptr, scale_ptr, out_ptr, T, I, y_split_stride, y_stride, xa_split_stride, xa_stride, b_stride,
    R: tl.constexpr, Y_SPLITS: tl.constexpr, XA_SPLITS: tl.constexpr, GELU: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    dtype = out_ptr.dtype.element_ty
    rows = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < T, cols < I
    gate = _low_rank_tile(
        y_ptr, xa_ptr, b_ptr, scale_ptr, rows, row_mask, cols, col_mask, 0, y_split_stride, y_stride, xa_split_stride, xa_stride,
        b_stride, R, Y_SPLITS, XA_SPLITS, HAS_SCALE,
    )  # fmt: skip
    up = _low_rank_tile(
        y_ptr + I, xa_ptr, b_ptr + I, scale_ptr + I if HAS_SCALE else scale_ptr, rows, row_mask, cols, col_mask, 1,
        y_split_stride, y_stride, xa_split_stride, xa_stride, b_stride, R, Y_SPLITS, XA_SPLITS, HAS_SCALE,
    )  # fmt: skip
    gate = gate.to(dtype).to(tl.float32)
    if GELU:
        activated = gelu_tanh(gate)
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    activated = activated.to(dtype).to(tl.float32)
    out = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows[:, None] * I + cols[None, :], out, mask=row_mask[:, None] & col_mask[None, :])


def _check(y_STN: Tensor, xa_STPR: Tensor, b_RN: Tensor, sizes: Sequence[int]) -> None:
    R, N = b_RN.shape
    assert y_STN.stride(2) == xa_STPR.stride(2) == b_RN.stride(1) == 1 and padded_rank(R) == R
    assert len(sizes) <= MAX_PARTS and sum(sizes) == N == y_STN.shape[2]
    assert xa_STPR.shape[1:] == (y_STN.shape[1], len(sizes) * R)


def _tile(T: int, N: int) -> tuple[int, int]:
    """(BLOCK_T, BLOCK_N). A decode step is bound by latency: small tiles, so that every SM has some."""
    if T > MAX_DECODE_ROWS:
        return 64, 128
    return (32 if T > 16 and T * N >= SMS * 32 * 64 else 16), 64


def _strides(y_STN: Tensor, xa_STPR: Tensor, b_RN: Tensor) -> tuple[int, ...]:
    return *y_STN.stride()[:2], *xa_STPR.stride()[:2], b_RN.stride(0)


def add_low_rank_triton(y_STN, xa_STPR, b_RN, sizes, scale_N=None, residual_TN=None) -> Tensor:
    _check(y_STN, xa_STPR, b_RN, sizes)
    _, T, N = y_STN.shape
    assert residual_TN is None or (residual_TN.shape == (T, N) and residual_TN.stride(1) == 1)
    out_TN = torch.empty((T, N), dtype=b_RN.dtype, device=y_STN.device)
    if T:
        block_t, block_n = _tile(T, N)
        _add_low_rank_kernel[sum(cdiv(size, block_n) for size in sizes), cdiv(T, block_t)](
            y_STN, xa_STPR, b_RN, scale_N, residual_TN, out_TN, T, *_strides(y_STN, xa_STPR, b_RN),
            0 if residual_TN is None else residual_TN.stride(0), *sizes, *[0] * (MAX_PARTS - len(sizes)),
            R=b_RN.shape[0], Y_SPLITS=len(y_STN), XA_SPLITS=len(xa_STPR), HAS_SCALE=scale_N is not None,
            HAS_RESIDUAL=residual_TN is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4, **pdl_options(T),
        )  # fmt: skip
    return out_TN


def low_rank_silu_mul_triton(y_STN, xa_STPR, b_RN, scale_N=None) -> Tensor:
    return _low_rank_gate(y_STN, xa_STPR, b_RN, scale_N, gelu=False)


def low_rank_gelu_mul_triton(y_STN, xa_STPR, b_RN, scale_N=None) -> Tensor:
    return _low_rank_gate(y_STN, xa_STPR, b_RN, scale_N, gelu=True)


def _low_rank_gate(y_STN: Tensor, xa_STPR: Tensor, b_RN: Tensor, scale_N: Tensor | None, gelu: bool) -> Tensor:
    T, I = y_STN.shape[1], y_STN.shape[2] // 2
    _check(y_STN, xa_STPR, b_RN, [I, I])
    out_TI = torch.empty((T, I), dtype=b_RN.dtype, device=y_STN.device)
    if T:
        block_t, block_n = _tile(T, I)
        _low_rank_gate_kernel[cdiv(I, block_n), cdiv(T, block_t)](
            y_STN, xa_STPR, b_RN, scale_N, out_TI, T, I, *_strides(y_STN, xa_STPR, b_RN),
            R=b_RN.shape[0], Y_SPLITS=len(y_STN), XA_SPLITS=len(xa_STPR), GELU=gelu, HAS_SCALE=scale_N is not None,
            BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4, **pdl_options(T),
        )  # fmt: skip
    return out_TI


# ---------------------------------------------------------------------------------------------------------------------
# Bringing up to date: many small matrices in a few launches, so that a refresh is bound by memory and not by launches
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jobs:
    """Tensors of one kind (shapes, strides, dtypes): one launch."""

    members: list[int]
    pointers: Tensor  # int64 [tensors of a job, jobs]
    scalings: Tensor  # fp32 [jobs]
    aligned: bool

    @property
    def table(self) -> tuple[Tensor, Tensor, int]:
        return self.pointers, self.scalings, len(self.members)


def _jobs(columns: Sequence[Sequence[Tensor]], scalings: Sequence[float]) -> list[Jobs]:
    """Jobs `(tensor of each column, scaling)` by kind."""
    described = tuple(tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in column) for column in columns)
    return _described_jobs(described, tuple(scalings), columns[0][0].device)


@lru_cache(maxsize=8)  # a refresh asks the same again while nothing has moved
def _described_jobs(columns: tuple, scalings: tuple[float, ...], device: torch.device) -> list[Jobs]:
    kinds: dict[tuple, list[int]] = defaultdict(list)
    for i, tensors in enumerate(zip(*columns)):
        kinds[tuple(tensor[1:] for tensor in tensors)].append(i)
    jobs = []
    for members in kinds.values():
        addresses = [[column[i][0] for i in members] for column in columns]
        jobs.append(
            Jobs(
                members,
                torch.tensor(addresses, dtype=torch.int64, device=device),
                torch.tensor([scalings[i] for i in members], dtype=torch.float32, device=device),
                all(address % 16 == 0 for row in addresses for address in row),
            )
        )
    return jobs


def _on_gpu(*columns: Sequence[Tensor]) -> bool:
    return bool(columns[0]) and all(use_triton(tensor) for column in columns for tensor in column)


def _dtype(tensor: Tensor):
    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


def copy_scaled(outs: Sequence[Tensor], sources: Sequence[Tensor], scalings: Sequence[float]) -> None:
    """`outs[i] = scalings[i] * sources[i]`, multiplied in fp32, rounded once: matrices of any shapes, strides, float dtypes."""
    run = copy_scaled_triton if _on_gpu(outs, sources) else copy_scaled_reference
    run(outs, sources, scalings)


def copy_scaled_reference(outs, sources, scalings) -> None:
    for out, source, scaling in zip(outs, sources, scalings):
        out.copy_(source.float() * scaling)


@jit
def _copy_scaled_kernel(
    pointers_ptr, scalings_ptr, jobs, M, N, out_stride_m, out_stride_n, source_stride_m, source_stride_n,
    OUT: tl.constexpr, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    job = tl.program_id(1)
    out_ptr = tl.load(pointers_ptr + job).to(tl.pointer_type(OUT))
    source_ptr = tl.load(pointers_ptr + jobs + job).to(tl.pointer_type(SOURCE))
    if ALIGNED:
        out_ptr, source_ptr = tl.multiple_of(out_ptr, 16), tl.multiple_of(source_ptr, 16)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    source = tl.load(source_ptr + rows[:, None] * source_stride_m + cols[None, :] * source_stride_n, mask=mask, other=0.0)
    total = source.to(tl.float32) * tl.load(scalings_ptr + job)
    tl.store(out_ptr + rows[:, None] * out_stride_m + cols[None, :] * out_stride_n, total.to(OUT), mask=mask)


def copy_scaled_triton(outs, sources, scalings) -> None:
    for jobs in _jobs((outs, sources), scalings):
        out, source = outs[jobs.members[0]], sources[jobs.members[0]]
        M, N = out.shape
        block_n = min(next_power_of_2(N), 128)
        block_m = min(next_power_of_2(M), 4096 // block_n)
        _copy_scaled_kernel[cdiv(M, block_m) * cdiv(N, block_n), len(jobs.members)](
            *jobs.table, M, N, *out.stride(), *source.stride(),
            OUT=_dtype(out), SOURCE=_dtype(source), ALIGNED=jobs.aligned, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip


def merge_low_rank(
    outs: Sequence[Tensor], bases: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor], scalings: Sequence[float]
) -> None:
    """`outs[i] = bases[i] + scalings[i] * lefts[i] @ rights[i]`, in fp32 and rounded once, as PEFT merges fp32 A and B.

    `[M, N] = [M, N] + [M, r] @ [r, N]`, of any shapes and floating dtypes; `outs[i]` may be `bases[i]`.
    """
    run = merge_low_rank_triton if _on_gpu(outs, bases, lefts, rights) else merge_low_rank_reference
    run(outs, bases, lefts, rights, scalings)


def merge_low_rank_reference(outs, bases, lefts, rights, scalings) -> None:
    for out, base, left, right, scaling in zip(outs, bases, lefts, rights, scalings):
        out.copy_(torch.addmm(base.float(), left.float(), right.float(), alpha=scaling))


@jit
def _merge_low_rank_kernel(
    pointers_ptr, scalings_ptr, jobs, M, N, rank, out_stride, base_stride, left_stride, left_stride_r, right_stride_r, right_stride,
    OUT: tl.constexpr, BASE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
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
        if LEFT == RIGHT and LEFT != tl.float32:
            delta = tl.dot(left, right, delta)
        else:
            delta = tl.dot(left.to(tl.float32), right.to(tl.float32), delta, input_precision=PRECISION)
    total = base.to(tl.float32) + tl.load(scalings_ptr + job) * delta
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], total.to(OUT), mask=mask)


def merge_low_rank_triton(outs, bases, lefts, rights, scalings, tile: tuple[int, int, int, int] = MERGE_TILE) -> None:
    for jobs in _jobs((outs, bases, lefts, rights), scalings):
        out, base, left, right = (column[jobs.members[0]] for column in (outs, bases, lefts, rights))
        assert out.stride(1) == base.stride(1) == 1
        M, N = out.shape
        block_m, block_n, block_r, num_warps = tile
        # Three bfloat16 parts of each factor and six products of them keep fp32's bits, which a small sum of large terms needs,
        # on the tensor cores. fp32 dots would outlast the memory traffic. Triton's interpreter has no such product.
        precision = "bf16x6" if cuda_capability() >= 80 else "ieee"
        _merge_low_rank_kernel[cdiv(M, block_m) * cdiv(N, block_n), len(jobs.members)](
            *jobs.table, M, N, left.shape[1], out.stride(0), base.stride(0), *left.stride(), *right.stride(),
            OUT=_dtype(out), BASE=_dtype(base), LEFT=_dtype(left), RIGHT=_dtype(right), ALIGNED=jobs.aligned,
            PRECISION=precision, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=num_warps, num_stages=1,
        )  # fmt: skip
