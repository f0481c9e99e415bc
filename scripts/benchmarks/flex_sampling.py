"""Sampling without a sort, with counter-based noise (flex_triton.py has the conventions).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flex_triton import cdiv, jit, next_power_of_2, pdl_options, tl, use_triton, wait_for_inputs


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
    run = sample_triton if use_triton(logits_BV) else sample_reference
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


@jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def _noise_keys(seed, position):
    mixed = _mix64(_mix64(seed.to(tl.uint64)) + position.to(tl.uint64))
    return (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)


@jit
def _noise_bits(key0, key1, tokens):
    """23 random bits for each token: u = (bits + 1/2) / 2**23."""
    return _mix32(_mix32((tokens.to(tl.uint32) * 0x9E3779B1) ^ key0) ^ key1) >> 9


@jit
def _exponential_noise(bits):
    """Standard exponential noise, -log(u); minus its logarithm is `gumbel_noise_reference`."""
    return -tl.log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07)  # 2**-23


@jit
def _exponential_noise_floor(bits):
    """1 - u <= -log(u), exactly and without a logarithm; the closer the smaller, and a winner's noise is small."""
    return (2.0 - (bits | 0x3F800000).to(tl.float32, bitcast=True)) - 5.9604644775390625e-08  # 2**-24


@jit
def _float_to_key(x, DTYPE: tl.constexpr):
    """Floats of a dtype as int64 keys in the same order, one step per representable value."""
    if DTYPE == tl.float32:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        bits = x.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int64)


@jit
def _key_to_float(key, DTYPE: tl.constexpr):
    key = key.to(tl.int32)
    if DTYPE == tl.float32:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        bits = key ^ ((key >> 31) & 0x7FFF)
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@jit
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


@jit
def _lane_total(values, floors, top, inv_temperature, MASS: tl.constexpr):
    """For each of the floors [WAYS, 1], how many of the values (tensors [1, BLOCK]) reach it, or their mass."""
    totals = tl.zeros([floors.shape[0], values[0].shape[1]], tl.float32)
    for i in tl.static_range(len(values)):
        weight = tl.full(values[i].shape, 1.0, tl.float32)
        if MASS:
            weight = tl.exp2((values[i] - top) * (inv_temperature * 1.4426950408889634))
        totals += tl.where(values[i] >= floors, weight, 0.0)
    return tl.sum(totals, axis=1)


@jit
def _lane_search(values, lo, hi, goal, top, inv_temperature, MASS: tl.constexpr, DTYPE: tl.constexpr):
    """`_threshold_search` over values that are in registers, for a goal that is a count or a mass."""
    WAYS: tl.constexpr = 4
    ways = tl.arange(0, WAYS)
    while hi - lo > 1:
        step = (hi - lo + WAYS - 1) // WAYS
        keys = tl.minimum(lo + ways * step, hi)
        reached = _lane_total(values, _key_to_float(keys, DTYPE)[:, None], top, inv_temperature, MASS) >= goal
        new_lo = tl.max(tl.where(reached, keys, lo))
        hi = tl.min(tl.where(reached, hi, keys))
        lo = new_lo
    return lo


