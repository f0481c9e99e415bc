"""Fused Triton kernels of the decode step, each beside a plain PyTorch reference of the same signature.

Every op comes three times: `op_triton` (the kernel), `op_reference` (plain PyTorch: what the kernel is tested against,
and what runs on a CPU) and `op`, which picks one by the tensor's device and whose docstring is the contract.

All kernels are safe inside a CUDA graph: grids depend on shapes only, lengths and filters are read on the GPU, outputs
are allocated by the op. Set TRITON_INTERPRET=1 before importing this file to run the kernels themselves on a CPU.

Shape suffixes: T tokens, B decode rows, C hidden, I intermediate, E packed q|k|v width, H query heads, D head size,
N token slots of the pool (num_pages * page_size), P pages of a row, R rotary dims, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton wheel for this platform: the references run instead
    triton = tl = None

LOG2E = math.log2(math.e)


def _jit(fn):
    return triton.jit(fn) if triton is not None else fn


def _use_triton(x: Tensor) -> bool:
    return x.is_cuda and triton is not None


# Programmatic dependent launch: a kernel starts while the one before it drains, and waits before its first read.
# Captured in CUDA graphs too. None of the kernels may read or write memory before _wait_for_inputs.
PDL = False


def _pdl() -> dict[str, bool]:
    return {"PDL": PDL, "launch_pdl": PDL}


@_jit
def _wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# ---------------------------------------------------------------------------------------------------------------------
# RMS norm with the residual add in front
# ---------------------------------------------------------------------------------------------------------------------


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (normed, total): total = x (+ residual), rounded to x.dtype, and normed = weight * (total / rms(total)).

    The square mean is taken in fp32 and the normed value is rounded to x.dtype before the weight multiplies it, the
    order of Hugging Face's Llama and Qwen norms. Without a residual `total` is x itself.
    """
    run = rms_norm_triton if _use_triton(x_TC) else rms_norm_reference
    return run(x_TC, weight_C, eps, residual_TC)


def rms_norm_reference(x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None = None):
    total_TC = x_TC if residual_TC is None else x_TC + residual_TC
    wide_TC = total_TC.float()
    normed_TC = wide_TC * torch.rsqrt(wide_TC.square().mean(-1, keepdim=True) + eps)
    return (weight_C * normed_TC.to(x_TC.dtype)).to(x_TC.dtype), total_TC


@_jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, eps, x_stride, residual_stride,
    C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    _wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
        total = total.to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + row * C + cols, total, mask=mask)
        total = total.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total) / C + eps)
    normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * C + cols, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None = None):
    T, C = x_TC.shape
    assert x_TC.stride(1) == 1 and (residual_TC is None or residual_TC.stride(1) == 1)
    y_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    total_TC = x_TC if residual_TC is None else torch.empty_like(y_TC)
    residual = x_TC if residual_TC is None else residual_TC
    block = _next_power_of_2(C)
    if T:
        _rms_norm_kernel[(T,)](
            x_TC, residual, weight_C, y_TC, total_TC, eps, x_TC.stride(0), residual.stride(0),
            C=C, HAS_RESIDUAL=residual_TC is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
            **_pdl(),
        )
    return y_TC, total_TC


# ---------------------------------------------------------------------------------------------------------------------
# SiLU(gate) * up
# ---------------------------------------------------------------------------------------------------------------------


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """`[T, 2 I]` (gate | up) -> `[T, I]`: silu(gate), rounded to the dtype as Hugging Face does, times up."""
    return (silu_mul_triton if _use_triton(gate_up_TI2) else silu_mul_reference)(gate_up_TI2)


