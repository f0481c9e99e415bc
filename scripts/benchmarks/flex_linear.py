"""Matrix products of few tokens against a whole weight, with what follows them (flex_triton.py has the conventions)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import flex_cpu
from flex_kernels import gelu_mul, gelu_tanh, norm_add_norm, rms_norm, rms_norm_reference, silu_mul, silu_mul_reference
from flex_triton import (
    TensorDescriptor, cdiv, cuda_capability, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs,
)  # fmt: skip

NOT_GATED, SILU_GATED, GELU_GATED = range(3)  # what a product [gate | up] becomes: nothing, silu(gate) * up, gelu(gate) * up


@dataclass(frozen=True)
class LinearOptions:
    """Tiles of the skinny matrix product."""

    block_n: int = 128  # weight rows per program; of each half in gate_up_silu
    block_k: int = 64
    split_k: int = 1  # programs that share the sum over K of one tile
    num_warps: int = 4
    num_stages: int = 4  # weight tiles in flight per program
    # The wide kernel: tokens along the tensor core's 64-row side, so that a program may have block_n + tail_n rows. A program
    # per SM with equal work is what counts: two on some SMs take twice as long, for an SM's own share of L2 is the limit.
    wide: bool = False
    tail_n: int = 0
    tma: bool = False  # tiles by the bulk copy engine


# (N, K, most tokens) -> options found on an H200 (kernel_bench.py), or None where cuBLAS is faster. What is not listed takes the
# rule below. gate_up's N counts both halves.
_O = _DOWN = LinearOptions(64, 64, 3, 4, 6)
_DOWN_128 = LinearOptions(64, 64, 4, 8, 6, wide=True, tail_n=16, tma=True)
_SPLIT_6 = LinearOptions(64, 64, 6, 4, 6)
TUNED_LINEAR: dict[tuple[int, int, int], LinearOptions | None] = {
    # Qwen3-4B
    (6144, 2560, 8): LinearOptions(64, 128, 2, 4, 4),
    (6144, 2560, 256): None,
    (2560, 4096, 64): _O,
    (2560, 4096, 256): None,
    (19456, 2560, 8): LinearOptions(64, 128, 1, 4, 3),
    (19456, 2560, 32): LinearOptions(64, 64, 1, 4, 4),
    (19456, 2560, 64): LinearOptions(64, 64, 1, 4, 6, wide=True, tail_n=16, tma=True),
    (19456, 2560, 128): LinearOptions(64, 64, 1, 8, 5, wide=True, tail_n=16),
    (19456, 2560, 256): None,
    (2560, 9728, 32): LinearOptions(64, 128, 4, 4, 4),
    (2560, 9728, 64): _DOWN,
    (2560, 9728, 128): None,
    (2560, 9728, 256): None,
    # The same with the A of a rank-32 adapter beneath each part (flex_lora.py). There gate and up are one part.
    (6240, 2560, 8): LinearOptions(64, 128, 2, 4, 4),
    (6240, 2560, 256): None,
    (2592, 4096, 64): _O,
    (2592, 4096, 256): None,
    (19520, 2560, 32): LinearOptions(128, 64, 1, 4, 4),
    (19520, 2560, 64): LinearOptions(128, 64, 1, 4, 6, wide=True, tail_n=32, tma=True),
    (19520, 2560, 128): LinearOptions(128, 64, 1, 8, 5, wide=True, tail_n=32),
    (19520, 2560, 256): None,
    (2592, 9728, 32): LinearOptions(64, 128, 4, 4, 4),
    (2592, 9728, 64): _DOWN,
    (2592, 9728, 128): _DOWN_128,
    (2592, 9728, 256): None,
    # Llama-3.2-3B
    (5120, 3072, 128): None,
    (3072, 3072, 128): None,
    (16384, 3072, 64): LinearOptions(64, 64, 1, 4, 7, wide=True),
    (16384, 3072, 128): LinearOptions(64, 64, 1, 8, 5, wide=True, tma=True),
    (3072, 8192, 64): _O,
    (3072, 8192, 128): None,
    # With the A of a rank-32 adapter
    (5216, 3072, 128): None,
    (3104, 3072, 128): None,
    (16448, 3072, 64): LinearOptions(128, 64, 1, 4, 7, wide=True, tma=True),
    (16448, 3072, 128): LinearOptions(128, 64, 1, 8, 5, wide=True, tma=True),
    (3104, 8192, 64): LinearOptions(128, 64, 5, 4, 6),
    (3104, 8192, 128): None,
    # Gemma-4-E2B: q, k, v and q alone by kind of layer; o; gate_up and down
    (2560, 1536, 64): None,
    (5120, 1536, 64): None,
    (2048, 1536, 64): None,
    (4096, 1536, 64): None,
    (1536, 2048, 64): None,
    (1536, 4096, 64): _SPLIT_6,
    (12288, 1536, 64): LinearOptions(64, 128, 1, 4, 4),
    (1536, 6144, 64): _SPLIT_6,
    (1536, 12288, 64): _SPLIT_6,
    (1536, 256, 64): None,
}

MAX_SKINNY_TOKENS = 256
HOPPER_SMS = 132


def linear_options(T: int, N: int, K: int, gated: bool = False) -> LinearOptions | None:
    """Options for T tokens against a weight of N rows; None means that F.linear (cuBLAS) is used."""
    fitting = [tokens for n, k, tokens in TUNED_LINEAR if (n, k) == (N, K) and tokens >= T]
    if fitting:
        options = TUNED_LINEAR[N, K, min(fitting)]
        if options is None or _fits(options, T, gated):
            return options
    if T > 128 or N > 65536 or K < 256:
        return None
    if N <= 256 and T <= 64 and _fits(options := LinearOptions(16, 256, max(K // 512, 1), 4, 5), T, gated):
        return options  # an adapter's A: long tiles, since there are few
    if T > 32 and N >= 12288 and K % 64 == 0 and _fits(options := _wide_options(T, N, gated), T, gated):
        return options
    if T > 64:
        return None
    block_n = 64 if gated else 128
    tiles = cdiv(N // 2 if gated else N, block_n)
    # All programs should run at once on Hopper's SMs, and each deserves a few steps of its pipeline.
    split_k = max(1, min(round(160 / tiles), K // 64 // 4, 16))
    return LinearOptions(block_n=block_n, split_k=split_k)


def _fits(options: LinearOptions, T: int, gated: bool) -> bool:
    """Whether the GPU has the shared memory for the tiles in flight. Wide ones are Hopper's and data center Blackwell's."""
    capability = cuda_capability()
    is_large = capability // 10 in (9, 10)
    kib = 227 if is_large else 163 if capability == 80 else 99
    rows = (options.block_n + options.tail_n) * (2 if gated else 1) + _block_t(options, T, gated)
    return rows * options.block_k * 2 * options.num_stages <= kib * 1024 and (is_large or not options.wide)


def _block_t(options: LinearOptions, T: int, gated: bool) -> int:
    """Tokens per program: all of them, unless two sums for each would take too many registers."""
    return min(max(next_power_of_2(T), 64 if options.wide else 16), 128 if gated and not options.wide else 256)


def _wide_options(T: int, N: int, gated: bool) -> LinearOptions:
    """The tile that leaves the busiest SM the fewest weight rows; of two such, the one with fewer programs."""
    tiles = ((64, 0), (64, 32), (128, 0), (128, 32), (128, 64), (256, 0))  # weight rows: block and tail
    block, tail = min(tiles, key=lambda tile: (cdiv(cdiv(N, sum(tile)), HOPPER_SMS) * sum(tile), -sum(tile)))
    block_t, halves = 64 if T <= 64 else 128, 2 if gated else 1
    stage_bytes = (block_t + block + tail) * 64 * 2
    return LinearOptions(
        block // halves, 64, 1, block_t // 16, min(190 * 1024 // stage_bytes, 8), wide=True, tail_n=tail // halves, tma=T <= 64
    )


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, residual_TN: Tensor | None = None,
    options: LinearOptions | None = None,
) -> Tensor:
    """`x @ weight.T (+ bias) (+ residual)` -> y_TN. Sums in fp32 and rounds once; the same input gives the same bits.

    The Triton kernel serves 16-bit tensors of at most 256 rows on CUDA where `linear_options` has a tile for them (or
    `options` names one); everything else is F.linear.
    """
    if options is None:
        options = options_for(x_TK, weight_NK)
    if options is None:
        return linear_reference(x_TK, weight_NK, bias_N, residual_TN)
    return linear_triton(x_TK, weight_NK, bias_N, residual_TN, options)


def gate_up_silu(x_TK: Tensor, gate_up_I2K: Tensor, options: LinearOptions | None = None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) -> [T, I], for the packed weight whose first I rows are the gate."""
    if options is None:
        options = options_for(x_TK, gate_up_I2K, gated=True)
    if options is None:
        return silu_mul(dense(x_TK, gate_up_I2K))
    return gate_up_silu_triton(x_TK, gate_up_I2K, options)


