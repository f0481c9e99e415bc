"""The fused elementwise kernels of a decode step: norms, gate, rope with the KV write, and the step's two ends (flex_triton.py
says what all kernel files have in common).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flex_triton import cdiv, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs


# ---------------------------------------------------------------------------------------------------------------------
# RMS norm with the residual add in front
# ---------------------------------------------------------------------------------------------------------------------


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (normed, total): total = x (+ residual), rounded to x.dtype, and normed = weight * (total / rms(total)).

    The square mean is taken in fp32 and the normed value is rounded to x.dtype before the weight multiplies it, the
    order of Hugging Face's Llama and Qwen norms. Without a residual `total` is x itself.
    """
    run = rms_norm_triton if use_triton(x_TC) else rms_norm_reference
    return run(x_TC, weight_C, eps, residual_TC)


def rms_norm_reference(x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None = None):
    total_TC = x_TC if residual_TC is None else x_TC + residual_TC
    wide_TC = total_TC.float()
    normed_TC = wide_TC * torch.rsqrt(wide_TC.square().mean(-1, keepdim=True) + eps)
    return (weight_C * normed_TC.to(x_TC.dtype)).to(x_TC.dtype), total_TC


@jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, eps, x_stride, residual_stride,
    C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
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
    block = next_power_of_2(C)
    if T:
        _rms_norm_kernel[(T,)](
            x_TC, residual, weight_C, y_TC, total_TC, eps, x_TC.stride(0), residual.stride(0),
            C=C, HAS_RESIDUAL=residual_TC is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
            **pdl_options(T),
        )
    return y_TC, total_TC


# ---------------------------------------------------------------------------------------------------------------------
# Sandwich norms: a branch is normed before it is added to the residual, and the sum is normed for the next branch
# ---------------------------------------------------------------------------------------------------------------------


def norm_add_norm(
    x_TC: Tensor, norm_C: Tensor, eps: float, residual_TC: Tensor, next_norm_C: Tensor | None = None,
    scale: Tensor | float = 1.0,
) -> tuple[Tensor | None, Tensor]:
    """Return (normed, total): total = (residual + norm(x)) * scale and normed = norm(total), None without `next_norm_C`.

    The weight multiplies in fp32 before the one rounding, the order of Hugging Face's Gemma norms; sum and product are
    rounded one by one, as there. `scale`: a number, or one element that is read on the device. `x_TC` may also be fp32
    sums `[S, T, C]` that are still to be added up (a split product).
    """
    run = norm_add_norm_triton if use_triton(residual_TC) else norm_add_norm_reference
    return run(x_TC, norm_C, eps, residual_TC, next_norm_C, scale)


