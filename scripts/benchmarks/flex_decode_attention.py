"""Decode attention over paged keys and values: split over the KV, merged by log-sum-exp (flex_triton.py has the conventions).

Rows that begin with the same pages, such as the completions of one prompt, can read those once for all of them:

    row 4   [ 11 12 13 ] 40 41         one chunk of pages 11 12 13 with the queries of rows 4, 5 and 6,
    row 5   [ 11 12 13 ] 52            and chunks of 40 41, of 52 and of 63 with one row's queries each
    row 6   [ 11 12 13 ] 63

A plan finds such rows by itself, from the page table and on the GPU. They have to be neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flex_triton import cdiv, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs


MIN_SHARED_KEYS = 128  # a shorter shared prefix is not worth one more partial result for each of its rows


@dataclass(frozen=True)
class DecodeOptions:
    """How decode attention is cut up; `flex_autotune_replay.py` searches these on a given GPU."""

    block_n: int = 64  # keys per tile
    num_warps: int = 4
    num_stages: int = 2  # tiles of K and V in flight per program
    ctas_per_sm: int = 4  # the KV of all rows is cut into about this many chunks per SM
    min_tiles: int = 1  # a chunk holds at least this many tiles, unless its row is shorter
    shared_queries: int = 32  # that read a shared prefix together: rows times the query heads of a KV head

    def __post_init__(self):
        for name in ("block_n", "shared_queries"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"DecodeOptions.{name} must be a power of two of at least 16, got {value}")


def default_decode_options(head_dim: int, dtype: torch.dtype, batch_size: int) -> DecodeOptions:
    """Measured best on an H200 at head size 128 (kernel_bench.py), and at 256 and 512 with Gemma-4-E2B (flex_autotune_replay.py)."""
    if dtype == torch.float32:  # IEEE dots run on the plain ALUs: for checking numerics, not for speed
        return DecodeOptions(block_n=16, num_stages=2, shared_queries=16)
    if head_dim <= 128:
        return DecodeOptions() if batch_size < 192 else DecodeOptions(block_n=32, num_stages=3, ctas_per_sm=8)
    return DecodeOptions(block_n=64 if head_dim <= 256 else 32, ctas_per_sm=2)


@dataclass(frozen=True)
class SharedPages:
    """Where a plan looks for rows that begin with the same pages as the row before; `num_heads` query heads per row."""

    page_table_BP: Tensor
    page_size: int
    num_heads: int


@dataclass(frozen=True)
class DecodePlan:
    """The work table of one decode step, shared by every layer that has the same window, head counts and head size.

    `chunks_S5` int32: (first row, rows, first tile, last tile + 1, index among the chunks of each of these rows), those of
    several rows first, then the longest, row = -1 past the last one. `partials_B2` int32: where each row's partial
    results begin, and how many there are. `arrivals_BH` counts the finished chunks of a row and head within one launch:
    zero between launches.
    """

    chunks_S5: Tensor
    partials_B2: Tensor
    arrivals_BH: Tensor
    num_partials: int  # the most that any lengths need
    max_rows: int  # of a chunk; 1: nothing is shared
    window: int | None
    options: DecodeOptions


def decode_attention_plan(
    lengths_B: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None = None,
    options: DecodeOptions | None = None, shared: SharedPages | None = None,
) -> DecodePlan | None:
    """Cut the keys that each row sees into chunks of nearly equal size, on the GPU and in one or two small kernels.

    The number of table entries is fixed by the batch size and the GPU; how many are used depends on `lengths_B`. With
    `shared`, neighbours that begin with the same pages read these together. A row that its window keeps from seeing all
    its keys reads alone. Returns None on a CPU, where the reference needs no plan.
    """
    if not use_triton(lengths_B):
        return None
    return decode_attention_plan_triton(lengths_B, num_kv_heads, head_dim, dtype, window, options, shared)


def shared_pages_reference(lengths_B, page_table_BP, page_size, window=None) -> Tensor:
    """Full pages, int32 [B], that each row and the row before both begin with."""
    full_B = lengths_B // page_size
    if window is not None:
        full_B = full_B.where(lengths_B <= window, 0)
    same_BP = page_table_BP[1:] == page_table_BP[:-1]
    same_B = same_BP.int().cumprod(1).sum(1)
    pages_B = torch.zeros_like(full_B)
    pages_B[1:] = torch.minimum(same_B, torch.minimum(full_B[1:], full_B[:-1]))
    return pages_B.int()


@jit
def _shared_pages_kernel(
    lengths_ptr, page_table_ptr, pages_ptr, table_stride, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):
    """Program r compares row r with the row before."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    above = tl.maximum(row - 1, 0)
    longer = tl.maximum(tl.load(lengths_ptr + row), tl.load(lengths_ptr + above))
    pages = tl.minimum(tl.load(lengths_ptr + row), tl.load(lengths_ptr + above)) // PAGE_SIZE
    if WINDOW > 0:
        pages = tl.where(longer > WINDOW, 0, pages)
    pages = tl.where(row == 0, 0, pages)
    table_ptr = page_table_ptr + row.to(tl.int64) * table_stride
    above_ptr = page_table_ptr + above.to(tl.int64) * table_stride
    same = pages
    for start in tl.range(0, pages, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        mask = index < pages
        differs = tl.load(table_ptr + index, mask=mask, other=0) != tl.load(above_ptr + index, mask=mask, other=0)
        same = tl.minimum(same, tl.min(tl.where(differs, index, pages)))
    tl.store(pages_ptr + row, same)


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def _find_groups(pages_ptr, rows, B, min_pages, MAX_ROWS: tl.constexpr):
    """For each row: its group's first row, and the pages that all of the group begin with (0 in a group of one).

    A group ends where the pages shared with the row before are too few, or fewer than before: within it they never
    decrease, so that the second row's count holds for all. It also ends after MAX_ROWS rows.
    """
    before = tl.load(pages_ptr + rows - 1, mask=(rows > 0) & (rows <= B), other=0)
    pages = tl.load(pages_ptr + rows, mask=rows < B, other=0)
    after = tl.load(pages_ptr + rows + 1, mask=rows + 1 < B, other=0)
    begins = (pages < min_pages) | (pages < before)
    run = tl.associative_scan(tl.where(begins, rows, 0), 0, _larger)
    begins = begins | ((rows - run) % MAX_ROWS == 0)
    is_followed = (after >= min_pages) & (after >= pages) & ((rows + 1 - run) % MAX_ROWS != 0)
    # The first row that is nearest above wins, and carries its pages along.
    first = tl.associative_scan(tl.where(begins, rows * 65536 + tl.where(is_followed, after, 0), 0), 0, _larger)
    return first // 65536, first % 65536


@jit
def _decode_plan_kernel(
    lengths_ptr, pages_ptr, chunks_ptr, partials_ptr, arrivals_ptr, B, capacity, target_chunks, min_tiles, min_pages,
    HKV: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_HKV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r places the chunks of row r, and those of its group if it is the first. Every program reads all lengths,
    so that none waits for another."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_B)
    mine = rows == row
    index = tl.arange(0, BLOCK_CHUNKS)
    lengths = tl.load(lengths_ptr + rows, mask=rows < B, other=0).to(tl.int32)
    first_tiles = tl.zeros_like(lengths)
    if WINDOW > 0:
        first_tiles = tl.maximum(lengths - WINDOW, 0) // BLOCK_N
    work = 0
    if MAX_ROWS > 1:
        first_rows, pages = _find_groups(pages_ptr, rows, B, min_pages, MAX_ROWS)
        is_first = first_rows == rows
        shared_tiles = pages * PAGE_SIZE // BLOCK_N
        first_tiles += shared_tiles  # a row in a group sees all its keys, so this was 0
        work = tl.sum(tl.where(is_first, shared_tiles, 0))
    tiles = (lengths + BLOCK_N - 1) // BLOCK_N - first_tiles
    share = tl.maximum((work + tl.sum(tiles) + target_chunks - 1) // target_chunks, min_tiles)
    counts = (tiles + share - 1) // share
    sizes = (tiles + counts - 1) // tl.maximum(counts, 1)
    row_counts = counts
    used, my_shared_count = 0, 0
    if MAX_ROWS > 1:
        shared_counts = (shared_tiles + share - 1) // share
        row_counts += shared_counts
        placed = tl.where(is_first, shared_counts, 0)
        used = tl.sum(placed)
        my_shared_count = tl.sum(tl.where(mine, shared_counts, 0))
        my_shared_tiles = tl.sum(tl.where(mine, shared_tiles, 0))
        my_first_row = tl.sum(tl.where(mine, first_rows, 0))
        group_size = tl.sum(((first_rows == row) & (rows < B)).to(tl.int32))
        entry_ptrs = chunks_ptr + (tl.sum(tl.where(rows < row, placed, 0)) + index) * 5
        mask = (index < my_shared_count) & (my_first_row == row)
        tl.store(entry_ptrs, tl.zeros_like(index) + row, mask=mask)
        tl.store(entry_ptrs + 1, tl.zeros_like(index) + group_size, mask=mask)
        tl.store(entry_ptrs + 2, index * my_shared_tiles // tl.maximum(my_shared_count, 1), mask=mask)
        tl.store(entry_ptrs + 3, (index + 1) * my_shared_tiles // tl.maximum(my_shared_count, 1), mask=mask)
        tl.store(entry_ptrs + 4, index, mask=mask)

    my_first = tl.sum(tl.where(mine, first_tiles, 0))
    my_tiles = tl.sum(tl.where(mine, tiles, 0))
    my_count = tl.sum(tl.where(mine, counts, 0))
    my_size = tl.sum(tl.where(mine, sizes, 0))
    # Longest chunks first: the hardware starts programs in order, so the short ones fill the tail.
    ahead = (sizes > my_size) | ((sizes == my_size) & (rows < row))
    entry_ptrs = chunks_ptr + (used + tl.sum(tl.where(ahead, counts, 0)) + index) * 5
    mask = index < my_count
    tl.store(entry_ptrs, tl.zeros_like(index) + row, mask=mask)
    tl.store(entry_ptrs + 1, tl.zeros_like(index) + 1, mask=mask)
    tl.store(entry_ptrs + 2, my_first + index * my_tiles // tl.maximum(my_count, 1), mask=mask)
    tl.store(entry_ptrs + 3, my_first + (index + 1) * my_tiles // tl.maximum(my_count, 1), mask=mask)
    tl.store(entry_ptrs + 4, my_shared_count + index, mask=mask)

    tl.store(partials_ptr + row * 2, tl.sum(tl.where(rows < row, row_counts, 0)))
    tl.store(partials_ptr + row * 2 + 1, my_shared_count + my_count)
    unused = used + tl.sum(counts) + row + tl.arange(0, BLOCK_REST) * B
    tl.store(chunks_ptr + unused * 5, tl.full([BLOCK_REST], -1, tl.int32), mask=unused < capacity)
    heads = tl.arange(0, BLOCK_HKV)
    tl.store(arrivals_ptr + row * HKV + heads, tl.zeros([BLOCK_HKV], tl.int32), mask=heads < HKV)


def decode_attention_plan_triton(
    lengths_B, num_kv_heads, head_dim, dtype, window=None, options=None, shared=None
) -> DecodePlan:
    options = options or default_decode_options(head_dim, dtype, len(lengths_B))
    B, device = len(lengths_B), lengths_B.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if lengths_B.is_cuda else 4
    target_chunks = max(num_sms * options.ctas_per_sm // num_kv_heads, 1)
    # The sum of ceil(tiles / share) is at most the number of terms, a row or group each, plus total / share.
    capacity = num_partials = B + target_chunks
    max_rows, pages_B, page_size = 1, lengths_B, options.block_n
    if shared is not None:
        page_size = shared.page_size
        max_rows = max(options.shared_queries // next_power_of_2(shared.num_heads // num_kv_heads), 1)
    if max_rows > 1:
        assert B < 2**15 and shared.page_table_BP.shape[1] < 2**16 and shared.page_table_BP.stride(1) == 1
        capacity, num_partials = capacity + B // 2, 2 * B + min(max_rows, B) * target_chunks
        pages_B = torch.empty(B, dtype=torch.int32, device=device)
        _shared_pages_kernel[(B,)](
            lengths_B, shared.page_table_BP, pages_B, shared.page_table_BP.stride(0), PAGE_SIZE=page_size,
            WINDOW=window or 0, BLOCK_P=64, num_warps=1, **pdl_options(B),
        )
    chunks_S5 = torch.empty((capacity, 5), dtype=torch.int32, device=device)
    partials_B2 = torch.empty((B, 2), dtype=torch.int32, device=device)
    arrivals_BH = torch.empty((B, num_kv_heads), dtype=torch.int32, device=device)
    _decode_plan_kernel[(B,)](
        lengths_B, pages_B, chunks_S5, partials_B2, arrivals_BH, B, capacity, target_chunks, options.min_tiles,
        cdiv(MIN_SHARED_KEYS, page_size), HKV=num_kv_heads, WINDOW=window or 0, PAGE_SIZE=page_size, MAX_ROWS=max_rows,
        BLOCK_N=options.block_n, BLOCK_B=next_power_of_2(B), BLOCK_CHUNKS=next_power_of_2(target_chunks + 1),
        BLOCK_REST=next_power_of_2(cdiv(capacity, B)), BLOCK_HKV=next_power_of_2(num_kv_heads), num_warps=4,
        **pdl_options(B),
    )
    return DecodePlan(chunks_S5, partials_B2, arrivals_BH, num_partials, max_rows, window, options)


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
    - `plan`: from `decode_attention_plan` with the same lengths, window and page table; built here, unshared, if missing.

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
    """The page of a tile's keys: one for all if a tile fits into a page, else one for each key. Page 0 where there is no such tile."""
    if BLOCK_N <= PAGE_SIZE:
        return tl.load(page_table_ptr + tile * BLOCK_N // PAGE_SIZE, mask=(tile >= 0) & (tile * BLOCK_N < length), other=0)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(page_table_ptr + n // PAGE_SIZE, mask=(n >= 0) & (n < length), other=0)


@jit
def _attend_tiles(
    q, k_ptr, v_ptr, page_table_ptr, begin, end, length, scale, softcap, k_stride_n, v_stride_n, D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """BLOCK_M queries over the keys of tiles begin ... end - 1 -> (output, its log2-sum-exp2). Softmax in base 2.

    From the last tile to the first, as FlashAttention 2 does (behind sdpa, in most trainers): weights are rounded before they multiply
    V, relative to the largest score so far, so that an unsplit row in tiles of 64 is rounded as it is there.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    d = tl.arange(0, BLOCK_D)
    # The next tile's pages are loaded one tile ahead: behind an address that is still in flight, K and V loads could
    # not be pipelined.
    next_page = _tile_pages(page_table_ptr, end - 1, length, PAGE_SIZE, BLOCK_N)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over the tile's width once, after the loop
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in tl.range(end - 1, begin - 1, -1, num_stages=NUM_STAGES):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = n < length
        slot = next_page.to(tl.int64) * PAGE_SIZE + n % PAGE_SIZE
        next_page = _tile_pages(page_table_ptr, tile - 1, length, PAGE_SIZE, BLOCK_N)
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
    return acc / running_sum[:, None], running_max + tl.log2(running_sum)


@jit
def _merge_row(
    out_ptr, partial_out_ptr, partial_lse_ptr, partials_ptr, row, kv_head, HKV: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """One row's partial results, merged in chunk order."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    mask_gd = (g < G)[:, None] & (d < D)[None, :]
    head_g = kv_head * G + g
    head_gd = head_g[:, None] * D + d[None, :]
    first, count = tl.load(partials_ptr + row * 2), tl.load(partials_ptr + row * 2 + 1)
    merged_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    merged_sum = tl.zeros([BLOCK_G], tl.float32)
    merged = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for i in tl.range(first, first + count, loop_unroll_factor=4):
        lse = tl.load(partial_lse_ptr + i * (HKV * G) + head_g, mask=g < G, other=0.0, cache_modifier=".cg")
        part = tl.load(partial_out_ptr + i * (HKV * G * D) + head_gd, mask=mask_gd, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(merged_max, lse)
        decay = tl.exp2(merged_max - new_max)
        weight = tl.exp2(lse - new_max)
        merged_sum = merged_sum * decay + weight
        merged = merged * decay[:, None] + part * weight[:, None]
        merged_max = new_max
    merged = merged / merged_sum[:, None]
    tl.store(out_ptr + row * (HKV * G * D) + head_gd, merged.to(out_ptr.dtype.element_ty), mask=mask_gd)


@jit
def _paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table_ptr, lengths_ptr, chunks_ptr, partials_ptr, arrivals_ptr, partial_out_ptr,
    partial_lse_ptr, scale, softcap, q_stride_b, q_stride_h, k_stride_h, k_stride_n, v_stride_h, v_stride_n,
    table_stride, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MAX_ROWS: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """One program: one chunk of keys, for the G query heads of one KV head of one row, or of several with MAX_ROWS > 1."""
    wait_for_inputs(PDL)
    entry = tl.program_id(0) // HKV
    kv_head = tl.program_id(0) % HKV
    row = tl.load(chunks_ptr + entry * 5)
    if row < 0:
        return
    num_rows = tl.load(chunks_ptr + entry * 5 + 1)
    begin = tl.load(chunks_ptr + entry * 5 + 2)
    end = tl.load(chunks_ptr + entry * 5 + 3)
    index = tl.load(chunks_ptr + entry * 5 + 4)
    length = tl.load(lengths_ptr + row)
    d = tl.arange(0, BLOCK_D)
    k_ptr += kv_head.to(tl.int64) * k_stride_h
    v_ptr += kv_head.to(tl.int64) * v_stride_h
    page_table_ptr += row.to(tl.int64) * table_stride

    # The last program to arrive at a row sees all of the row's partial results, each published before it was counted.
    if MAX_ROWS > 1 and num_rows > 1:
        m = tl.arange(0, BLOCK_M)
        row_m, head_m = row + m // GROUP_M, kv_head * G + m % GROUP_M
        mask_m = (m < num_rows * GROUP_M) & (m % GROUP_M < G)
        mask_md = mask_m[:, None] & (d < D)[None, :]
        q_md = tl.load(q_ptr + row_m[:, None] * q_stride_b + head_m[:, None] * q_stride_h + d[None, :], mask_md, 0.0)
        out_md, lse_m = _attend_tiles(
            q_md, k_ptr, v_ptr, page_table_ptr, begin, end, length, scale, softcap, k_stride_n, v_stride_n, D,
            PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_M, BLOCK_D, BLOCK_N, NUM_STAGES,
        )
        partial_m = (tl.load(partials_ptr + row_m * 2, mask_m, 0) + index) * (HKV * G) + head_m
        tl.store(partial_out_ptr + partial_m[:, None] * D + d[None, :], out_md, mask_md)
        tl.store(partial_lse_ptr + partial_m, lse_m, mask_m)
        r = tl.arange(0, MAX_ROWS)
        mask_r = r < num_rows
        count_r = tl.load(partials_ptr + (row + r) * 2 + 1, mask_r, 0)
        arrivals_ptr_r = arrivals_ptr + (row + r) * HKV + kv_head
        tl.debug_barrier()
        arrived_r = tl.atomic_add(arrivals_ptr_r, 1, mask=mask_r, sem="acq_rel")
        is_last_r = mask_r & (arrived_r == count_r - 1)
        tl.store(arrivals_ptr_r, tl.zeros_like(count_r), is_last_r)
        for i in range(num_rows):
            if tl.sum((is_last_r & (r == i)).to(tl.int32)) > 0:
                _merge_row(
                    out_ptr, partial_out_ptr, partial_lse_ptr, partials_ptr, row + i, kv_head, HKV, G, D, BLOCK_G, BLOCK_D
                )
    else:
        g = tl.arange(0, BLOCK_G)
        mask_gd = (g < G)[:, None] & (d < D)[None, :]
        head_g = kv_head * G + g
        q_gd = tl.load(q_ptr + row * q_stride_b + head_g[:, None] * q_stride_h + d[None, :], mask_gd, 0.0)
        out_gd, lse_g = _attend_tiles(
            q_gd, k_ptr, v_ptr, page_table_ptr, begin, end, length, scale, softcap, k_stride_n, v_stride_n, D,
            PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_G, BLOCK_D, BLOCK_N, NUM_STAGES,
        )
        # Loaded here because before the loop it would cost 20 registers, and with them a program per SM.
        first, count = tl.load(partials_ptr + row * 2), tl.load(partials_ptr + row * 2 + 1)
        if count == 1:
            out_ptrs = out_ptr + (row * (HKV * G) + head_g)[:, None] * D + d[None, :]
            tl.store(out_ptrs, out_gd.to(out_ptr.dtype.element_ty), mask_gd)
        else:
            partial_g = (first + index) * (HKV * G) + head_g
            tl.store(partial_out_ptr + partial_g[:, None] * D + d[None, :], out_gd, mask_gd)
            tl.store(partial_lse_ptr + partial_g, lse_g, g < G)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + row * HKV + kv_head, 1, sem="acq_rel")
            if arrived == count - 1:
                tl.store(arrivals_ptr + row * HKV + kv_head, 0)
                _merge_row(
                    out_ptr, partial_out_ptr, partial_lse_ptr, partials_ptr, row, kv_head, HKV, G, D, BLOCK_G, BLOCK_D
                )


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
    options = plan.options
    assert plan.max_rows in (1, options.shared_queries // next_power_of_2(group)), "the plan was built for other query heads"
    out_BHD = q_BHD.new_empty((B, H, D))
    partial_out = torch.empty((plan.num_partials, H, D), dtype=torch.float32, device=q_BHD.device)
    partial_lse = torch.empty((plan.num_partials, H), dtype=torch.float32, device=q_BHD.device)
    _paged_decode_kernel[(len(plan.chunks_S5) * num_kv_heads,)](
        q_BHD, k_pool_HND, v_pool_HND, out_BHD, page_table_BP, lengths_B, plan.chunks_S5, plan.partials_B2,
        plan.arrivals_BH, partial_out, partial_lse, scale, softcap or 0.0, *q_BHD.stride()[:2],
        *k_pool_HND.stride()[:2], *v_pool_HND.stride()[:2], page_table_BP.stride(0), HKV=num_kv_heads, G=group, D=D,
        PAGE_SIZE=page_size, WINDOW=window or 0, SOFTCAP=softcap is not None, MAX_ROWS=plan.max_rows,
        GROUP_M=next_power_of_2(group), BLOCK_M=options.shared_queries,
        BLOCK_G=max(next_power_of_2(group), 16), BLOCK_D=next_power_of_2(D), BLOCK_N=options.block_n,
        NUM_STAGES=options.num_stages, num_warps=options.num_warps, **pdl_options(B),
    )
    return out_BHD