@jit
def _sample_threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, positions_ptr, threshold_ptr, keys_ptr, V,
    logits_stride, WAYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program per row: the noise's keys, and the lowest logit that the row's filters keep; rows without filters leave at once.

    One pass over the row leaves each lane's six largest logits in registers. Among them are all that exceed the largest
    sixth one, which is nearly always all that the filters keep; otherwise the row is searched itself. Both are exact.
    """
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    row = tl.program_id(0)
    key0, key1 = _noise_keys(tl.load(seed_ptr + row), tl.load(positions_ptr + row))
    tl.store(keys_ptr + row * 2, key0.to(tl.int32, bitcast=True))
    tl.store(keys_ptr + row * 2 + 1, key1.to(tl.int32, bitcast=True))
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    use_top_k = (top_k > 0) & (top_k < V)
    threshold = -float("inf")
    if (temperature > 0) & (use_top_k | (top_p < 1.0) | (min_p > 0.0)):
        logits_ptr += row.to(tl.int64) * logits_stride
        inv_temperature = tl.div_rn(1.0, temperature)
        lanes = tl.arange(0, BLOCK)[None, :]
        a = tl.full([1, BLOCK], -float("inf"), tl.float32)
        b, c, d, e, f = a, a, a, a, a
        for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
            x = tl.load(logits_ptr + start + lanes, mask=start + lanes < V, other=-float("inf")).to(tl.float32)
            a, x = tl.maximum(a, x), tl.minimum(a, x)
            b, x = tl.maximum(b, x), tl.minimum(b, x)
            c, x = tl.maximum(c, x), tl.minimum(c, x)
            d, x = tl.maximum(d, x), tl.minimum(d, x)
            e, x = tl.maximum(e, x), tl.minimum(e, x)
            f = tl.maximum(f, x)
        largest = (a, b, c, d, e, f)
        top = tl.max(a)
        lowest = _float_to_key(tl.full([], -float("inf"), tl.float32), DTYPE)
        lo, hi = lowest, _float_to_key(top, DTYPE) + 1
        complete = _float_to_key(tl.max(f), DTYPE) + 1  # every logit of at least this key is in the lanes
        floor = tl.full([1, 1], 0.0, tl.float32) + _key_to_float(complete, DTYPE)
        in_lanes = complete < hi
        if use_top_k:
            count = top_k.to(tl.float32)
            if in_lanes:
                in_lanes = tl.max(_lane_total(largest, floor, top, inv_temperature, False)) >= count
            if in_lanes:
                lo = _lane_search(largest, complete, hi, count, top, inv_temperature, False, DTYPE)
            else:
                lo = _threshold_search(logits_ptr, V, lo, hi, count, top, inv_temperature, False, WAYS, BLOCK)
        if top_p < 1.0:
            total = 0.0
            if use_top_k & in_lanes:
                at_lo = tl.full([1, 1], 0.0, tl.float32) + _key_to_float(lo, DTYPE)
                total = tl.max(_lane_total(largest, at_lo, top, inv_temperature, True))
            elif in_lanes:
                mass = tl.zeros([1, BLOCK], tl.float32)
                for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
                    x = tl.load(logits_ptr + start + lanes, mask=start + lanes < V, other=-float("inf")).to(tl.float32)
                    mass += tl.exp2((x - top) * (inv_temperature * 1.4426950408889634))
                total = tl.sum(mass)
                in_lanes = tl.max(_lane_total(largest, floor, top, inv_temperature, True)) >= top_p * total
            if in_lanes:
                lo = tl.maximum(lo, complete)
                lo = _lane_search(largest, lo, hi, top_p * total, top, inv_temperature, True, DTYPE)
            else:
                # What lies 32 nats below the top weighs less than fp32 resolves, over any vocabulary.
                lo = tl.maximum(lo, _float_to_key(top - 32.0 * temperature, DTYPE))
                lo = _threshold_search(logits_ptr, V, lo, hi, top_p, top, inv_temperature, True, WAYS, BLOCK)
        if lo > lowest:
            threshold = _key_to_float(lo, DTYPE)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + temperature * tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


@jit
def _sample_slice_kernel(
    logits_ptr, temperature_ptr, threshold_ptr, keys_ptr, stats_ptr, V, logits_stride, num_slices, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and slice of the vocabulary: its maximum, its masses, and what no noisy token of it exceeds."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    piece = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    threshold = tl.load(threshold_ptr + row)
    tokens = piece * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row.to(tl.int64) * logits_stride
    x = tl.load(logits_ptr + tokens, mask=tokens < V, other=-float("inf")).to(tl.float32)
    inv_temperature = 1.0
    if temperature > 0:
        inv_temperature = tl.div_rn(1.0, temperature)
    top = tl.max(x)
    distance = (x - tl.where(top == -float("inf"), 0.0, top)) * (inv_temperature * 1.4426950408889634)
    weights = tl.exp2(distance)
    mass = tl.sum(weights)  # NaN if one of the logits is NaN or +inf
    kept_mass = mass
    bound = top
    if temperature > 0:
        # A token wins with the largest weight / E, where E is exponential noise: s - log(E) is s + Gumbel noise.
        bits = _noise_bits(tl.load(keys_ptr + row * 2).to(tl.uint32), tl.load(keys_ptr + row * 2 + 1).to(tl.uint32), tokens)
        noise = _exponential_noise_floor(bits) * tl.exp2(-distance)
        if threshold > -float("inf"):
            kept_mass = tl.sum(tl.where(x >= threshold, weights, 0.0))
            noise = tl.where(x >= threshold, noise, float("inf"))
        scaled = top * inv_temperature
        bound = scaled - tl.log(tl.min(noise)) + 1e-3 + 1e-6 * tl.abs(scaled)  # rounding is less than that
    stats_ptr += (row * num_slices + piece) * 4
    tl.store(stats_ptr, top)
    tl.store(stats_ptr + 1, mass)
    tl.store(stats_ptr + 2, kept_mass)
    tl.store(stats_ptr + 3, bound)


@jit
def _sample_merge_kernel(
    logits_ptr, temperature_ptr, threshold_ptr, keys_ptr, stats_ptr, tokens_ptr, logprobs_ptr, full_logprobs_ptr, V,
    logits_stride, num_slices, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program per row: noise and argmax in the slices that may hold the winner, most promising first; mostly one."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    pieces = tl.arange(0, BLOCK_S)
    mask = pieces < num_slices
    stats_ptrs = stats_ptr + (row * num_slices + pieces) * 4
    tops = tl.load(stats_ptrs, mask=mask, other=-float("inf"))
    masses = tl.load(stats_ptrs + 1, mask=mask, other=0.0)
    kept_masses = tl.load(stats_ptrs + 2, mask=mask, other=0.0)
    bounds = tl.load(stats_ptrs + 3, mask=mask, other=-float("inf"))
    temperature = tl.load(temperature_ptr + row)
    threshold = tl.load(threshold_ptr + row)
    key0 = tl.load(keys_ptr + row * 2).to(tl.uint32)
    key1 = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32)
    logits_ptr += row.to(tl.int64) * logits_stride
    inv_temperature = 1.0
    if temperature > 0:
        inv_temperature = tl.div_rn(1.0, temperature)
    top = tl.max(tops)
    broken = (tl.max((masses != masses).to(tl.int32)) > 0) | (top == -float("inf"))
    bounds = tl.where(broken, -float("inf"), bounds)
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    highest = tl.max(bounds)
    while (highest >= best) & (highest > -float("inf")):
        piece = tl.min(tl.where(bounds == highest, pieces, 0x7FFFFFFF))
        bounds = tl.where(pieces == piece, -float("inf"), bounds)
        highest = tl.max(bounds)
        tokens = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + tokens, mask=tokens < V, other=-float("inf")).to(tl.float32)
        score = x
        if temperature > 0:
            score = x * inv_temperature - tl.log(_exponential_noise(_noise_bits(key0, key1, tokens)))
            score = tl.where(x >= threshold, score, -float("inf"))
        here = tl.max(score)
        winner = tl.min(tl.where(score == here, tokens, 0x7FFFFFFF))
        token = tl.where(here > best, winner, tl.where(here == best, tl.minimum(winner, token), token))
        best = tl.maximum(best, here)
    token = tl.where(broken, 0, token)
    rescale = tl.exp2((tops - top) * (inv_temperature * 1.4426950408889634))
    below_top = (tl.load(logits_ptr + token).to(tl.float32) - top) * inv_temperature
    logprob = below_top - tl.log(tl.sum(kept_masses * rescale))
    full_logprob = below_top - tl.log(tl.sum(masses * rescale))
    tl.store(tokens_ptr + row, tl.where(broken, -1, token).to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(broken, float("nan"), logprob))
    tl.store(full_logprobs_ptr + row, tl.where(broken, float("nan"), full_logprob))


def sample_triton(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, positions_B):
    B, V = logits_BV.shape
    assert logits_BV.stride(1) == 1
    block, stride, device = 4096, logits_BV.stride(0), logits_BV.device
    num_slices = cdiv(V, block)
    threshold_B = torch.empty(B, dtype=torch.float32, device=device)
    keys = torch.empty((B, 2), dtype=torch.int32, device=device)
    stats = torch.empty((B, num_slices, 4), dtype=torch.float32, device=device)
    tokens_B = torch.empty(B, dtype=torch.int64, device=device)
    logprobs_B, full_logprobs_B = torch.empty_like(threshold_B), torch.empty_like(threshold_B)
    _sample_threshold_kernel[(B,)](
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, positions_B, threshold_B, keys, V, stride, WAYS=8,
        BLOCK=4096, num_warps=16, **pdl_options(B),
    )
    _sample_slice_kernel[(B, num_slices)](
        logits_BV, temperature_B, threshold_B, keys, stats, V, stride, num_slices, BLOCK=block, num_warps=8, **pdl_options(B),
    )
    _sample_merge_kernel[(B,)](
        logits_BV, temperature_B, threshold_B, keys, stats, tokens_B, logprobs_B, full_logprobs_B, V, stride, num_slices,
        BLOCK_S=next_power_of_2(num_slices), BLOCK=block, num_warps=8, **pdl_options(B),
    )
    return tokens_B, logprobs_B, full_logprobs_B
