"""Triton kernels of the mixture-of-experts layers (flex_moe.py has the contracts, flex_triton.py the conventions).

A layer is five launches behind the router's product: `route`; `plan_experts`, which sorts the pairs of a token and an expert into
tiles of one expert each; the grouped product with gate and up, then SiLU; the one with down, times the routing weight; and the sum
over a token's experts with residual and norm, which is flex_linear's sum over splits. LoRA puts a small grouped product, x aᵀ,
before each of the two, which add its product with b to their own sums.

A decode step is bound by reading the weights of the experts that were hit. So each program streams the rows of its weight tile
once, past all the tokens of its expert (the few tokens lie along the tensor core's narrow side); the grid is fixed at the most
tiles that the number of pairs allows, and programs without a tile leave at once.

Shape suffixes besides those of flex_moe.py: M tiles, B pairs of a tile (block_m), N output and K input features of a product,
S splits of a sum, G blocks of 64 input features, W words of 8 codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flex_nf4 import BLOCK as NF4_BLOCK
from flex_nf4 import nf4_dequantize, nf4_dot, nf4_weights
from flex_triton import TensorDescriptor, cdiv, cuda_capability, jit, next_power_of_2, pdl_options, tl, wait_for_inputs

# ---------------------------------------------------------------------------------------------------------------------
# Routing
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, logits_stride,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    ids, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + token * logits_stride + ids, mask=ids < E, other=-float("inf")).to(tl.float32)
    powers = tl.exp(logits - tl.max(logits))
    left = tl.where(ids < E, powers / tl.sum(powers), -1.0)
    weights = tl.zeros([BLOCK_K], tl.float32)
    experts = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(left)
        best = tl.min(tl.where(left == largest, ids, E - 1))  # of NaN logits the last expert: an id that exists
        weights = tl.where(k == i, largest, weights)
        experts = tl.where(k == i, best, experts)
        left = tl.where(ids == best, -1.0, left)
    if NORMALIZE:
        weights = weights / tl.sum(weights)
    tl.store(weights_ptr + token * TOP_K + k, weights.to(weights_ptr.dtype.element_ty), mask=k < TOP_K)
    tl.store(experts_ptr + token * TOP_K + k, experts, mask=k < TOP_K)


def route_triton(logits_TE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    T, E = logits_TE.shape
    assert logits_TE.stride(1) == 1 and top_k <= E
    weights_TK = logits_TE.new_empty((T, top_k))
    experts_TK = torch.empty((T, top_k), dtype=torch.int32, device=logits_TE.device)
    if T:
        _route_kernel[(T,)](
            logits_TE, weights_TK, experts_TK, logits_TE.stride(0), E=E, TOP_K=top_k, NORMALIZE=normalize,
            BLOCK_E=next_power_of_2(E), BLOCK_K=next_power_of_2(top_k), num_warps=1, **pdl_options(T),
        )  # fmt: skip
    return weights_TK, experts_TK


# ---------------------------------------------------------------------------------------------------------------------
# Which pairs are whose
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertPlan:
    """Pairs (token * K + k) by expert, in tiles of one expert each; -1 where a tile is not full and past the last tile."""

    experts_M: Tensor  # int32: the expert of each tile
    pairs_MB: Tensor  # int32
    top_k: int

    @property
    def block_m(self) -> int:
        return self.pairs_MB.shape[1]


def max_tiles(pairs: int, num_experts: int, block_m: int) -> int:
    """Tiles enough for any routing: each expert that is hit may leave one tile unfilled."""
    return (pairs + min(pairs, num_experts) * (block_m - 1)) // block_m


@jit
def _plan_kernel(
    experts_ptr, tile_experts_ptr, tile_pairs_ptr, P, tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert: counts them all, so that it knows its first tile, then ranks its own pairs in their order."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    lanes, ids = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, P, BLOCK_P):
        inside = first + lanes < P
        counts += tl.histogram(tl.load(experts_ptr + first + lanes, mask=inside, other=0), BLOCK_E, mask=inside)
    tiles_of = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(ids < expert, tiles_of, 0))
    count = tl.sum(tl.where(ids == expert, counts, 0))
    end_tile = first_tile + (count + BLOCK_M - 1) // BLOCK_M

    ranked = first_tile * BLOCK_M
    for first in range(0, P, BLOCK_P):
        mine = tl.load(experts_ptr + first + lanes, mask=first + lanes < P, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32))
        tl.store(tile_pairs_ptr + ranked + rank - 1, first + lanes, mask=mine)
        ranked += tl.sum(mine.to(tl.int32))
    unfilled = ranked + tl.arange(0, BLOCK_M)
    tl.store(tile_pairs_ptr + unfilled, -1, mask=unfilled < end_tile * BLOCK_M)
    for first in range(first_tile, end_tile, BLOCK_E):
        tl.store(tile_experts_ptr + first + ids, expert, mask=first + ids < end_tile)
    if expert == E - 1:
        for first in range(end_tile, tiles, BLOCK_E):
            tl.store(tile_experts_ptr + first + ids, -1, mask=first + ids < tiles)


def plan_experts_triton(experts_TK: Tensor, num_experts: int, block_m: int) -> ExpertPlan:
    assert experts_TK.is_contiguous() and experts_TK.dtype == torch.int32
    P = experts_TK.numel()
    tiles, block_p = max_tiles(P, num_experts, block_m), min(max(next_power_of_2(P), 128), 4096)
    experts_M = torch.empty(tiles, dtype=torch.int32, device=experts_TK.device)
    pairs_MB = torch.empty((tiles, block_m), dtype=torch.int32, device=experts_TK.device)
    _plan_kernel[(num_experts,)](
        experts_TK, experts_M, pairs_MB, P, tiles, E=num_experts, BLOCK_E=max(next_power_of_2(num_experts), 32),
        BLOCK_M=block_m, BLOCK_P=block_p, num_warps=8 if block_p > 2048 else 4, **pdl_options(len(experts_TK)),
    )  # fmt: skip
    return ExpertPlan(experts_M, pairs_MB, experts_TK.shape[1])


# ---------------------------------------------------------------------------------------------------------------------
# The grouped product
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NF4Weight:
    """A stacked weight in 4 bits: codes int32 `[E, G, N, 8]`, scales fp32 `[E, G, N]`; `weight[expert]` is `[N, K]` in `dtype`.

    A word holds 8 codes of flex_nf4's as its bytes do there, a scale stands for 64 codes of one row. What a program reads in one
    step, the codes and scales of neighbouring rows in one block of input features, lies side by side.
    """

    codes_EGNW: Tensor
    scales_EGN: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        E, G, N = self.scales_EGN.shape
        return E, N, G * NF4_BLOCK

    @property
    def nbytes(self) -> int:
        return self.codes_EGNW.nbytes + self.scales_EGN.nbytes

    def __len__(self) -> int:
        return len(self.scales_EGN)

    def __getitem__(self, expert: int) -> Tensor:
        codes_NW = self.codes_EGNW[expert].transpose(0, 1).flatten(1).contiguous()
        return nf4_dequantize(codes_NW, self.scales_EGN[expert].contiguous(), self.dtype)


Weight = Tensor | NF4Weight  # of all experts, `[E, N, K]`


@dataclass(frozen=True)
class LowRank:
    """What LoRA adds to a stacked weight: `(x a_eᵀ) b_e` for expert e. The adapter's scaling is folded into b."""

    a_ERK: Tensor
    b_ERN: Tensor

    def __call__(self, x_TK: Tensor, expert: int) -> Tensor:
        return (x_TK @ self.a_ERK[expert].T) @ self.b_ERN[expert]