def silu_mul_reference(gate_up_TI2: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


@_jit
def _silu_mul_kernel(x_ptr, y_ptr, x_stride, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    _wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < I
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + I + cols, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * I + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up_TI2: Tensor) -> Tensor:
    T, width = gate_up_TI2.shape
    assert gate_up_TI2.stride(1) == 1 and width % 2 == 0
    y_TI = torch.empty((T, width // 2), dtype=gate_up_TI2.dtype, device=gate_up_TI2.device)
    if T:
        grid = (T, _cdiv(width // 2, 1024))
        _silu_mul_kernel[grid](
            gate_up_TI2, y_TI, gate_up_TI2.stride(0), I=width // 2, BLOCK=1024, num_warps=4, **_pdl()
        )
    return y_TI


# ---------------------------------------------------------------------------------------------------------------------
# q/k norm, rotary embedding and the K/V write into the paged pool
# ---------------------------------------------------------------------------------------------------------------------


def qk_norm_rope_store(
    qkv_TE: Tensor, q_norm_D: Tensor | None, k_norm_D: Tensor | None, eps: float, cos_PR: Tensor, sin_PR: Tensor,
    positions_T: Tensor, token_slots_T: Tensor, k_pool_HND: Tensor, v_pool_HND: Tensor, num_heads: int,
    packed_kv: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k of `qkv_TE` = [q heads | k heads | v heads], write k and v into the pool, return q_THD.

    - `q_norm_D`, `k_norm_D`: weights of the per-head RMS norm, or None for a model without one.
    - `cos_PR`, `sin_PR`: fp32 tables by position, full rotary width R with both halves equal, as Hugging Face builds
      them. R < D rotates the first R dims only (partial rotary). Rotate-half convention.
    - `k_pool_HND`, `v_pool_HND` [num_kv_heads, slots, D]: written in place at `token_slots_T`, nothing else is touched.
    - `packed_kv=True` returns (q_THD, k_THD, v_THD): prefill attends over its own keys without reading pages.

    Everything between the loads and the stores is fp32 (Hugging Face rounds between norm and rotation).
    """
    run = qk_norm_rope_store_triton if _use_triton(qkv_TE) else qk_norm_rope_store_reference
    return run(
        qkv_TE, q_norm_D, k_norm_D, eps, cos_PR, sin_PR, positions_T, token_slots_T, k_pool_HND, v_pool_HND, num_heads,
        packed_kv,
    )


def _norm_rope_reference(x_THD: Tensor, norm_D: Tensor | None, eps: float, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    y_THD = x_THD.float()
    if norm_D is not None:
        y_THD = y_THD * torch.rsqrt(y_THD.square().mean(-1, keepdim=True) + eps) * norm_D.float()
    R = cos_TR.shape[-1]
    rotary_THR, rest = y_THD[..., :R], y_THD[..., R:]
    turned_THR = torch.cat((-rotary_THR[..., R // 2 :], rotary_THR[..., : R // 2]), dim=-1)
    rotated_THR = rotary_THR * cos_TR[:, None] + turned_THR * sin_TR[:, None]
    return torch.cat((rotated_THR, rest), dim=-1).to(x_THD.dtype)


def qk_norm_rope_store_reference(
    qkv_TE, q_norm_D, k_norm_D, eps, cos_PR, sin_PR, positions_T, token_slots_T, k_pool_HND, v_pool_HND, num_heads,
    packed_kv=False,
):
    num_kv_heads, _, D = k_pool_HND.shape
    heads_THD = qkv_TE.view(len(qkv_TE), -1, D)
    q_THD, k_THD, v_THD = heads_THD.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos_TR, sin_TR = cos_PR[positions_T], sin_PR[positions_T]
    q_THD = _norm_rope_reference(q_THD, q_norm_D, eps, cos_TR, sin_TR)
    k_THD = _norm_rope_reference(k_THD, k_norm_D, eps, cos_TR, sin_TR)
    k_pool_HND[:, token_slots_T] = k_THD.transpose(0, 1)
    v_pool_HND[:, token_slots_T] = v_THD.transpose(0, 1)
    return (q_THD, k_THD, v_THD.contiguous()) if packed_kv else q_THD


@_jit
def _store_heads(
    ptr, head_offsets, lo, hi, rest, mask_h,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_R)
    mask = mask_h[:, None] & (dims < R // 2)[None, :]
    ptrs = ptr + head_offsets[:, None] + dims[None, :]
    tl.store(ptrs, lo.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptrs + R // 2, hi.to(ptr.dtype.element_ty), mask=mask)
    if R < D:
        dims = R + tl.arange(0, BLOCK_REST)
        ptrs = ptr + head_offsets[:, None] + dims[None, :]
        tl.store(ptrs, rest.to(ptr.dtype.element_ty), mask=mask_h[:, None] & (dims < D)[None, :])


@_jit
def _load_norm_rope(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, eps, heads, mask_h,
    HAS_NORM: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_R)
    mask_r = dims < R // 2
    mask = mask_h[:, None] & mask_r[None, :]
    ptrs = x_ptr + heads[:, None] * D + dims[None, :]
    lo = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(ptrs + R // 2, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + dims, mask=mask_r, other=0.0)[None, :]
    sin = tl.load(sin_ptr + dims, mask=mask_r, other=0.0)[None, :]
    rest = lo
    if R < D:
        rest_dims = R + tl.arange(0, BLOCK_REST)
        rest_mask = mask_h[:, None] & (rest_dims < D)[None, :]
        rest = tl.load(x_ptr + heads[:, None] * D + rest_dims[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(lo * lo, axis=1) + tl.sum(hi * hi, axis=1)
        if R < D:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        lo *= scale * tl.load(norm_ptr + dims, mask=mask_r, other=0.0).to(tl.float32)[None, :]
        hi *= scale * tl.load(norm_ptr + R // 2 + dims, mask=mask_r, other=0.0).to(tl.float32)[None, :]
        if R < D:
            rest *= scale * tl.load(norm_ptr + rest_dims, mask=rest_dims < D, other=0.0).to(tl.float32)[None, :]
    return lo * cos - hi * sin, hi * cos + lo * sin, rest


@_jit
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, k_pool_ptr,
    v_pool_ptr, eps, qkv_stride, cos_stride, sin_stride, k_stride_h, k_stride_n, v_stride_h, v_stride_n,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr, PACKED_KV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_H heads of one token, all of them q, all k or all v."""
    _wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    kv_blocks: tl.constexpr = (HKV + BLOCK_H - 1) // BLOCK_H
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    x_ptr = qkv_ptr + token * qkv_stride
    cos_ptr += position * cos_stride
    sin_ptr += position * sin_stride
    if block < q_blocks:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_h = heads < H
        lo, hi, rest = _load_norm_rope(
            x_ptr, q_norm_ptr, cos_ptr, sin_ptr, eps, heads, mask_h, HAS_Q_NORM, R, D, BLOCK_R, BLOCK_REST
        )
        _store_heads(q_ptr + token * (H * D), heads * D, lo, hi, rest, mask_h, R, D, BLOCK_R, BLOCK_REST)
    elif block < q_blocks + kv_blocks:
        heads = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_h = heads < HKV
        lo, hi, rest = _load_norm_rope(
            x_ptr + H * D, k_norm_ptr, cos_ptr, sin_ptr, eps, heads, mask_h, HAS_K_NORM, R, D, BLOCK_R, BLOCK_REST
        )
        pool_offsets = heads.to(tl.int64) * k_stride_h
        _store_heads(k_pool_ptr + slot * k_stride_n, pool_offsets, lo, hi, rest, mask_h, R, D, BLOCK_R, BLOCK_REST)
        if PACKED_KV:
            _store_heads(k_ptr + token * (HKV * D), heads * D, lo, hi, rest, mask_h, R, D, BLOCK_R, BLOCK_REST)
    else:
        heads = (block - q_blocks - kv_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        dims = tl.arange(0, BLOCK_D)
        mask = (heads < HKV)[:, None] & (dims < D)[None, :]
        offsets = heads[:, None] * D + dims[None, :]
        v = tl.load(x_ptr + (H + HKV) * D + offsets, mask=mask)
        pool_ptrs = v_pool_ptr + slot * v_stride_n + heads.to(tl.int64)[:, None] * v_stride_h + dims[None, :]
        tl.store(pool_ptrs, v, mask=mask)
        if PACKED_KV:
            tl.store(v_ptr + token * (HKV * D) + offsets, v, mask=mask)


def qk_norm_rope_store_triton(
    qkv_TE, q_norm_D, k_norm_D, eps, cos_PR, sin_PR, positions_T, token_slots_T, k_pool_HND, v_pool_HND, num_heads,
    packed_kv=False,
):
    T, R = len(qkv_TE), cos_PR.shape[1]
    num_kv_heads, _, D = k_pool_HND.shape
    assert qkv_TE.shape[1] == (num_heads + 2 * num_kv_heads) * D and qkv_TE.stride(1) == 1
    assert k_pool_HND.stride(2) == 1 and v_pool_HND.stride(2) == 1
    assert cos_PR.stride(1) == 1 and sin_PR.stride(1) == 1 and R % 2 == 0 and R <= D
    q_THD = qkv_TE.new_empty((T, num_heads, D))
    k_THD = v_THD = q_THD
    if packed_kv:
        k_THD, v_THD = (qkv_TE.new_empty((T, num_kv_heads, D)) for _ in range(2))
    block_h = min(max(1024 // _next_power_of_2(D), 1), _next_power_of_2(num_heads))
    if T:
        grid = (T, _cdiv(num_heads, block_h) + 2 * _cdiv(num_kv_heads, block_h))
        _qk_norm_rope_store_kernel[grid](
            qkv_TE, qkv_TE if q_norm_D is None else q_norm_D, qkv_TE if k_norm_D is None else k_norm_D, cos_PR, sin_PR,
            positions_T, token_slots_T, q_THD, k_THD, v_THD, k_pool_HND, v_pool_HND, eps, qkv_TE.stride(0),
            cos_PR.stride(0), sin_PR.stride(0), *k_pool_HND.stride()[:2], *v_pool_HND.stride()[:2],
            H=num_heads, HKV=num_kv_heads, D=D, R=R, HAS_Q_NORM=q_norm_D is not None, HAS_K_NORM=k_norm_D is not None,
            PACKED_KV=packed_kv, BLOCK_H=block_h, BLOCK_R=_next_power_of_2(R // 2),
            BLOCK_REST=_next_power_of_2(max(D - R, 1)), BLOCK_D=_next_power_of_2(D), num_warps=4, **_pdl(),
        )
    return (q_THD, k_THD, v_THD) if packed_kv else q_THD


# ---------------------------------------------------------------------------------------------------------------------
# Paged decode attention
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeOptions:
    """How decode attention is cut up; `flex_autotune_replay.py` searches these on a given GPU."""

    block_n: int = 64  # keys per tile
    num_warps: int = 4
    num_stages: int = 3  # tiles of K and V in flight per program
    ctas_per_sm: int = 4  # the KV of all rows is cut into about this many chunks per SM
    min_tiles: int = 1  # a chunk holds at least this many tiles, unless its row is shorter

    def __post_init__(self):
        if self.block_n < 16 or self.block_n & (self.block_n - 1):
            raise ValueError(f"DecodeOptions.block_n must be a power of two of at least 16, got {self.block_n}")


def default_decode_options(head_dim: int, dtype: torch.dtype) -> DecodeOptions:
    """Options that fit the shared memory and registers of Hopper for a head size."""
    if dtype == torch.float32:  # IEEE dots run on the plain ALUs: for checking numerics, not for speed
        return DecodeOptions(block_n=16, num_stages=2)
    if head_dim <= 128:
        return DecodeOptions()
    return DecodeOptions(block_n=32, num_warps=4 if head_dim <= 256 else 8, ctas_per_sm=2)


@dataclass(frozen=True)
class DecodePlan:
    """The work table of one decode step, shared by every layer that has the same window, head counts and head size.

    `chunks_S5` int32: (row, first tile, last tile + 1, index among the row's chunks, number of the row's chunks),
    longest chunks first, row = -1 past the last one. `arrivals_BH` counts the finished chunks of a row and head within
    one launch: zero between launches.
    """

    chunks_S5: Tensor
    arrivals_BH: Tensor
    window: int | None
    options: DecodeOptions


def decode_attention_plan(
    lengths_B: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None = None,
    options: DecodeOptions | None = None,
) -> DecodePlan | None:
    """Cut the keys that each row sees into chunks of nearly equal size, on the GPU and in one small kernel.

    The number of table entries is fixed by the batch size and the GPU; how many are used depends on `lengths_B`.
    Returns None on a CPU, where the reference needs no plan.
    """
    if not _use_triton(lengths_B):
        return None
    return decode_attention_plan_triton(lengths_B, num_kv_heads, head_dim, dtype, window, options)


@_jit
def _decode_plan_kernel(
    lengths_ptr, chunks_ptr, arrivals_ptr, B, capacity, target_chunks, min_tiles,
    HKV: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_HKV: tl.constexpr, PDL: tl.constexpr,
):
    """Program r places the chunks of row r. Every program reads all lengths, so that none waits for another."""
    _wait_for_inputs(PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + rows, mask=rows < B, other=0).to(tl.int32)
    first_tiles = tl.zeros_like(lengths)
    if WINDOW > 0:
        first_tiles = tl.maximum(lengths - WINDOW, 0) // BLOCK_N
    tiles = (lengths + BLOCK_N - 1) // BLOCK_N - first_tiles
    share = tl.maximum((tl.sum(tiles) + target_chunks - 1) // target_chunks, min_tiles)
    counts = (tiles + share - 1) // share
    sizes = (tiles + counts - 1) // tl.maximum(counts, 1)

    mine = rows == row
    my_first = tl.sum(tl.where(mine, first_tiles, 0))
    my_tiles = tl.sum(tl.where(mine, tiles, 0))
    my_count = tl.sum(tl.where(mine, counts, 0))
    my_size = tl.sum(tl.where(mine, sizes, 0))
    # Longest chunks first: the hardware starts programs in order, so the short ones fill the tail.
    ahead = (sizes > my_size) | ((sizes == my_size) & (rows < row))
    offset = tl.sum(tl.where(ahead, counts, 0))

    index = tl.arange(0, BLOCK_CHUNKS)
    mask = index < my_count
    entry_ptrs = chunks_ptr + (offset + index) * 5
    tl.store(entry_ptrs, tl.zeros_like(index) + row, mask=mask)
    tl.store(entry_ptrs + 1, my_first + index * my_tiles // tl.maximum(my_count, 1), mask=mask)
    tl.store(entry_ptrs + 2, my_first + (index + 1) * my_tiles // tl.maximum(my_count, 1), mask=mask)
    tl.store(entry_ptrs + 3, index, mask=mask)
    tl.store(entry_ptrs + 4, tl.zeros_like(index) + my_count, mask=mask)

    unused = tl.sum(counts) + row + tl.arange(0, BLOCK_REST) * B
    tl.store(chunks_ptr + unused * 5, tl.full([BLOCK_REST], -1, tl.int32), mask=unused < capacity)
    heads = tl.arange(0, BLOCK_HKV)
    tl.store(arrivals_ptr + row * HKV + heads, tl.zeros([BLOCK_HKV], tl.int32), mask=heads < HKV)


def decode_attention_plan_triton(lengths_B, num_kv_heads, head_dim, dtype, window=None, options=None) -> DecodePlan:
    options = options or default_decode_options(head_dim, dtype)
    B, device = len(lengths_B), lengths_B.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if lengths_B.is_cuda else 4
    target_chunks = max(num_sms * options.ctas_per_sm // num_kv_heads, 1)
    capacity = B + target_chunks  # sum of ceil(tiles / share) <= B + total / share
    chunks_S5 = torch.empty((capacity, 5), dtype=torch.int32, device=device)
    arrivals_BH = torch.empty((B, num_kv_heads), dtype=torch.int32, device=device)
    _decode_plan_kernel[(B,)](
        lengths_B, chunks_S5, arrivals_BH, B, capacity, target_chunks, options.min_tiles,
        HKV=num_kv_heads, WINDOW=window or 0, BLOCK_N=options.block_n, BLOCK_B=_next_power_of_2(B),
        BLOCK_CHUNKS=_next_power_of_2(target_chunks + 1), BLOCK_REST=_next_power_of_2(_cdiv(capacity, B)),
        BLOCK_HKV=_next_power_of_2(num_kv_heads), num_warps=4, **_pdl(),
    )
    return DecodePlan(chunks_S5, arrivals_BH, window, options)


def paged_decode_attention(
    q_BHD: Tensor, k_pool_HND: Tensor, v_pool_HND: Tensor, page_table_BP: Tensor, lengths_B: Tensor, page_size: int,
    scale: float, window: int | None = None, softcap: float | None = None, plan: DecodePlan | None = None,
) -> Tensor:
    """One query token per row over its paged keys and values -> o_BHD, in q's dtype.

    - `k_pool_HND`, `v_pool_HND` [num_kv_heads, num_pages * page_size, D], D = 64 ... 512, any strides but the last.
      H / num_kv_heads may be any whole number: the query group is padded inside the tile.
    - `page_table_BP` int32 physical pages in a row's order; entries past the row's last page are never used as pages.
    - `lengths_B`: keys each row sees, at least 1; the query sits at position length - 1.
    - `window`: the query sees the last `window` keys only. `softcap`: scores become softcap * tanh(scores / softcap).
    - `plan`: from `decode_attention_plan` with the same lengths and window; built here if missing.

    A row is split over many programs; the last of them to finish merges the partial results by log-sum-exp in a fixed
    order, so the same input gives the same bits.
    """
    if not _use_triton(q_BHD):
        return paged_decode_attention_reference(
            q_BHD, k_pool_HND, v_pool_HND, page_table_BP, lengths_B, page_size, scale, window, softcap
        )
    return paged_decode_attention_triton(
        q_BHD, k_pool_HND, v_pool_HND, page_table_BP, lengths_B, page_size, scale, window, softcap, plan
    )


def paged_decode_attention_reference(
    q_BHD, k_pool_HND, v_pool_HND, page_table_BP, lengths_B, page_size, scale, window=None, softcap=None, plan=None
):
    B, H, D = q_BHD.shape
    num_kv_heads = len(k_pool_HND)
    longest = int(lengths_B.max())
    n = torch.arange(longest, device=q_BHD.device)
    visible_BN = n < lengths_B[:, None]
    if window is not None:
        visible_BN &= n >= lengths_B[:, None] - window
    slots_BN = torch.where(visible_BN, page_table_BP[:, n // page_size].long() * page_size + n % page_size, 0)
    k_BHND = k_pool_HND[:, slots_BN].transpose(0, 1).float()
    v_BHND = v_pool_HND[:, slots_BN].transpose(0, 1).float()
    q_BHGD = q_BHD.view(B, num_kv_heads, H // num_kv_heads, D).float()
    scores_BHGN = q_BHGD @ k_BHND.transpose(-1, -2) * scale
    if softcap is not None:
        scores_BHGN = softcap * torch.tanh(scores_BHGN / softcap)
    weights_BHGN = scores_BHGN.masked_fill(~visible_BN[:, None, None], -torch.inf).softmax(-1)
    v_BHND = v_BHND.masked_fill(~visible_BN[:, None, :, None], 0.0)  # a hidden slot may hold anything, NaN too
    return (weights_BHGN @ v_BHND).reshape(B, H, D).to(q_BHD.dtype)


@_jit
def _tile_pages(page_table_ptr, tile, length, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a tile's keys: one for all if a tile fits into a page, else one for each key."""
    if BLOCK_N <= PAGE_SIZE:
        return tl.load(page_table_ptr + tile * BLOCK_N // PAGE_SIZE, mask=tile * BLOCK_N < length, other=0)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(page_table_ptr + n // PAGE_SIZE, mask=n < length, other=0)


@_jit
def _paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table_ptr, lengths_ptr, chunks_ptr, arrivals_ptr, partial_out_ptr,
    partial_lse_ptr, scale, softcap, q_stride_b, q_stride_h, k_stride_h, k_stride_n, v_stride_h, v_stride_n,
    table_stride, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """One program: one chunk of one row's keys, for the G query heads of one KV head. Softmax in base 2."""
    _wait_for_inputs(PDL)
    LOG2E: tl.constexpr = 1.4426950408889634
    entry = tl.program_id(0) // HKV
    kv_head = tl.program_id(0) % HKV
    row = tl.load(chunks_ptr + entry * 5)
    if row < 0:
        return
    begin = tl.load(chunks_ptr + entry * 5 + 1)
    end = tl.load(chunks_ptr + entry * 5 + 2)
    index = tl.load(chunks_ptr + entry * 5 + 3)
    count = tl.load(chunks_ptr + entry * 5 + 4)
    length = tl.load(lengths_ptr + row)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    mask_gd = (g < G)[:, None] & (d < D)[None, :]
    q_ptrs = q_ptr + row * q_stride_b + (kv_head * G + g)[:, None] * q_stride_h + d[None, :]
    q = tl.load(q_ptrs, mask=mask_gd, other=0.0)
    k_ptr += kv_head.to(tl.int64) * k_stride_h
    v_ptr += kv_head.to(tl.int64) * v_stride_h
    page_table_ptr += row.to(tl.int64) * table_stride

    # The next tile's pages are loaded one tile ahead: behind an address that is still in flight, K and V loads could
    # not be pipelined.
    next_page = _tile_pages(page_table_ptr, begin, length, PAGE_SIZE, BLOCK_N)
    running_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    weight_sums = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)  # summed over the tile's width once, after the loop
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in tl.range(begin, end, num_stages=NUM_STAGES):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = n < length
        slot = next_page.to(tl.int64) * PAGE_SIZE + n % PAGE_SIZE
        next_page = _tile_pages(page_table_ptr, tile + 1, length, PAGE_SIZE, BLOCK_N)
        mask_nd = visible[:, None] & (d < D)[None, :]
        # A slot past the length may hold anything: K is masked to spare the read, V because 0 * NaN is NaN.
        k = tl.load(k_ptr + slot[:, None] * k_stride_n + d[None, :], mask=mask_nd, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            decay = tl.exp2(tl.abs(scores / softcap) * (-2.0 * LOG2E))
            scores = tl.where(scores < 0, -softcap, softcap) * (1.0 - decay) / (1.0 + decay)
        if WINDOW > 0:
            visible = visible & (n >= length - WINDOW)
        scores = tl.where(visible[None, :], scores * LOG2E, -float("inf"))
        # Every tile of a chunk holds a visible key, so the maximum is finite.
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        weight_sums = weight_sums * decay[:, None] + weights
        v = tl.load(v_ptr + slot[:, None] * v_stride_n + d[None, :], mask=mask_nd, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        running_max = new_max

    running_sum = tl.sum(weight_sums, axis=1)
    acc = acc / running_sum[:, None]
    out_ptrs = out_ptr + ((row * HKV + kv_head) * G + g)[:, None] * D + d[None, :]
    if count == 1:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_gd)
    else:
        partial_out_ptrs = partial_out_ptr + g[:, None] * D + d[None, :]
        partial = entry * HKV + kv_head
        tl.store(partial_out_ptrs + partial * (G * D), acc, mask=mask_gd)
        tl.store(partial_lse_ptr + partial * G + g, running_max + tl.log2(running_sum), mask=g < G)
        # Publish the partial result, then count: the last program to arrive sees all of them and merges in chunk order.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + row * HKV + kv_head, 1, sem="acq_rel")
        if arrived == count - 1:
            tl.store(arrivals_ptr + row * HKV + kv_head, 0)
            first = (entry - index) * HKV + kv_head
            merged_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
            merged_sum = tl.zeros([BLOCK_G], tl.float32)
            merged = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            for i in tl.range(0, count, loop_unroll_factor=4):
                other = first + i * HKV
                lse = tl.load(partial_lse_ptr + other * G + g, mask=g < G, other=0.0, cache_modifier=".cg")
                part = tl.load(partial_out_ptrs + other * (G * D), mask=mask_gd, other=0.0, cache_modifier=".cg")
                new_max = tl.maximum(merged_max, lse)
                decay = tl.exp2(merged_max - new_max)
                weight = tl.exp2(lse - new_max)
                merged_sum = merged_sum * decay + weight
                merged = merged * decay[:, None] + part * weight[:, None]
                merged_max = new_max
            merged = merged / merged_sum[:, None]
            tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask_gd)


def paged_decode_attention_triton(
    q_BHD, k_pool_HND, v_pool_HND, page_table_BP, lengths_B, page_size, scale, window=None, softcap=None, plan=None
):
    B, H, D = q_BHD.shape
    num_kv_heads = len(k_pool_HND)
    group = H // num_kv_heads
    assert H == group * num_kv_heads and q_BHD.stride(2) == k_pool_HND.stride(2) == v_pool_HND.stride(2) == 1
    assert page_size >= 16 and page_size & (page_size - 1) == 0 and page_table_BP.stride(1) == 1
    if plan is None:
        plan = decode_attention_plan_triton(lengths_B, num_kv_heads, D, q_BHD.dtype, window)
    assert plan.window == window, f"the plan was built for window {plan.window}, not {window}"
    options, capacity = plan.options, len(plan.chunks_S5)
    out_BHD = q_BHD.new_empty((B, H, D))
    partial_out = torch.empty((capacity, H, D), dtype=torch.float32, device=q_BHD.device)
    partial_lse = torch.empty((capacity, H), dtype=torch.float32, device=q_BHD.device)
    _paged_decode_kernel[(capacity * num_kv_heads,)](
        q_BHD, k_pool_HND, v_pool_HND, out_BHD, page_table_BP, lengths_B, plan.chunks_S5, plan.arrivals_BH, partial_out,
        partial_lse, scale, softcap or 0.0, *q_BHD.stride()[:2], *k_pool_HND.stride()[:2], *v_pool_HND.stride()[:2],
        page_table_BP.stride(0), HKV=num_kv_heads, G=group, D=D, PAGE_SIZE=page_size, WINDOW=window or 0,
        SOFTCAP=softcap is not None, BLOCK_G=max(_next_power_of_2(group), 16), BLOCK_D=_next_power_of_2(D),
        BLOCK_N=options.block_n, NUM_STAGES=options.num_stages, num_warps=options.num_warps, **_pdl(),
    )
    return out_BHD


# ---------------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------------


def sample(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, seed_B: Tensor,
    positions_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row -> (tokens_B int64, logprobs_B fp32, full_logprobs_B fp32).

    - `logits_BV` fp32, bf16 or fp16, any row stride. `temperature_B` fp32: 0 is greedy (lowest id among equals, both
      log-probabilities at temperature 1). `top_k_B` int32, 0 off; `top_p_B` fp32, 1 off; `min_p_B` fp32, 0 off.
    - Filters act on logits / temperature in Hugging Face's order: top_k, then top_p over what top_k left (the smallest
      set whose mass reaches top_p), then min_p (probability >= min_p * the largest). Tokens equal to the last one kept
      are kept.
    - The token is the argmax over the kept set of logits / temperature + Gumbel noise. The noise is a function of
      (`seed_B`, `positions_B`, token id) alone: not of batch size, slot or the other rows.
    - `logprobs_B` are those of the distribution sampled from (filtered and renormalized), `full_logprobs_B` those of
      softmax(logits / temperature).
    - A row with a NaN or +inf logit, or with nothing but -inf, gets token -1 and NaN log-probabilities.
    """
    run = sample_triton if _use_triton(logits_BV) else sample_reference
    return run(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, positions_B)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed integer tensor."""
    width = 8 * x.element_size()
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _mix64_reference(x: Tensor) -> Tensor:
    """splitmix64's finalizer (Steele, Lea, Flood 2014), int64 with wrap-around."""
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _mix32_(x: Tensor) -> Tensor:
    """The lowbias32 integer hash (Wellons, "Prospecting for Hash Functions"), in place on int32 with wrap-around."""
    x.bitwise_xor_(_shift_right(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shift_right(x, 15)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_(_shift_right(x, 16))


def gumbel_noise_reference(seed_B: Tensor, positions_B: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] fp32, a counter-based function of (seed, position, token id)."""
    mixed_B = _mix64_reference(_mix64_reference(seed_B.long()) + positions_B.long())
    key0_B1 = (mixed_B & 0xFFFFFFFF).to(torch.int32)[:, None]  # the cast keeps the low 32 bits
    key1_B1 = _shift_right(mixed_B, 32).to(torch.int32)[:, None]
    tokens_V = torch.arange(vocab_size, dtype=torch.int32, device=seed_B.device) * (0x9E3779B1 - 2**32)
    bits_BV = _mix32_(_mix32_(tokens_V ^ key0_B1).bitwise_xor_(key1_B1))
    # 23 bits: with 24, adding a half would round up to 1 and the noise would be infinite.
    uniform_BV = _shift_right(bits_BV, 9).float().add_(0.5).mul_(2.0**-23)
    return uniform_BV.log_().neg_().log_().neg_()


def _filter_threshold_reference(scaled_V: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The lowest scaled logit that the filters keep."""
    if 0 < top_k < len(scaled_V):
        scaled_V = scaled_V[scaled_V >= scaled_V.topk(top_k).values[-1]]
    ordered = scaled_V.sort(descending=True).values
    threshold = ordered[-1]
    if top_p < 1.0:
        mass = (ordered - ordered[0]).double().exp_().cumsum(0)
        reached = int((mass < top_p * mass[-1]).sum())
        threshold = ordered[min(reached, len(ordered) - 1)]
    if min_p > 0.0:
        threshold = torch.maximum(threshold, ordered[0] + math.log(min_p))
    return threshold


def _logsumexp(x: Tensor) -> Tensor:
    """torch.logsumexp at a third of its time on a CPU; NaN, not infinite, where x holds +inf or nothing but -inf."""
    top = x.amax(-1, keepdim=True)
    return (x - top).exp_().sum(-1).log_() + top[..., 0]


def sample_reference(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, positions_B):
    V = logits_BV.shape[1]
    drawn_B = temperature_B > 0
    logits_BV = logits_BV.float()
    scaled_BV = logits_BV * torch.where(drawn_B, 1.0 / temperature_B, 1.0)[:, None]
    full_lse_B = lse_B = _logsumexp(scaled_BV)
    broken_B = ~full_lse_B.isfinite()
    kept_BV = scaled_BV
    filtered_B = drawn_B & ~broken_B & (((top_k_B > 0) & (top_k_B < V)) | (top_p_B < 1.0) | (min_p_B > 0.0))
    if filtered_B.any():
        kept_BV, lse_B = scaled_BV.clone(), full_lse_B.clone()
        for b in filtered_B.nonzero().flatten().tolist():
            threshold = _filter_threshold_reference(scaled_BV[b], int(top_k_B[b]), float(top_p_B[b]), float(min_p_B[b]))
            kept_BV[b].masked_fill_(scaled_BV[b] < threshold, -torch.inf)
            lse_B[b] = _logsumexp(kept_BV[b])
    noisy_BV = kept_BV
    if drawn_B.any():
        noise_BV = gumbel_noise_reference(seed_B, positions_B, V)
        noisy_BV = noise_BV.mul_(drawn_B[:, None]).add_(kept_BV)
    tokens_B = noisy_BV.argmax(-1)
    chosen_B = scaled_BV.gather(1, tokens_B[:, None])[:, 0]
    nan = torch.nan
    return (
        tokens_B.masked_fill(broken_B, -1),
        (chosen_B - lse_B).masked_fill(broken_B, nan),
        (chosen_B - full_lse_B).masked_fill(broken_B, nan),
    )


@_jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@_jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@_jit
def _exponential_noise(seed, position, tokens):
    """Standard exponential noise of one row; minus its logarithm is `gumbel_noise_reference`, from the same bits."""
    mixed = _mix64(_mix64(seed.to(tl.uint64)) + position.to(tl.uint64))
    key0 = (mixed & 0xFFFFFFFF).to(tl.uint32)
    key1 = (mixed >> 32).to(tl.uint32)
    bits = _mix32(_mix32((tokens.to(tl.uint32) * 0x9E3779B1) ^ key0) ^ key1)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(uniform)


@_jit
def _float_to_key(x, DTYPE: tl.constexpr):
    """Floats of a dtype as int64 keys in the same order, one step per representable value."""
    if DTYPE == tl.float32:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        bits = x.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int64)


@_jit
def _key_to_float(key, DTYPE: tl.constexpr):
    key = key.to(tl.int32)
    if DTYPE == tl.float32:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        bits = key ^ ((key >> 31) & 0x7FFF)
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@_jit
def _threshold_search(
    logits_ptr, V, lo, hi, goal, top, inv_temperature, MASS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key t in [lo, hi) for which the logits >= t reach `goal`: a count, or a share of the mass above lo.

    lo reaches the goal, hi does not. Each pass over the row weighs WAYS keys between them, so log(hi - lo) / log(WAYS)
    passes find the exact key; no sort, and sums in a fixed order.
    """
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK)[None, :]  # two-dimensional from the load on: no change of layout inside the loop
    ways = tl.arange(0, WAYS)
    target = goal
    if MASS:
        target = -1.0  # known after the first pass, whose lowest key is lo
    while hi - lo > 1:
        step = (hi - lo + WAYS - 1) // WAYS
        keys = tl.minimum(lo + ways * step, hi)
        floors = _key_to_float(keys, DTYPE)[:, None]
        totals = tl.zeros([WAYS, BLOCK], tl.float32)
        ahead = tl.load(logits_ptr + lanes, mask=lanes < V, other=-float("inf"))
        for start in tl.range(0, V, BLOCK):
            x = ahead.to(tl.float32)
            following = start + BLOCK + lanes
            ahead = tl.load(logits_ptr + following, mask=following < V, other=-float("inf"))
            weight = tl.full([1, BLOCK], 1.0, tl.float32)
            if MASS:
                weight = tl.exp2((x - top) * (inv_temperature * 1.4426950408889634))
            totals += tl.where(x >= floors, weight, 0.0)
        total = tl.sum(totals, axis=1)
        if MASS:
            if target < 0:
                target = goal * tl.max(total)
        reached = total >= target
        new_lo = tl.max(tl.where(reached, keys, lo))
        hi = tl.min(tl.where(reached, hi, keys))
        lo = new_lo
    return lo


@_jit
def _sample_threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, V, logits_stride,
    WAYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program per row: the lowest logit that the row's filters keep; rows without filters leave at once."""
    _wait_for_inputs(PDL)
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    use_top_k = (top_k > 0) & (top_k < V)
    threshold = -float("inf")
    if (temperature > 0) & (use_top_k | (top_p < 1.0) | (min_p > 0.0)):
        logits_ptr += row.to(tl.int64) * logits_stride
        inv_temperature = tl.div_rn(1.0, temperature)
        lanes = tl.arange(0, BLOCK)
        lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
            x = tl.load(logits_ptr + start + lanes, mask=start + lanes < V, other=-float("inf")).to(tl.float32)
            lane_max = tl.maximum(lane_max, x)
        top = tl.max(lane_max)
        lowest = _float_to_key(top * 0.0 - float("inf"), DTYPE)
        lo = lowest
        hi = _float_to_key(top, DTYPE) + 1
        if use_top_k:
            if top_k <= BLOCK:
                # k lanes hold a logit of at least the k-th largest lane maximum: the search starts there.
                bound = hi
                while bound - lo > 1:
                    middle = lo + (bound - lo) // 2
                    if tl.sum((lane_max >= _key_to_float(middle, DTYPE)).to(tl.int32)) >= top_k:
                        lo = middle
                    else:
                        bound = middle
            count = top_k.to(tl.float32)
            lo = _threshold_search(logits_ptr, V, lo, hi, count, top, inv_temperature, False, WAYS, BLOCK)
        if top_p < 1.0:
            # What lies 32 nats below the top weighs less than fp32 resolves, over any vocabulary.
            lo = tl.maximum(lo, _float_to_key(top - 32.0 * temperature, DTYPE))
            lo = _threshold_search(logits_ptr, V, lo, hi, top_p, top, inv_temperature, True, WAYS, BLOCK)
        if lo > lowest:
            threshold = _key_to_float(lo, DTYPE)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + temperature * tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


@_jit
def _sample_slice_kernel(
    logits_ptr, temperature_ptr, threshold_ptr, seed_ptr, positions_ptr, stats_ptr, winners_ptr, V, logits_stride,
    num_slices, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program per row and slice of the vocabulary: maximum, masses, and the best noisy token of the slice."""
    _wait_for_inputs(PDL)
    row = tl.program_id(0)
    piece = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    threshold = tl.load(threshold_ptr + row)
    tokens = piece * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < V
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + tokens, mask=mask, other=-float("inf")).to(tl.float32)
    kept = x >= threshold
    scaled = x
    if temperature > 0:
        scaled = x * tl.div_rn(1.0, temperature)
    top = tl.max(scaled)
    weights = tl.exp(scaled - tl.where(top == -float("inf"), 0.0, top))
    score = x
    if temperature > 0:
        # exp(s) / E grows with s - log(E), and -log(E) is the Gumbel noise: one logarithm less for each token.
        score = weights / _exponential_noise(tl.load(seed_ptr + row), tl.load(positions_ptr + row), tokens)
    score = tl.where(kept & mask, score, -float("inf"))
    best, winner = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    if temperature > 0:
        best = tl.where(best > 0, top + tl.log(best), -float("inf"))
    broken = tl.max((mask & ((x != x) | (x == float("inf")))).to(tl.int32))
    stats_ptr += (row * num_slices + piece) * 4
    tl.store(stats_ptr, top)
    tl.store(stats_ptr + 1, tl.sum(weights))
    tl.store(stats_ptr + 2, tl.sum(tl.where(kept, weights, 0.0)))
    tl.store(stats_ptr + 3, best)
    tl.store(winners_ptr + row * num_slices + piece, tl.where(broken > 0, -1, piece * BLOCK + winner))


@_jit
def _sample_merge_kernel(
    logits_ptr, temperature_ptr, stats_ptr, winners_ptr, tokens_ptr, logprobs_ptr, full_logprobs_ptr, logits_stride,
    num_slices, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):
    _wait_for_inputs(PDL)
    row = tl.program_id(0)
    pieces = tl.arange(0, BLOCK_S)
    mask = pieces < num_slices
    stats_ptrs = stats_ptr + (row * num_slices + pieces) * 4
    tops = tl.load(stats_ptrs, mask=mask, other=-float("inf"))
    full_masses = tl.load(stats_ptrs + 1, mask=mask, other=0.0)
    kept_masses = tl.load(stats_ptrs + 2, mask=mask, other=0.0)
    bests = tl.load(stats_ptrs + 3, mask=mask, other=-float("inf"))
    winners = tl.load(winners_ptr + row * num_slices + pieces, mask=mask, other=0x7FFFFFFF)
    top = tl.max(tops)
    broken = (tl.min(winners) < 0) | (top == -float("inf"))
    token = tl.min(tl.where(bests == tl.max(bests), winners, 0x7FFFFFFF))
    token = tl.where(broken, 0, token)
    rescale = tl.exp(tops - top)
    temperature = tl.load(temperature_ptr + row)
    scaled = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token).to(tl.float32)
    if temperature > 0:
        scaled = scaled * tl.div_rn(1.0, temperature)
    logprob = scaled - top - tl.log(tl.sum(kept_masses * rescale))
    full_logprob = scaled - top - tl.log(tl.sum(full_masses * rescale))
    tl.store(tokens_ptr + row, tl.where(broken, -1, token).to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(broken, float("nan"), logprob))
    tl.store(full_logprobs_ptr + row, tl.where(broken, float("nan"), full_logprob))


def sample_triton(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, positions_B):
    B, V = logits_BV.shape
    assert logits_BV.stride(1) == 1
    block, stride, device = 4096, logits_BV.stride(0), logits_BV.device
    num_slices = _cdiv(V, block)
    threshold_B = torch.empty(B, dtype=torch.float32, device=device)
    stats = torch.empty((B, num_slices, 4), dtype=torch.float32, device=device)
    winners = torch.empty((B, num_slices), dtype=torch.int32, device=device)
    tokens_B = torch.empty(B, dtype=torch.int64, device=device)
    logprobs_B, full_logprobs_B = torch.empty_like(threshold_B), torch.empty_like(threshold_B)
    _sample_threshold_kernel[(B,)](
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, threshold_B, V, stride, WAYS=8, BLOCK=4096,
        num_warps=32, **_pdl(),
    )
    _sample_slice_kernel[(B, num_slices)](
        logits_BV, temperature_B, threshold_B, seed_B, positions_B, stats, winners, V, stride, num_slices,
        BLOCK=block, num_warps=8, **_pdl(),
    )
    _sample_merge_kernel[(B,)](
        logits_BV, temperature_B, stats, winners, tokens_B, logprobs_B, full_logprobs_B, stride, num_slices,
        BLOCK_S=_next_power_of_2(num_slices), num_warps=1, **_pdl(),
    )
    return tokens_B, logprobs_B, full_logprobs_B


# ---------------------------------------------------------------------------------------------------------------------
# Skinny matrix products: few tokens against a whole weight
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearOptions:
    """Tiles of the skinny matrix product."""

    block_n: int = 128  # weight rows per program; of each half in gate_up_silu
    block_k: int = 64
    split_k: int = 1  # programs that share the sum over K of one tile
    num_warps: int = 4
    num_stages: int = 4  # weight tiles in flight per program
    prefetch_steps: int = 8  # weight tiles asked for while the kernel before still runs, under PDL


# (N, K, most tokens) -> options found on an H200, or None where cuBLAS is faster. Others take the rule below.
TUNED_LINEAR: dict[tuple[int, int, int], LinearOptions | None] = {}

MAX_SKINNY_TOKENS = 256


def linear_options(T: int, N: int, K: int, gated: bool = False) -> LinearOptions | None:
    """Options for T tokens against a weight of N rows; None means that F.linear (cuBLAS) is used."""
    fitting = [tokens for n, k, tokens in TUNED_LINEAR if (n, k) == (N, K) and tokens >= T]
    if fitting:
        return TUNED_LINEAR[N, K, min(fitting)]
    if T > 128 or N > 65536 or K < 256:
        return None
    block_n = 64 if gated else 128
    tiles = _cdiv(N // 2 if gated else N, block_n)
    # All programs should run at once on Hopper's 132 SMs, and each deserves a few steps of its pipeline.
    split_k = max(1, min(round(160 / tiles), K // 64 // 4, 16))
    return LinearOptions(block_n=block_n, split_k=split_k, num_warps=8 if T > 64 and not gated else 4)


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, residual_TN: Tensor | None = None,
    options: LinearOptions | None = None,
) -> Tensor:
    """`x @ weight.T (+ bias) (+ residual)` -> y_TN. Sums in fp32 and rounds once; the same input gives the same bits.

    The Triton kernel serves 16-bit tensors of at most 256 rows on CUDA where `linear_options` has a tile for them (or
    `options` names one); everything else is F.linear.
    """
    if options is None:
        options = _options_for(x_TK, weight_NK)
    if options is None:
        return linear_reference(x_TK, weight_NK, bias_N, residual_TN)
    return linear_triton(x_TK, weight_NK, bias_N, residual_TN, options)


def gate_up_silu(x_TK: Tensor, gate_up_I2K: Tensor, options: LinearOptions | None = None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) -> [T, I], for the packed weight whose first I rows are the gate."""
    if options is None:
        options = _options_for(x_TK, gate_up_I2K, gated=True)
    if options is None:
        return silu_mul(F.linear(x_TK, gate_up_I2K))
    return gate_up_silu_triton(x_TK, gate_up_I2K, options)


def linear_add_norm(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, norm_weight_N: Tensor, eps: float,
    options: LinearOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """A projection to the hidden size and the norm behind it -> (normed_TN, total_TN), total = x @ weight.T + residual.

    The projection leaves its split sums over K in fp32 and the norm adds them up: no program waits for another.
    """
    if options is None:
        options = _options_for(x_TK, weight_NK)
    if options is None:
        return rms_norm(F.linear(x_TK, weight_NK), norm_weight_N, eps, residual_TN)
    return linear_add_norm_triton(x_TK, weight_NK, residual_TN, norm_weight_N, eps, options)


def _options_for(x_TK: Tensor, weight_NK: Tensor, gated: bool = False) -> LinearOptions | None:
    if not _use_triton(x_TK) or x_TK.dtype not in (torch.bfloat16, torch.float16) or len(x_TK) > MAX_SKINNY_TOKENS:
        return None
    return linear_options(len(x_TK), *weight_NK.shape, gated)


def linear_reference(x_TK, weight_NK, bias_N=None, residual_TN=None) -> Tensor:
    y_TN = F.linear(x_TK, weight_NK, bias_N)
    return y_TN if residual_TN is None else y_TN + residual_TN


def gate_up_silu_reference(x_TK, gate_up_I2K) -> Tensor:
    return silu_mul_reference(F.linear(x_TK, gate_up_I2K))


def linear_add_norm_reference(x_TK, weight_NK, residual_TN, norm_weight_N, eps):
    return rms_norm_reference(F.linear(x_TK, weight_NK), norm_weight_N, eps, residual_TN)


@_jit
def _store_linear(
    acc, acc_up, bias_ptr, residual_ptr, y_ptr, n, t, T, residual_stride,
    N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):
    mask = (n < N)[:, None] & (t < T)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + t[None, :] * residual_stride + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + t[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


@_jit
def _prefetch_rows(row_ptrs, begin, end, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):
    """Ask L2 for the first STEPS tiles of the columns begin ... end, one 128-byte line per 64 columns."""
    for i in tl.static_range(STEPS * BLOCK_K // 64):
        lines = row_ptrs + tl.minimum(begin + i * 64, end - 64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@_jit
def _skinny_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, arrivals_ptr, T, x_stride, weight_stride,
    residual_stride, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, KEEP_SPLIT: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH_STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y^T = weight x^T: weight rows lie along the tensor core's 64-row side, the few tokens along its narrow one.

    KEEP_SPLIT writes the fp32 sums of each split to y [SPLIT_K, T, N]; otherwise the last program of a tile to finish
    adds its splits up, in order. GATED: weight rows [N gates | N ups].
    """
    tile_n, split, tile_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, last = split * steps // SPLIT_K, (split + 1) * steps // SPLIT_K
    if PDL and K >= 64:
        # Weights don't depend on the kernel before: fetching them while it drains is no read of its output.
        row_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * weight_stride
        begin, end = first * BLOCK_K, tl.minimum(last * BLOCK_K, K)
        _prefetch_rows(row_ptrs, begin, end, BLOCK_K, PREFETCH_STEPS)
        if GATED:
            _prefetch_rows(row_ptrs + N * weight_stride.to(tl.int64), begin, end, BLOCK_K, PREFETCH_STEPS)
    _wait_for_inputs(PDL)
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    x_columns = x_ptr + t[None, :] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    acc_up = acc
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask_w = (n < N)[:, None] & (k < K)[None, :]
        x = tl.load(x_columns + k[:, None], mask=(t < T)[None, :] & (k < K)[:, None], other=0.0)
        w_ptrs = weight_rows + k[None, :]
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
        else:
            w = tl.load(w_ptrs, mask=mask_w, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            w_ptrs += N * weight_stride.to(tl.int64)
            if N % BLOCK_N == 0 and K % BLOCK_K == 0:
                w_up = tl.load(w_ptrs, eviction_policy="evict_first")
            else:
                w_up = tl.load(w_ptrs, mask=mask_w, other=0.0, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee")

    if KEEP_SPLIT:
        mask = (n < N)[:, None] & (t < T)[None, :]
        tl.store(y_ptr + (split * T + t)[None, :] * N + n[:, None], acc, mask=mask)
    elif SPLIT_K == 1:
        _store_linear(
            acc, acc_up, bias_ptr, residual_ptr, y_ptr, n, t, T, residual_stride, N, GATED, HAS_BIAS, HAS_RESIDUAL
        )
    else:
        tile = tile_t * tl.num_programs(0) + tile_n
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        halves: tl.constexpr = 2 if GATED else 1
        partial_ptr += tile.to(tl.int64) * (SPLIT_K * halves * BLOCK_N * BLOCK_T) + offsets
        tl.store(partial_ptr + split * (halves * BLOCK_N * BLOCK_T), acc)
        if GATED:
            tl.store(partial_ptr + (split * halves + 1) * (BLOCK_N * BLOCK_T), acc_up)
        tl.debug_barrier()  # all of the program's partial sums are out before it counts itself
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            tl.store(arrivals_ptr + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            total_up = total
            for i in tl.range(0, SPLIT_K):
                total += tl.load(partial_ptr + i * (halves * BLOCK_N * BLOCK_T), cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(partial_ptr + (i * halves + 1) * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            _store_linear(
                total, total_up, bias_ptr, residual_ptr, y_ptr, n, t, T, residual_stride, N, GATED, HAS_BIAS,
                HAS_RESIDUAL,
            )


@_jit
def _add_norm_kernel(
    partial_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, eps, T, residual_stride,
    N: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    _wait_for_inputs(PDL)
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partial_ptr + (split * T + row) * N + cols, mask=mask, other=0.0)
    total = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * N + cols, total, mask=mask)
    total = total.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total) / N + eps)
    normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * N + cols, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask)


_arrivals: dict[torch.device, Tensor] = {}


def _tile_arrivals(device: torch.device, tiles: int) -> Tensor:
    """Counters of finished splits: zero between launches, shared by all products of a device (one stream at a time)."""
    if device not in _arrivals or len(_arrivals[device]) < tiles:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("split-K linear: run the step once before capturing it, so that its counters exist")
        _arrivals[device] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
    return _arrivals[device]


def _launch_skinny_linear(x_TK, weight, bias_N, residual_TN, y, N, gated, keep_split, options: LinearOptions) -> None:
    T, K = x_TK.shape
    assert x_TK.stride(1) == weight.stride(1) == 1 and weight.shape[1] == K
    assert residual_TN is None or residual_TN.stride(1) == 1
    block_t = min(max(_next_power_of_2(T), 16), 128 if gated else 256)
    tiles_n, tiles_t = _cdiv(N, options.block_n), _cdiv(T, block_t)
    partial = arrivals = x_TK
    if options.split_k > 1 and not keep_split:
        size = tiles_n * tiles_t * options.split_k * (2 if gated else 1) * options.block_n * block_t
        partial = torch.empty(size, dtype=torch.float32, device=x_TK.device)
        arrivals = _tile_arrivals(x_TK.device, tiles_n * tiles_t)
    _skinny_linear_kernel[(tiles_n, options.split_k, tiles_t)](
        x_TK, weight, x_TK if bias_N is None else bias_N, x_TK if residual_TN is None else residual_TN, y, partial,
        arrivals, T, x_TK.stride(0), weight.stride(0), 0 if residual_TN is None else residual_TN.stride(0), N=N, K=K,
        GATED=gated, HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_TN is not None, KEEP_SPLIT=keep_split,
        SPLIT_K=options.split_k, BLOCK_N=options.block_n, BLOCK_T=block_t, BLOCK_K=options.block_k,
        NUM_STAGES=options.num_stages, PREFETCH_STEPS=options.prefetch_steps, num_warps=options.num_warps, **_pdl(),
    )


def linear_triton(x_TK, weight_NK, bias_N=None, residual_TN=None, options: LinearOptions = LinearOptions()) -> Tensor:
    N = len(weight_NK)
    y_TN = x_TK.new_empty((len(x_TK), N))
    _launch_skinny_linear(x_TK, weight_NK, bias_N, residual_TN, y_TN, N, False, False, options)
    return y_TN


def gate_up_silu_triton(x_TK, gate_up_I2K, options: LinearOptions = LinearOptions(block_n=64)) -> Tensor:
    I = len(gate_up_I2K) // 2
    y_TI = x_TK.new_empty((len(x_TK), I))
    _launch_skinny_linear(x_TK, gate_up_I2K, None, None, y_TI, I, True, False, options)
    return y_TI


def linear_add_norm_triton(x_TK, weight_NK, residual_TN, norm_weight_N, eps, options: LinearOptions = LinearOptions()):
    T, N = len(x_TK), len(weight_NK)
    partial_STN = torch.empty((options.split_k, T, N), dtype=torch.float32, device=x_TK.device)
    _launch_skinny_linear(x_TK, weight_NK, None, None, partial_STN, N, False, True, options)
    total_TN, normed_TN = torch.empty_like(residual_TN), torch.empty_like(residual_TN)
    block = _next_power_of_2(N)
    _add_norm_kernel[(T,)](
        partial_STN, residual_TN, norm_weight_N, normed_TN, total_TN, eps, T, residual_TN.stride(0), N=N,
        SPLIT_K=options.split_k, BLOCK=block, num_warps=min(max(block // 256, 1), 16), **_pdl(),
    )
    return normed_TN, total_TN