def _gemma_norm(x_TC: Tensor, norm_C: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide_TC = x_TC.float()
    return (wide_TC * torch.rsqrt(wide_TC.square().mean(-1, keepdim=True) + eps) * norm_C.float()).to(dtype)


def norm_add_norm_reference(x_TC, norm_C, eps, residual_TC, next_norm_C=None, scale=1.0):
    dtype = residual_TC.dtype
    x_TC = x_TC.sum(0).to(dtype) if x_TC.ndim == 3 else x_TC
    total_TC = (residual_TC + _gemma_norm(x_TC, norm_C, eps, dtype)) * scale
    return None if next_norm_C is None else _gemma_norm(total_TC, next_norm_C, eps, dtype), total_TC


@jit
def _norm_add_norm_kernel(
    x_ptr, norm_ptr, residual_ptr, next_norm_ptr, scale_ptr, y_ptr, total_ptr, eps, scale, x_stride_s, x_stride,
    residual_stride, C: tl.constexpr, SPLITS: tl.constexpr, HAS_NEXT: tl.constexpr, SCALE_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    dtype = total_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    x = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        x += tl.load(x_ptr + split * x_stride_s + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32)
    norm = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    branch = (x * tl.rsqrt(tl.sum(x * x) / C + eps) * norm).to(dtype).to(tl.float32)
    if SCALE_ON_DEVICE:
        scale = tl.load(scale_ptr).to(tl.float32)
    total = ((residual + branch).to(dtype).to(tl.float32) * scale).to(dtype)
    tl.store(total_ptr + row * C + cols, total, mask=mask)
    if HAS_NEXT:
        total = total.to(tl.float32)
        next_norm = tl.load(next_norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        y = total * tl.rsqrt(tl.sum(total * total) / C + eps) * next_norm
        tl.store(y_ptr + row * C + cols, y.to(dtype), mask=mask)


def norm_add_norm_triton(x_TC, norm_C, eps, residual_TC, next_norm_C=None, scale=1.0):
    T, C = residual_TC.shape
    assert x_TC.shape[-2:] == (T, C) and x_TC.stride(-1) == residual_TC.stride(1) == 1
    total_TC = residual_TC.new_empty((T, C))
    y_TC = None if next_norm_C is None else torch.empty_like(total_TC)
    on_device = isinstance(scale, Tensor)
    block = next_power_of_2(C)
    if T:
        _norm_add_norm_kernel[(T,)](
            x_TC, norm_C, residual_TC, norm_C if next_norm_C is None else next_norm_C, scale if on_device else norm_C,
            total_TC if y_TC is None else y_TC, total_TC, eps, 1.0 if on_device else scale,
            x_TC.stride(0) if x_TC.ndim == 3 else 0, x_TC.stride(-2), residual_TC.stride(0), C=C,
            SPLITS=len(x_TC) if x_TC.ndim == 3 else 1, HAS_NEXT=y_TC is not None, SCALE_ON_DEVICE=on_device, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), **pdl_options(T),
        )
    return y_TC, total_TC


# ---------------------------------------------------------------------------------------------------------------------
# SiLU(gate) * up
# ---------------------------------------------------------------------------------------------------------------------


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """`[T, 2 I]` (gate | up) -> `[T, I]`: silu(gate), rounded to the dtype as Hugging Face does, times up."""
    return (silu_mul_triton if use_triton(gate_up_TI2) else silu_mul_reference)(gate_up_TI2)


def silu_mul_reference(gate_up_TI2: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


@jit
def _silu_mul_kernel(x_ptr, y_ptr, x_stride, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
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
        grid = (T, cdiv(width // 2, 1024))
        _silu_mul_kernel[grid](
            gate_up_TI2, y_TI, gate_up_TI2.stride(0), I=width // 2, BLOCK=1024, num_warps=4, **pdl_options(T)
        )
    return y_TI


# ---------------------------------------------------------------------------------------------------------------------
# GELU(gate) * up, soft cap
# ---------------------------------------------------------------------------------------------------------------------


def gelu_mul(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """`[T, I]`: gelu(gate) by its tanh formula, rounded to the dtype as Hugging Face does, times up. Rows may be strided."""
    return (gelu_mul_triton if use_triton(gate_TI) else gelu_mul_reference)(gate_TI, up_TI)


def gelu_mul_reference(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    return F.gelu(gate_TI, approximate="tanh") * up_TI


@jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3); x in fp32."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@jit
def _gelu_mul_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < I
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    activated = gelu_tanh(gate).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * I + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def gelu_mul_triton(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    T, I = gate_TI.shape
    assert gate_TI.stride(1) == up_TI.stride(1) == 1 and up_TI.shape == (T, I)
    y_TI = gate_TI.new_empty((T, I))
    if T:
        block = min(next_power_of_2(I), 1024)
        _gelu_mul_kernel[T, cdiv(I, block)](
            gate_TI, up_TI, y_TI, gate_TI.stride(0), up_TI.stride(0), I=I, BLOCK=block, num_warps=4, **pdl_options(T)
        )
    return y_TI


def soft_cap(logits_BV: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in fp32 inside, rounded once."""
    return (soft_cap_triton if use_triton(logits_BV) else soft_cap_reference)(logits_BV, cap)


def soft_cap_reference(logits_BV: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(logits_BV.float() / cap)).to(logits_BV.dtype)


@jit
def _soft_cap_kernel(x_ptr, y_ptr, cap, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    decay = tl.exp(-2.0 * tl.abs(x) / cap)
    capped = tl.where(x < 0, -cap, cap) * (1.0 - decay) / (1.0 + decay)
    tl.store(y_ptr + index, capped.to(y_ptr.dtype.element_ty), mask=index < size)


def soft_cap_triton(logits_BV: Tensor, cap: float) -> Tensor:
    assert logits_BV.is_contiguous()
    y_BV = torch.empty_like(logits_BV)
    if logits_BV.numel():
        grid = (cdiv(logits_BV.numel(), 4096),)
        _soft_cap_kernel[grid](logits_BV, y_BV, cap, logits_BV.numel(), BLOCK=4096, num_warps=8, **pdl_options(len(logits_BV)))
    return y_BV


# ---------------------------------------------------------------------------------------------------------------------
# q/k norm, rotary embedding and the K/V write into the paged pool
# ---------------------------------------------------------------------------------------------------------------------


def qk_norm_rope_store(
    qkv_TE: Tensor, q_norm_D: Tensor | None, k_norm_D: Tensor | None, eps: float, cos_PR: Tensor, sin_PR: Tensor,
    positions_T: Tensor, token_slots_T: Tensor, k_pool_HND: Tensor | None, v_pool_HND: Tensor | None, num_heads: int,
    packed_kv: bool = False, norm_v: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k of `qkv_TE` = [q heads | k heads | v heads], write k and v into the pool, return q_THD.

    - `q_norm_D`, `k_norm_D`: weights of the per-head RMS norm, or None for a model without one. `norm_v`: v is normed per
      head too, without a weight.
    - `qkv_TE` may end after the k heads: v is then k before norm and rotation. Without pools it is q alone, and nothing is
      stored.
    - `cos_PR`, `sin_PR`: fp32 tables by position, full rotary width R with both halves equal, as Hugging Face builds
      them. R < D rotates the first R dims only (partial rotary). Rotate-half convention.
    - `k_pool_HND`, `v_pool_HND` [num_kv_heads, slots, D]: written in place at `token_slots_T`, nothing else is touched.
    - `packed_kv=True` returns (q_THD, k_THD, v_THD): prefill attends over its own keys without reading pages.

    Rounded where Hugging Face rounds, so that a sampler and its trainer see the same q and k: the normed head before the weight
    (not with `norm_v`: Gemma's norms multiply in fp32) and after it, cos and sin, and each product with them.
    """
    run = qk_norm_rope_store_triton if use_triton(qkv_TE) else qk_norm_rope_store_reference
    return run(
        qkv_TE, q_norm_D, k_norm_D, eps, cos_PR, sin_PR, positions_T, token_slots_T, k_pool_HND, v_pool_HND, num_heads,
        packed_kv, norm_v,
    )


def _head_norm_reference(x_THD: Tensor, norm_D: Tensor | None, eps: float, round_first: bool) -> Tensor:
    if norm_D is None:
        return x_THD
    y_THD = x_THD.float()
    y_THD = y_THD * torch.rsqrt(y_THD.square().mean(-1, keepdim=True) + eps)
    y_THD = y_THD.to(x_THD.dtype) if round_first else y_THD
    return (y_THD * norm_D).to(x_THD.dtype)


def _rope_reference(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    R = cos_TR.shape[-1]
    cos_TR, sin_TR = cos_TR.to(x_THD.dtype), sin_TR.to(x_THD.dtype)
    rotary_THR, rest = x_THD[..., :R], x_THD[..., R:]
    turned_THR = torch.cat((-rotary_THR[..., R // 2 :], rotary_THR[..., : R // 2]), dim=-1)
    rotated_THR = rotary_THR * cos_TR[:, None] + turned_THR * sin_TR[:, None]
    return torch.cat((rotated_THR, rest), dim=-1) if rest.shape[-1] else rotated_THR


def qk_norm_rope_store_reference(
    qkv_TE, q_norm_D, k_norm_D, eps, cos_PR, sin_PR, positions_T, token_slots_T, k_pool_HND, v_pool_HND, num_heads,
    packed_kv=False, norm_v=False,
):
    rope = cos_PR[positions_T], sin_PR[positions_T]
    if k_pool_HND is None:
        return _rope_reference(_head_norm_reference(qkv_TE.unflatten(1, (num_heads, -1)), q_norm_D, eps, not norm_v), *rope)
    num_kv_heads, _, D = k_pool_HND.shape
    heads_THD = qkv_TE.view(len(qkv_TE), -1, D)
    qk_THD, v_THD = heads_THD[:, : num_heads + num_kv_heads], heads_THD[:, -num_kv_heads:]
    if q_norm_D is None and k_norm_D is None:
        normed_THD = qk_THD
    else:
        parts = zip(qk_THD.split((num_heads, num_kv_heads), dim=1), (q_norm_D, k_norm_D))
        normed_THD = torch.cat([_head_norm_reference(x_THD, norm_D, eps, not norm_v) for x_THD, norm_D in parts], dim=1)
    q_THD, k_THD = _rope_reference(normed_THD, *rope).split((num_heads, num_kv_heads), dim=1)
    if norm_v:
        v_THD = F.rms_norm(v_THD.float(), (D,), eps=eps).to(v_THD.dtype)
    k_pool_HND[:, token_slots_T] = k_THD.transpose(0, 1)
    v_pool_HND[:, token_slots_T] = v_THD.transpose(0, 1)
    return (q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous()) if packed_kv else q_THD.contiguous()


@jit
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


@jit
def _weighted(normed, norm, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    if ROUND_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * norm.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@jit
def _rounded(x, factor, dtype: tl.constexpr):
    """x * factor, rounded. A plain product of 16-bit values would be fused with the sum behind it, and not be rounded at all."""
    return tl.fma(x, factor + tl.zeros_like(x), tl.zeros_like(x)).to(dtype).to(tl.float32)


@jit
def _load_norm_rope(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, eps, heads, mask_h,
    HAS_NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    dims = tl.arange(0, BLOCK_R)
    mask_r = dims < R // 2
    mask = mask_h[:, None] & mask_r[None, :]
    ptrs = x_ptr + heads[:, None] * D + dims[None, :]
    lo = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(ptrs + R // 2, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + dims, mask=mask_r, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + dims, mask=mask_r, other=0.0).to(dtype).to(tl.float32)[None, :]
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
        lo = _weighted(lo * scale, tl.load(norm_ptr + dims, mask=mask_r, other=0.0), dtype, ROUND_FIRST)
        hi = _weighted(hi * scale, tl.load(norm_ptr + R // 2 + dims, mask=mask_r, other=0.0), dtype, ROUND_FIRST)
        if R < D:
            rest = _weighted(rest * scale, tl.load(norm_ptr + rest_dims, mask=rest_dims < D, other=0.0), dtype, ROUND_FIRST)
    return _rounded(lo, cos, dtype) - _rounded(hi, sin, dtype), _rounded(hi, cos, dtype) + _rounded(lo, sin, dtype), rest


@jit
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, k_pool_ptr,
    v_pool_ptr, eps, qkv_stride, cos_stride, sin_stride, k_stride_h, k_stride_n, v_stride_h, v_stride_n,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr, NORM_V: tl.constexpr, V_HEAD: tl.constexpr, PACKED_KV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_H heads of one token, all of them q, all k or all v."""
    wait_for_inputs(PDL)
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
            x_ptr, q_norm_ptr, cos_ptr, sin_ptr, eps, heads, mask_h, HAS_Q_NORM, not NORM_V, R, D, BLOCK_R, BLOCK_REST
        )
        _store_heads(q_ptr + token * (H * D), heads * D, lo, hi, rest, mask_h, R, D, BLOCK_R, BLOCK_REST)
    elif block < q_blocks + kv_blocks:
        heads = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_h = heads < HKV
        lo, hi, rest = _load_norm_rope(
            x_ptr + H * D, k_norm_ptr, cos_ptr, sin_ptr, eps, heads, mask_h, HAS_K_NORM, not NORM_V, R, D, BLOCK_R, BLOCK_REST
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
        v = tl.load(x_ptr + V_HEAD * D + offsets, mask=mask, other=0.0)
        if NORM_V:
            wide = v.to(tl.float32)
            v = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]).to(v.dtype)
        pool_ptrs = v_pool_ptr + slot * v_stride_n + heads.to(tl.int64)[:, None] * v_stride_h + dims[None, :]
        tl.store(pool_ptrs, v, mask=mask)
        if PACKED_KV:
            tl.store(v_ptr + token * (HKV * D) + offsets, v, mask=mask)


def qk_norm_rope_store_triton(
    qkv_TE, q_norm_D, k_norm_D, eps, cos_PR, sin_PR, positions_T, token_slots_T, k_pool_HND, v_pool_HND, num_heads,
    packed_kv=False, norm_v=False,
):
    (T, E), R = qkv_TE.shape, cos_PR.shape[1]
    if k_pool_HND is None:  # one more kernel variant, whose grid ends after the q heads
        assert not packed_kv
        k_pool_HND = v_pool_HND = qkv_TE.view(T, num_heads, -1)[:0]
    num_kv_heads, _, D = k_pool_HND.shape
    assert E in ((num_heads + num_kv_heads) * D, (num_heads + 2 * num_kv_heads) * D) and qkv_TE.stride(1) == 1
    assert k_pool_HND.stride(2) == 1 and v_pool_HND.stride(2) == 1
    assert cos_PR.stride(1) == 1 and sin_PR.stride(1) == 1 and R % 2 == 0 and R <= D
    q_THD = qkv_TE.new_empty((T, num_heads, D))
    k_THD = v_THD = q_THD
    if packed_kv:
        k_THD, v_THD = (qkv_TE.new_empty((T, num_kv_heads, D)) for _ in range(2))
    block_h = min(max(1024 // next_power_of_2(D), 1), next_power_of_2(num_heads))
    if T:
        grid = (T, cdiv(num_heads, block_h) + 2 * cdiv(num_kv_heads, block_h))
        _qk_norm_rope_store_kernel[grid](
            qkv_TE, qkv_TE if q_norm_D is None else q_norm_D, qkv_TE if k_norm_D is None else k_norm_D, cos_PR, sin_PR,
            positions_T, token_slots_T, q_THD, k_THD, v_THD, k_pool_HND, v_pool_HND, eps, qkv_TE.stride(0),
            cos_PR.stride(0), sin_PR.stride(0), *k_pool_HND.stride()[:2], *v_pool_HND.stride()[:2],
            H=num_heads, HKV=num_kv_heads, D=D, R=R, HAS_Q_NORM=q_norm_D is not None, HAS_K_NORM=k_norm_D is not None,
            NORM_V=norm_v, V_HEAD=E // D - num_kv_heads, PACKED_KV=packed_kv, BLOCK_H=block_h, BLOCK_R=next_power_of_2(R // 2),
            BLOCK_REST=next_power_of_2(max(D - R, 1)), BLOCK_D=next_power_of_2(D), num_warps=4, **pdl_options(T),
        )
    return (q_THD, k_THD, v_THD) if packed_kv else q_THD


# ---------------------------------------------------------------------------------------------------------------------
# The two ends of a decode step: rows gathered from the slots' state, and moved on
# ---------------------------------------------------------------------------------------------------------------------


class SlotColumn:
    """Columns of the slots' integer state [slots, FIRST_STOP + stop ids], and what the rings mean by a negative token."""

    TOKEN, POSITION, LAST_POSITION, SEED, TOP_K, ENDED, FIRST_OWN, FIRST_STOP = range(8)
    NO_TOKEN = -2  # a row that had ended before this step; the sampler's -1 means NaN


@dataclass(frozen=True)
class DecodeRows:
    """One step's inputs, a row each: gathered once, so that no other kernel knows of slots."""

    tokens_B: Tensor  # int64, the last token of each row
    positions_B: Tensor  # int64, where it stands
    lengths_B: Tensor  # int32, keys the row sees: position + 1
    token_slots_B: Tensor  # int64, where its key and value go in the pool: into padding (page 0) before position FIRST_OWN
    page_table_BP: Tensor  # int32
    seeds_B: Tensor  # int64
    top_k_B: Tensor  # int32
    temperature_B: Tensor  # fp32, as the next two
    top_p_B: Tensor
    min_p_B: Tensor


def gather_rows(row_slot_B: Tensor, ints: Tensor, floats: Tensor, page_table: Tensor, page_size: int) -> DecodeRows:
    """The rows of slots `row_slot_B` (int64).

    - `ints` [slots, columns] int64 (`SlotColumn`), `floats` [slots, 3] fp32 (temperature, top_p, min_p), `page_table`
      [slots, P] int32.
    """
    run = gather_rows_triton if use_triton(ints) else gather_rows_reference
    return run(row_slot_B, ints, floats, page_table, page_size)


def gather_rows_reference(row_slot_B, ints, floats, page_table, page_size) -> DecodeRows:
    ints_BC, page_table_BP = ints[row_slot_B], page_table[row_slot_B]
    positions_B = ints_BC[:, SlotColumn.POSITION].contiguous()
    pages_B = page_table_BP.gather(1, (positions_B // page_size)[:, None])[:, 0].long()
    pages_B = pages_B.where(positions_B >= ints_BC[:, SlotColumn.FIRST_OWN], 0)
    return DecodeRows(
        ints_BC[:, SlotColumn.TOKEN].contiguous(), positions_B, (positions_B + 1).int(),
        pages_B * page_size + positions_B % page_size, page_table_BP, ints_BC[:, SlotColumn.SEED].contiguous(),
        ints_BC[:, SlotColumn.TOP_K].int(), *floats[row_slot_B].T.contiguous(),
    )


@jit
def _gather_rows_kernel(
    row_slot_ptr, ints_ptr, floats_ptr, table_ptr, longs_ptr, words_ptr, out_floats_ptr, out_table_ptr, B, P,
    table_stride, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):
    """longs [4, B]: token, position, token slot, seed. words [2, B]: length, top_k."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    ints_ptr += slot * COLUMNS
    table_ptr += slot * table_stride
    position = tl.load(ints_ptr + 1)
    page = tl.load(table_ptr + position // PAGE_SIZE).to(tl.int64)
    page = tl.where(position >= tl.load(ints_ptr + 6), page, 0)
    tl.store(longs_ptr + row, tl.load(ints_ptr))
    tl.store(longs_ptr + B + row, position)
    tl.store(longs_ptr + 2 * B + row, page * PAGE_SIZE + position % PAGE_SIZE)
    tl.store(longs_ptr + 3 * B + row, tl.load(ints_ptr + 3))
    tl.store(words_ptr + row, (position + 1).to(tl.int32))
    tl.store(words_ptr + B + row, tl.load(ints_ptr + 4).to(tl.int32))
    for i in tl.static_range(3):
        tl.store(out_floats_ptr + i * B + row, tl.load(floats_ptr + slot * 3 + i))
    for start in tl.range(0, P, BLOCK_P):
        pages = start + tl.arange(0, BLOCK_P)
        tl.store(out_table_ptr + row * P + pages, tl.load(table_ptr + pages, mask=pages < P), mask=pages < P)


def gather_rows_triton(row_slot_B, ints, floats, page_table, page_size) -> DecodeRows:
    B, P, device = len(row_slot_B), page_table.shape[1], ints.device
    longs = torch.empty((4, B), dtype=torch.int64, device=device)
    words = torch.empty((2, B), dtype=torch.int32, device=device)
    out_floats = torch.empty((3, B), dtype=torch.float32, device=device)
    out_table = torch.empty((B, P), dtype=torch.int32, device=device)
    _gather_rows_kernel[(B,)](
        row_slot_B, ints, floats, page_table, longs, words, out_floats, out_table, B, P, page_table.stride(0),
        COLUMNS=ints.shape[1], PAGE_SIZE=page_size, BLOCK_P=min(next_power_of_2(P), 1024), num_warps=1, **pdl_options(B),
    )
    tokens_B, positions_B, token_slots_B, seeds_B = longs
    lengths_B, top_k_B = words
    return DecodeRows(
        tokens_B, positions_B, lengths_B, token_slots_B, out_table, seeds_B, top_k_B, *out_floats
    )


def advance_rows(
    row_slot_B: Tensor, ints: Tensor, step: Tensor, ring_tokens: Tensor, ring_logprobs: Tensor, tokens_B: Tensor,
    logprobs_B: Tensor, full_logprobs_B: Tensor,
) -> None:
    """Write one step's samples to the rings at `step` (int64 [1], then incremented) and move the slots in `ints` on.

    `ring_tokens` [steps, rows] int64, `ring_logprobs` [steps, 2, rows] fp32. A row ends with a stop id, at its last
    position, or with a negative token; a row that ends or had ended keeps its token and position, so that it rewrites
    its own last key and value.
    """
    run = advance_rows_triton if use_triton(ints) else advance_rows_reference
    run(row_slot_B, ints, step, ring_tokens, ring_logprobs, tokens_B, logprobs_B, full_logprobs_B)


def advance_rows_reference(row_slot_B, ints, step, ring_tokens, ring_logprobs, tokens_B, logprobs_B, full_logprobs_B):
    column, B, ints_BC = SlotColumn, len(row_slot_B), ints[row_slot_B]
    had_ended_B, positions_B = ints_BC[:, column.ENDED] != 0, ints_BC[:, column.POSITION]
    stops_B = (tokens_B[:, None] == ints_BC[:, column.FIRST_STOP :]).any(1)
    ended_B = had_ended_B | stops_B | (positions_B >= ints_BC[:, column.LAST_POSITION]) | (tokens_B < 0)
    ring_tokens[:, :B].index_copy_(0, step, tokens_B.masked_fill(had_ended_B, column.NO_TOKEN)[None])
    ring_logprobs[:, :, :B].index_copy_(0, step, torch.stack([logprobs_B, full_logprobs_B])[None])
    ints[row_slot_B, column.TOKEN] = torch.where(ended_B, ints_BC[:, column.TOKEN], tokens_B)
    ints[row_slot_B, column.POSITION] = positions_B + ~ended_B
    ints[row_slot_B, column.ENDED] = ended_B.long()
    step += 1


@jit
def _advance_rows_kernel(
    row_slot_ptr, ints_ptr, step_ptr, ring_tokens_ptr, ring_logprobs_ptr, tokens_ptr, logprobs_ptr, full_logprobs_ptr,
    B, ring_rows, COLUMNS: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):
    """One program for all rows: the step counter has one writer."""
    wait_for_inputs(PDL)
    rows = tl.arange(0, BLOCK_B)
    mask = rows < B
    step = tl.load(step_ptr)
    slots = tl.load(row_slot_ptr + rows, mask=mask, other=0)
    state_ptrs = ints_ptr + slots * COLUMNS
    token = tl.load(tokens_ptr + rows, mask=mask, other=-1)
    before = tl.load(state_ptrs, mask=mask, other=0)
    position = tl.load(state_ptrs + 1, mask=mask, other=0)
    last = tl.load(state_ptrs + 2, mask=mask, other=0)
    had_ended = tl.load(state_ptrs + 5, mask=mask, other=1) != 0
    ended = had_ended | (position >= last) | (token < 0)
    for i in tl.static_range(7, COLUMNS):
        ended = ended | (token == tl.load(state_ptrs + i, mask=mask, other=-1))
    tl.store(ring_tokens_ptr + step * ring_rows + rows, tl.where(had_ended, -2, token), mask=mask)
    logprobs_ptrs = ring_logprobs_ptr + step * 2 * ring_rows + rows
    tl.store(logprobs_ptrs, tl.load(logprobs_ptr + rows, mask=mask), mask=mask)
    tl.store(logprobs_ptrs + ring_rows, tl.load(full_logprobs_ptr + rows, mask=mask), mask=mask)
    tl.store(state_ptrs, tl.where(ended, before, token), mask=mask)
    tl.store(state_ptrs + 1, tl.where(ended, position, position + 1), mask=mask)
    tl.store(state_ptrs + 5, ended.to(tl.int64), mask=mask)
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)


def advance_rows_triton(row_slot_B, ints, step, ring_tokens, ring_logprobs, tokens_B, logprobs_B, full_logprobs_B):
    B = len(row_slot_B)
    block = next_power_of_2(B)
    _advance_rows_kernel[(1,)](
        row_slot_B, ints, step, ring_tokens, ring_logprobs, tokens_B, logprobs_B, full_logprobs_B, B,
        ring_tokens.shape[1], COLUMNS=ints.shape[1], BLOCK_B=block, num_warps=min(max(block // 32, 1), 8), **pdl_options(B),
    )