def gate_up_gelu(x_TK: Tensor, gate_up_I2K: Tensor, options: LinearOptions | None = None) -> Tensor:
    """The same with gelu in its tanh approximation."""
    if options is None:
        options = options_for(x_TK, gate_up_I2K, gated=True)
    if options is None:
        return gelu_mul(*dense(x_TK, gate_up_I2K).chunk(2, dim=-1))
    return gate_up_gelu_triton(x_TK, gate_up_I2K, options)


def linear_norm_add_norm(
    x_TK: Tensor, weight_NK: Tensor, norm_N: Tensor, eps: float, residual_TN: Tensor, next_norm_N: Tensor | None = None,
    scale: Tensor | float = 1.0,
) -> tuple[Tensor | None, Tensor]:
    """`norm_add_norm` of a projection, which leaves its split sums to it."""
    options = options_for(x_TK, weight_NK)
    if options is not None:
        y = linear_splits_triton(x_TK, weight_NK, options)
    else:
        y = _halves(x_TK, weight_NK) if _splits_in_two(x_TK, weight_NK) else dense(x_TK, weight_NK)
    return norm_add_norm(y, norm_N, eps, residual_TN, next_norm_N, scale)


def linear_add_norm(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, norm_weight_N: Tensor, eps: float,
    options: LinearOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """A projection to the hidden size and the norm behind it -> (normed_TN, total_TN), total = x @ weight.T + residual."""
    if options is None:
        options = options_for(x_TK, weight_NK)
    if options is None:
        if _splits_in_two(x_TK, weight_NK):
            return add_norm_triton(_halves(x_TK, weight_NK), residual_TN, norm_weight_N, eps)
        return rms_norm(dense(x_TK, weight_NK), norm_weight_N, eps, residual_TN)
    return linear_add_norm_triton(x_TK, weight_NK, residual_TN, norm_weight_N, eps, options)


def _splits_in_two(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Whether cuBLAS should leave the sums of two halves of K to the norm: on an H200 it wins 5 to 11 % for Qwen3-4B's down at 128
    to 256 rows, and for o at 128 alone."""
    T, (N, K) = len(x_TK), weight_NK.shape
    fits = use_triton(x_TK) and x_TK.dtype in (torch.bfloat16, torch.float16) and K % 16 == 0
    return fits and N <= 8192 and (64 < T <= 128 or 128 < T <= MAX_SKINNY_TOKENS and K > 2 * N)


def _halves(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The fp32 sums over each half of K, `[2, T, N]`."""
    x_STK, weight_SKN = x_TK.unflatten(1, (2, -1)).transpose(0, 1), weight_NK.unflatten(1, (2, -1)).permute(1, 2, 0)
    return torch.bmm(x_STK, weight_SKN, out_dtype=torch.float32)


def options_for(x_TK: Tensor, weight_NK: Tensor, gated: bool = False) -> LinearOptions | None:
    if not use_triton(x_TK) or x_TK.dtype not in (torch.bfloat16, torch.float16) or len(x_TK) > MAX_SKINNY_TOKENS:
        return None
    return linear_options(len(x_TK), *weight_NK.shape, gated)


def dense(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """F.linear, by flex_cpu on a CPU."""
    if x_TK.device.type != "cpu" or torch.compiler.is_compiling():
        return F.linear(x_TK, weight_NK, bias_N)
    return flex_cpu.linear(x_TK, weight_NK, bias_N)


def linear_reference(x_TK, weight_NK, bias_N=None, residual_TN=None) -> Tensor:
    y_TN = dense(x_TK, weight_NK, bias_N)
    return y_TN if residual_TN is None else y_TN + residual_TN


def gate_up_silu_reference(x_TK, gate_up_I2K) -> Tensor:
    return silu_mul_reference(dense(x_TK, gate_up_I2K))


def linear_add_norm_reference(x_TK, weight_NK, residual_TN, norm_weight_N, eps):
    return rms_norm_reference(dense(x_TK, weight_NK), norm_weight_N, eps, residual_TN)


@jit
def _store_linear(
    acc, acc_up, bias_ptr, residual_ptr, y_ptr, n, t, T, residual_stride, N: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):
    """Store a tile [n, t] of sums, rounded where Hugging Face rounds: the product, the activated gate, the sum with the residual."""
    dtype = y_ptr.dtype.element_ty
    mask = (n < N)[:, None] & (t < T)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    acc = acc.to(dtype).to(tl.float32)
    if GATED == 1:
        acc = acc / (1.0 + tl.exp(-acc))
    elif GATED == 2:
        acc = gelu_tanh(acc)
    if GATED:
        acc = acc.to(dtype).to(tl.float32) * acc_up.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + t[None, :] * residual_stride + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + t[None, :] * N + n[:, None], acc.to(dtype), mask=mask)


@jit
def _skinny_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, arrivals_ptr, T, x_stride, weight_stride, residual_stride,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEP_SPLIT: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """y^T = weight x^T: weight rows lie along the tensor core's 64-row side, the few tokens along its narrow one.

    KEEP_SPLIT writes the fp32 sums of each split to y [SPLIT_K, T, N]; otherwise the last program of a tile to finish
    adds its splits up, in order. GATED (SILU_GATED, GELU_GATED): weight rows [N gates | N ups].
    """
    wait_for_inputs(PDL)
    tile_n, split, tile_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, last = split * steps // SPLIT_K, (split + 1) * steps // SPLIT_K
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
            for i in tl.static_range(SPLIT_K):  # unrolled: one round trip to L2 for all
                total += tl.load(partial_ptr + i * (halves * BLOCK_N * BLOCK_T), cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(partial_ptr + (i * halves + 1) * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            _store_linear(
                total, total_up, bias_ptr, residual_ptr, y_ptr, n, t, T, residual_stride, N, GATED, HAS_BIAS, HAS_RESIDUAL
            )


@jit
def _store_wide(
    acc, bias_ptr, residual_ptr, y_ptr, n0, t, T, residual_stride,
    N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):
    ROWS: tl.constexpr = acc.shape[1] // (2 if GATED else 1)
    n = n0 + tl.arange(0, ROWS)
    up = acc
    if GATED:  # gate and up rows lie side by side
        acc, up = tl.split(tl.reshape(acc, [acc.shape[0], ROWS, 2]))
    _store_linear(
        tl.trans(acc), tl.trans(up), bias_ptr, residual_ptr, y_ptr, n, t, T, residual_stride, N, GATED, HAS_BIAS, HAS_RESIDUAL
    )


@jit
def _wide_offsets(n0, stride, N: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr):
    """Where the weight rows of a program begin; those past the last repeat it, and nobody stores what they give."""
    rows = tl.arange(0, ROWS * HALVES)
    return (tl.minimum(n0 + rows // HALVES, N - 1) + (rows % HALVES) * N).to(tl.int64) * stride


@jit
def _wide_linear_kernel(
    x, weight, weight_tail, bias_ptr, residual_ptr, y_ptr, partial_ptr, arrivals_ptr, T, x_stride, weight_stride,
    residual_stride, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, KEEP_SPLIT: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):
    """y = x weight^T with all tokens in one tile, for BLOCK_N + TAIL_N weight rows per program, of each half if GATED.

    TMA: x, weight and weight_tail are descriptors of [T, K] and [N, halves, K]; otherwise pointers.
    """
    wait_for_inputs(PDL)
    HALVES: tl.constexpr = 2 if GATED else 1
    tile_n, split = tl.program_id(0), tl.program_id(1)
    n0 = tile_n * (BLOCK_N + TAIL_N)
    n_tail = n0 + BLOCK_N
    t = tl.arange(0, BLOCK_T)
    steps: tl.constexpr = K // BLOCK_K
    first, last = split * steps // SPLIT_K, (split + 1) * steps // SPLIT_K
    if not TMA:
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x + tl.minimum(t, T - 1)[:, None] * x_stride + k[None, :]
        w_ptrs = weight + _wide_offsets(n0, weight_stride, N, BLOCK_N, HALVES)[None, :] + k[:, None]
        if TAIL_N > 0:
            tail_ptrs = weight + _wide_offsets(n_tail, weight_stride, N, TAIL_N, HALVES)[None, :] + k[:, None]
    acc = tl.zeros([BLOCK_T, HALVES * BLOCK_N], tl.float32)
    if TAIL_N > 0:
        acc_tail = tl.zeros([BLOCK_T, HALVES * TAIL_N], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        if TMA:
            x_tile = x.load([0, step * BLOCK_K])
            w_tile = weight.load([n0, 0, step * BLOCK_K]).reshape([HALVES * BLOCK_N, BLOCK_K]).T
        else:
            x_tile = tl.load(x_ptrs + step * BLOCK_K)
            w_tile = tl.load(w_ptrs + step * BLOCK_K, eviction_policy="evict_first")
        acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if TAIL_N > 0:
            if TMA:
                w_tile = weight_tail.load([n_tail, 0, step * BLOCK_K]).reshape([HALVES * TAIL_N, BLOCK_K]).T
            else:
                w_tile = tl.load(tail_ptrs + step * BLOCK_K, eviction_policy="evict_first")
            acc_tail = tl.dot(x_tile, w_tile, acc_tail, input_precision="ieee")

    merges = True
    if KEEP_SPLIT:
        merges = False
        y_ptrs = y_ptr + (split * T + t)[:, None] * N + n0
        columns = tl.arange(0, BLOCK_N)[None, :]
        tl.store(y_ptrs + columns, acc, mask=(t < T)[:, None] & (n0 + columns < N))
        if TAIL_N > 0:
            columns = BLOCK_N + tl.arange(0, TAIL_N)[None, :]
            tl.store(y_ptrs + columns, acc_tail, mask=(t < T)[:, None] & (n0 + columns < N))
    elif SPLIT_K > 1:
        SIZE: tl.constexpr = HALVES * (BLOCK_N + TAIL_N) * BLOCK_T
        partial_ptrs = partial_ptr + tile_n * (SPLIT_K * SIZE) + t[:, None] * (HALVES * BLOCK_N)
        partial_ptrs += tl.arange(0, HALVES * BLOCK_N)[None, :]
        tl.store(partial_ptrs + split * SIZE, acc)
        if TAIL_N > 0:
            tail_ptrs = partial_ptr + tile_n * (SPLIT_K * SIZE) + HALVES * BLOCK_N * BLOCK_T
            tail_ptrs += t[:, None] * (HALVES * TAIL_N) + tl.arange(0, HALVES * TAIL_N)[None, :]
            tl.store(tail_ptrs + split * SIZE, acc_tail)
        tl.debug_barrier()  # all of the program's partial sums are out before it counts itself
        merges = tl.atomic_add(arrivals_ptr + tile_n, 1, sem="acq_rel") == SPLIT_K - 1
        if merges:
            tl.store(arrivals_ptr + tile_n, 0)
            acc = tl.zeros_like(acc)
            for i in tl.static_range(SPLIT_K):
                acc += tl.load(partial_ptrs + i * SIZE, cache_modifier=".cg")
            if TAIL_N > 0:
                acc_tail = tl.zeros_like(acc_tail)
                for i in tl.static_range(SPLIT_K):
                    acc_tail += tl.load(tail_ptrs + i * SIZE, cache_modifier=".cg")
    if merges:
        _store_wide(acc, bias_ptr, residual_ptr, y_ptr, n0, t, T, residual_stride, N, GATED, HAS_BIAS, HAS_RESIDUAL)
        if TAIL_N > 0:
            _store_wide(acc_tail, bias_ptr, residual_ptr, y_ptr, n_tail, t, T, residual_stride, N, GATED, HAS_BIAS, HAS_RESIDUAL)


@jit
def _add_norm_kernel(
    partial_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, eps, T, residual_stride,
    N: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        product += tl.load(partial_ptr + (split * T + row) * N + cols, mask=mask, other=0.0)
    total = (residual + product.to(total_ptr.dtype.element_ty).to(tl.float32)).to(total_ptr.dtype.element_ty)
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


def _launch_skinny_linear(
    x_TK: Tensor, weight: Tensor, y: Tensor, N: int, options: LinearOptions, gated: int = NOT_GATED,
    keep_split: bool = False, bias_N: Tensor | None = None, residual_TN: Tensor | None = None,
) -> None:
    T, K = x_TK.shape
    assert x_TK.stride(1) == weight.stride(1) == 1 and weight.shape[1] == K
    assert residual_TN is None or residual_TN.stride(1) == 1
    block_t = _block_t(options, T, gated > 0)
    tiles_n, tiles_t, halves = cdiv(N, options.block_n + options.tail_n), cdiv(T, block_t), 2 if gated else 1
    unused = x_TK
    partial = arrivals = unused
    if options.split_k > 1 and not keep_split:
        size = tiles_n * tiles_t * options.split_k * halves * (options.block_n + options.tail_n) * block_t
        partial = torch.empty(size, dtype=torch.float32, device=x_TK.device)
        arrivals = _tile_arrivals(x_TK.device, tiles_n * tiles_t)
    tensors = (unused if bias_N is None else bias_N, unused if residual_TN is None else residual_TN, y, partial, arrivals)
    scalars = (T, x_TK.stride(0), weight.stride(0), 0 if residual_TN is None else residual_TN.stride(0))
    common = dict(
        N=N, K=K, GATED=gated, HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_TN is not None, KEEP_SPLIT=keep_split,
        SPLIT_K=options.split_k, BLOCK_N=options.block_n, BLOCK_T=block_t, BLOCK_K=options.block_k,
        NUM_STAGES=options.num_stages, num_warps=options.num_warps, **pdl_options(T, shares_sm=not options.wide),
    )  # fmt: skip
    grid = (tiles_n, options.split_k, tiles_t)
    if not options.wide:
        _skinny_linear_kernel[grid](x_TK, weight, *tensors, *scalars, **common)
        return
    assert tiles_t == 1 and K % options.block_k == 0 and weight.shape[0] == N * halves
    tiles = (x_TK, weight, weight)
    if options.tma:
        strides = [weight.stride(0), N * weight.stride(0), 1]
        rows = [options.block_n, options.tail_n or options.block_n]
        tiles = (
            TensorDescriptor(x_TK, [T, K], [x_TK.stride(0), 1], [block_t, options.block_k]),
            *(TensorDescriptor(weight, [N, halves, K], strides, [n, halves, options.block_k]) for n in rows),
        )
    _wide_linear_kernel[grid](*tiles, *tensors, *scalars, TAIL_N=options.tail_n, TMA=options.tma, **common)


def linear_triton(x_TK, weight_NK, bias_N=None, residual_TN=None, options: LinearOptions = LinearOptions()) -> Tensor:
    N = len(weight_NK)
    y_TN = weight_NK.new_empty((len(x_TK), N))
    _launch_skinny_linear(x_TK, weight_NK, y_TN, N, options, bias_N=bias_N, residual_TN=residual_TN)
    return y_TN


def gate_up_silu_triton(x_TK, gate_up_I2K, options: LinearOptions = LinearOptions(block_n=64)) -> Tensor:
    I = len(gate_up_I2K) // 2
    y_TI = gate_up_I2K.new_empty((len(x_TK), I))
    _launch_skinny_linear(x_TK, gate_up_I2K, y_TI, I, options, gated=SILU_GATED)
    return y_TI


def gate_up_gelu_triton(x_TK, gate_up_I2K, options: LinearOptions = LinearOptions(block_n=64)) -> Tensor:
    I = len(gate_up_I2K) // 2
    y_TI = gate_up_I2K.new_empty((len(x_TK), I))
    _launch_skinny_linear(x_TK, gate_up_I2K, y_TI, I, options, gated=GELU_GATED)
    return y_TI


def linear_splits_triton(x_TK, weight_NK, options: LinearOptions) -> Tensor:
    """The fp32 sums of each split of K, `[S, T, N]`: for a consumer that adds them up."""
    partial_STN = torch.empty((options.split_k, len(x_TK), len(weight_NK)), dtype=torch.float32, device=weight_NK.device)
    _launch_skinny_linear(x_TK, weight_NK, partial_STN, len(weight_NK), options, keep_split=True)
    return partial_STN


def linear_add_norm_triton(x_TK, weight_NK, residual_TN, norm_weight_N, eps, options: LinearOptions = LinearOptions()):
    """The projection leaves its split sums over K in fp32 and the norm adds them up: no program waits for another."""
    return add_norm_triton(linear_splits_triton(x_TK, weight_NK, options), residual_TN, norm_weight_N, eps)


def add_norm_triton(partial_STN: Tensor, residual_TN: Tensor, norm_weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed_TN, total_TN), total = residual + the sum over S, which is taken in fp32 and rounded first."""
    assert partial_STN.is_contiguous() and residual_TN.stride(1) == 1
    splits, T, N = partial_STN.shape
    total_TN, normed_TN = residual_TN.new_empty((T, N)), residual_TN.new_empty((T, N))
    block = next_power_of_2(N)
    _add_norm_kernel[(T,)](
        partial_STN, residual_TN, norm_weight_N, normed_TN, total_TN, eps, T, residual_TN.stride(0), N=N,
        SPLIT_K=splits, BLOCK=block, num_warps=min(max(block // 256, 1), 16), **pdl_options(T),
    )
    return normed_TN, total_TN