@dataclass(frozen=True)
class GroupedOptions:
    """Tiles of the grouped product."""

    block_n: int = 64  # weight rows per program, of each half in gate_up
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 4  # weight tiles in flight per program
    tma: bool = False  # weights by the bulk copy engine


@jit
def _add_low_rank(
    acc, xa_ptr, b_ptrs, places, taken, n_mask, xa_split_stride, BLOCK_M: tl.constexpr, R: tl.constexpr, XA_SPLITS: tl.constexpr
):
    """acc `[BLOCK_N, BLOCK_M]` + (xa b)^T, with xa rounded to b's dtype as PEFT's is."""
    ranks = tl.arange(0, R)
    xa_ptrs = xa_ptr + places.to(tl.int64)[None, :] * R + ranks[:, None]
    xa = tl.zeros([R, BLOCK_M], tl.float32)
    for split in tl.static_range(XA_SPLITS):
        xa += tl.load(xa_ptrs + split * xa_split_stride, mask=taken[None, :], other=0.0)
    b = tl.load(b_ptrs, mask=n_mask[:, None], other=0.0)
    return tl.dot(b, xa.to(b.dtype), acc, input_precision="ieee")


@jit
def _grouped_kernel(
    x_ptr, weight, scales_ptr, tile_experts_ptr, tile_pairs_ptr, routing_ptr, xa_ptr, b_ptr, y_ptr, x_stride, tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BY_TOKEN: tl.constexpr, GATED: tl.constexpr, TO_PAIR: tl.constexpr,
    R: tl.constexpr, XA_SPLITS: tl.constexpr, NF4: tl.constexpr, PTX: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y^T = weight_e x^T for the pairs of a tile and BLOCK_N outputs, whose gate and up rows lie side by side if GATED.

    BY_TOKEN: x has a row for each token, else one for each place in the plan, as y has (for each split of K) unless it is TO_PAIR:
    there it is `[K, T, N]`, times the routing weight. `weight` points to `[E, halves, N, K]` or to NF4Weight's codes, or is a
    descriptor of `[E * halves * N, K]`, whose gate and up tiles are summed apart: reshaped ones would reach the tensor core through
    registers (see nf4_dot). R > 0: a low-rank product with xa `[S, places, R]` and b `[E, R, halves * N]` is added.
    """
    wait_for_inputs(PDL)
    HALVES: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = HALVES * N
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    tile_n, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert = tl.load(tile_experts_ptr + tile)
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs = tl.load(tile_pairs_ptr + places)
    if expert < 0:
        return
    taken = pairs >= 0
    places_of_split = tl.num_programs(1) * BLOCK_M
    expert_rows = expert.to(tl.int64) * ROWS
    rows = places
    if BY_TOKEN:
        rows = pairs // TOP_K
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + k[:, None]
    n0 = tile_n * BLOCK_N
    lines = tl.arange(0, HALVES * BLOCK_N)
    line_n = n0 + lines // HALVES
    line_rows = line_n + (lines % HALVES) * N
    if NF4:
        w_ptrs = weight + (expert_rows * (K // 64) + line_rows)[:, None] * 8 + tl.arange(0, 8)[None, :]
        scale_ptrs = scales_ptr + expert_rows * (K // 64) + line_rows
    elif not TMA:
        w_ptrs = weight + expert_rows * K + line_rows[:, None] * K + k[None, :]
    if TO_PAIR:
        factor = tl.load(routing_ptr + pairs, mask=taken, other=0.0).to(tl.float32)
    LINES: tl.constexpr = BLOCK_N if TMA else HALVES * BLOCK_N
    acc = tl.zeros([LINES, BLOCK_M], tl.float32)
    up = acc
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(split * steps // SPLIT_K, (split + 1) * steps // SPLIT_K, num_stages=NUM_STAGES):
        start = step * BLOCK_K
        if EVEN:
            x = tl.load(x_ptrs + start, mask=taken[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=taken[None, :] & (start + k < K)[:, None], other=0.0)
        if NF4:
            if EVEN:
                codes = tl.load(w_ptrs + step * (ROWS * 8), eviction_policy="evict_first")
                scales = tl.load(scale_ptrs + step * ROWS)
            else:
                codes = tl.load(w_ptrs + step * (ROWS * 8), mask=(line_n < N)[:, None], other=0)
                scales = tl.load(scale_ptrs + step * ROWS, mask=line_n < N, other=0.0)
            w = nf4_weights(codes, scales, x.dtype, PTX, HALVES * BLOCK_N, BLOCK_K)
        elif TMA:
            w = weight.load([expert * ROWS + n0, start])
            if GATED:
                up = tl.dot(weight.load([expert * ROWS + N + n0, start]), x, up, input_precision="ieee")
        elif EVEN:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
        else:
            w = tl.load(w_ptrs + start, mask=(line_n < N)[:, None] & (start + k < K)[None, :], other=0.0)
        acc = nf4_dot(w, x, acc, PTX) if NF4 else tl.dot(w, x, acc, input_precision="ieee")

    n = n0 + tl.arange(0, BLOCK_N)
    if R > 0:
        b_ptrs = b_ptr + expert_rows * R + tl.arange(0, R)[None, :] * ROWS + n[:, None]
        xa_split_stride = places_of_split.to(tl.int64) * R
    if GATED:
        if not TMA:
            acc, up = tl.split(acc.reshape([BLOCK_N, 2, BLOCK_M]).permute(0, 2, 1))
        if R > 0:
            up = _add_low_rank(up, xa_ptr, b_ptrs + N, places, taken, n < N, xa_split_stride, BLOCK_M, R, XA_SPLITS)
    if R > 0:
        acc = _add_low_rank(acc, xa_ptr, b_ptrs, places, taken, n < N, xa_split_stride, BLOCK_M, R, XA_SPLITS)
    if GATED:  # rounded where Hugging Face rounds
        dtype = y_ptr.dtype.element_ty
        acc = acc.to(dtype).to(tl.float32)
        acc = (acc / (1.0 + tl.exp(-acc))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    if TO_PAIR:
        acc *= factor[None, :]
        places = (pairs % TOP_K) * tokens + pairs // TOP_K
    places += split * places_of_split
    y_ptrs = y_ptr + places.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & taken[None, :])


def _launch_grouped(
    x: Tensor, weight_ENK: Weight, plan: ExpertPlan, y: Tensor, options: GroupedOptions, tokens: int, by_token: bool = False,
    gated: bool = False, weights_TK: Tensor | None = None, low_rank: LowRank | None = None, split_k: int = 1,
) -> None:
    E, rows, K = weight_ENK.shape
    halves, nf4 = 2 if gated else 1, isinstance(weight_ENK, NF4Weight)
    N = rows // halves
    assert x.stride(1) == 1 and x.shape[1] == K
    unused = plan.pairs_MB
    weight, scales, xa_SPR, b_ERN, rank = weight_ENK, unused, unused[None], unused, 0
    if nf4:
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"4-bit experts compute in bfloat16 or float16 on a GPU, not in {x.dtype}")
        weight, scales = weight_ENK.codes_EGNW, weight_ENK.scales_EGN
        assert weight.is_contiguous() and scales.is_contiguous() and options.block_k == NF4_BLOCK and not options.tma
    else:
        assert weight.is_contiguous() and weight.dtype == x.dtype
    if options.tma:
        assert K % options.block_k == 0
        weight = TensorDescriptor(weight_ENK, [E * rows, K], [K, 1], [options.block_n, options.block_k])
    if low_rank is not None:
        xa_SPR, b_ERN = _times_a(x, low_rank.a_ERK, plan, tokens, by_token), low_rank.b_ERN
        rank = b_ERN.shape[1]
        assert b_ERN.is_contiguous() and b_ERN.shape == (E, rank, rows)
    _grouped_kernel[cdiv(N, options.block_n), len(plan.experts_M), split_k](
        x, weight, scales, plan.experts_M, plan.pairs_MB, unused if weights_TK is None else weights_TK, xa_SPR, b_ERN, y,
        x.stride(0), tokens, N=N, K=K, TOP_K=plan.top_k, BY_TOKEN=by_token, GATED=gated, TO_PAIR=weights_TK is not None, R=rank,
        XA_SPLITS=len(xa_SPR), NF4=nf4, PTX=cuda_capability() > 0, SPLIT_K=split_k, BLOCK_M=plan.block_m, BLOCK_N=options.block_n,
        BLOCK_K=options.block_k, NUM_STAGES=options.num_stages, TMA=options.tma, num_warps=options.num_warps,
        **pdl_options(tokens),
    )  # fmt: skip


def _times_a(x: Tensor, a_ERK: Tensor, plan: ExpertPlan, tokens: int, by_token: bool) -> Tensor:
    """x a_eᵀ at each place, fp32 sums `[S, places, R]` of splits of K: several programs read the few rows of an expert's a."""
    _, rank, K = a_ERK.shape
    split_k = max(1, min(K // 512, 4)) if plan.block_m <= 32 else 1
    xa_SPR = torch.empty((split_k, plan.pairs_MB.numel(), rank), dtype=torch.float32, device=x.device)
    wide = x.element_size() > 2
    options = GroupedOptions(min(rank, 32 if wide else 64), 32 if wide else 128, 4, 2 if wide else 3)
    _launch_grouped(x, a_ERK, plan, xa_SPR, options, tokens, by_token, split_k=split_k)
    return xa_SPR


def experts_gate_up_triton(
    x_TC: Tensor, gate_up_EIC: Weight, plan: ExpertPlan, options: GroupedOptions, low_rank: LowRank | None = None
) -> Tensor:
    """silu(x gate_eᵀ) * (x up_eᵀ) for each pair, at its place in the plan: `[places, I]`, undefined where there is no pair."""
    hidden_PI = x_TC.new_empty((plan.pairs_MB.numel(), gate_up_EIC.shape[1] // 2))
    _launch_grouped(x_TC, gate_up_EIC, plan, hidden_PI, options, len(x_TC), by_token=True, gated=True, low_rank=low_rank)
    return hidden_PI


def experts_down_triton(
    hidden_PI: Tensor, down_ECI: Weight, weights_TK: Tensor, plan: ExpertPlan, options: GroupedOptions,
    low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """weight * (hidden down_eᵀ) for each pair: `[K, T, C]`."""
    T, top_k = weights_TK.shape
    y_KTC = hidden_PI.new_empty((top_k, T, down_ECI.shape[1]))
    _launch_grouped(hidden_PI, down_ECI, plan, y_KTC, options, T, weights_TK=weights_TK, low_rank=low_rank)
    return y_KTC
