"""Decode attention over paged keys and values: split over the KV, merged by log-sum-exp (flex_triton.py has the conventions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flex_triton import cdiv, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs


@dataclass(frozen=True)
class DecodeOptions:
    """How decode attention is cut up; `flex_autotune_replay.py` searches these on a given GPU."""

    block_n: int = 64  # keys per tile
    num_warps: int = 4
    num_stages: int = 2  # tiles of K and V in flight per program
    ctas_per_sm: int = 4  # the KV of all rows is cut into about this many chunks per SM
    min_tiles: int = 1  # a chunk holds at least this many tiles, unless its row is shorter

    def __post_init__(self):
        if self.block_n < 16 or self.block_n & (self.block_n - 1):
            raise ValueError(f"DecodeOptions.block_n must be a power of two of at least 16, got {self.block_n}")


def default_decode_options(head_dim: int, dtype: torch.dtype, batch_size: int) -> DecodeOptions:
    """Measured best on an H200 at head size 128 (kernel_bench.py); elsewhere what fits Hopper's shared memory and registers."""
    if dtype == torch.float32:  # IEEE dots run on the plain ALUs: for checking numerics, not for speed
        return DecodeOptions(block_n=16, num_stages=2)
    if head_dim <= 128:
        return DecodeOptions() if batch_size < 192 else DecodeOptions(block_n=32, num_stages=3, ctas_per_sm=8)
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
    if not use_triton(lengths_B):
        return None
    return decode_attention_plan_triton(lengths_B, num_kv_heads, head_dim, dtype, window, options)


@jit
def _decode_plan_kernel(
    lengths_ptr, chunks_ptr, arrivals_ptr, B, capacity, target_chunks, min_tiles,
    HKV: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_HKV: tl.constexpr, PDL: tl.constexpr,
):
    """Program r places the chunks of row r. Every program reads all lengths, so that none waits for another."""
    wait_for_inputs(PDL)
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
    options = options or default_decode_options(head_dim, dtype, len(lengths_B))
    B, device = len(lengths_B), lengths_B.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if lengths_B.is_cuda else 4
    target_chunks = max(num_sms * options.ctas_per_sm // num_kv_heads, 1)
    capacity = B + target_chunks  # sum of ceil(tiles / share) <= B + total / share
    chunks_S5 = torch.empty((capacity, 5), dtype=torch.int32, device=device)
    arrivals_BH = torch.empty((B, num_kv_heads), dtype=torch.int32, device=device)
    _decode_plan_kernel[(B,)](
        lengths_B, chunks_S5, arrivals_BH, B, capacity, target_chunks, options.min_tiles,
        HKV=num_kv_heads, WINDOW=window or 0, BLOCK_N=options.block_n, BLOCK_B=next_power_of_2(B),
        BLOCK_CHUNKS=next_power_of_2(target_chunks + 1), BLOCK_REST=next_power_of_2(cdiv(capacity, B)),
        BLOCK_HKV=next_power_of_2(num_kv_heads), num_warps=4, **pdl_options(),
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
    if not use_triton(q_BHD):
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


@jit
def _tile_pages(page_table_ptr, tile, length, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a tile's keys: one for all if a tile fits into a page, else one for each key."""
    if BLOCK_N <= PAGE_SIZE:
        return tl.load(page_table_ptr + tile * BLOCK_N // PAGE_SIZE, mask=tile * BLOCK_N < length, other=0)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(page_table_ptr + n // PAGE_SIZE, mask=n < length, other=0)


@jit
def _paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table_ptr, lengths_ptr, chunks_ptr, arrivals_ptr, partial_out_ptr,
    partial_lse_ptr, scale, softcap, q_stride_b, q_stride_h, k_stride_h, k_stride_n, v_stride_h, v_stride_n,
    table_stride, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """One program: one chunk of one row's keys, for the G query heads of one KV head. Softmax in base 2."""
    wait_for_inputs(PDL)
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
        SOFTCAP=softcap is not None, BLOCK_G=max(next_power_of_2(group), 16), BLOCK_D=next_power_of_2(D),
        BLOCK_N=options.block_n, NUM_STAGES=options.num_stages, num_warps=options.num_warps, **pdl_options(),
    )
    return out_BHD
