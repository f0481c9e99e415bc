"""Every Triton kernel against its plain reference: interpreted on a CPU, compiled where there is a GPU."""

import math

import pytest
import torch
from scipy.stats import chisquare

import flex_decode_attention
import flex_kernels
import flex_linear
import flex_sampling
import flex_triton

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def set_up(interpreter):
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def assert_close(actual, expected, dtype=None):
    tolerance = TOLERANCE[dtype or expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


# --- rms_norm, silu_mul ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, C, with_residual", [(1, 576, True), (3, 100, False), (5, 2560, True)])
def test_rms_norm(T, C, with_residual, dtype):
    x, weight = randn(T, 2 * C, dtype=dtype)[:, :C], randn(C, dtype=dtype)
    residual = randn(T, C, dtype=dtype, scale=30.0) if with_residual else None
    y, total = flex_kernels.rms_norm_triton(x, weight, 1e-6, residual)
    expected_y, expected_total = flex_kernels.rms_norm_reference(x, weight, 1e-6, residual)
    assert_close(total, expected_total)  # the interpreter truncates to bf16
    assert_close(y, expected_y)


def test_rms_norm_reference_is_hugging_face():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(96, eps=1e-5).to(torch.bfloat16)
    norm.weight.data = torch.randn(96).bfloat16()
    x = torch.randn(4, 96).bfloat16()
    assert torch.equal(flex_kernels.rms_norm_reference(x, norm.weight, 1e-5)[0], norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, I", [(1, 100), (4, 1536), (3, 1025)])
def test_silu_mul(T, I, dtype):
    gate_up = randn(T, 2 * I, dtype=dtype, scale=4.0)
    assert_close(flex_kernels.silu_mul_triton(gate_up), flex_kernels.silu_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, torch.tensor([0.7], device=DEVICE)], ids=["number", "on the device"])
@pytest.mark.parametrize("T, C, splits, with_next", [(1, 576, None, True), (3, 100, None, False), (2, 96, 3, True)])
def test_norm_add_norm(T, C, splits, with_next, scale, dtype):
    x = randn(T, 2 * C, dtype=dtype)[:, :C] if splits is None else randn(splits, T, C)
    residual = randn(T, 2 * C, dtype=dtype, scale=30.0)[:, C:]
    norm, next_norm = randn(C, dtype=dtype), randn(C, dtype=dtype) if with_next else None
    scale = scale.to(dtype) if isinstance(scale, torch.Tensor) else scale
    y, total = flex_kernels.norm_add_norm_triton(x, norm, 1e-6, residual, next_norm, scale)
    expected_y, expected_total = flex_kernels.norm_add_norm_reference(x, norm, 1e-6, residual, next_norm, scale)
    assert_close(total, expected_total)
    assert (y is None) == (not with_next)
    if with_next:
        assert_close(y, expected_y)


def test_norm_add_norm_reference_is_hugging_face():
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    norms = [Gemma4RMSNorm(96, eps=1e-5).to(torch.bfloat16) for _ in range(2)]
    for norm in norms:
        norm.weight.data = torch.randn(96).bfloat16()
    x, residual, scale = torch.randn(4, 96).bfloat16(), torch.randn(4, 96).bfloat16(), torch.tensor([0.9]).bfloat16()
    total = (residual + norms[0](x)) * scale
    ours = flex_kernels.norm_add_norm_reference(x, norms[0].weight, 1e-5, residual, norms[1].weight, scale)
    torch.testing.assert_close(ours, (norms[1](total), total), atol=0, rtol=2**-7)  # rsqrt and pow differ in the last bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, I", [(1, 16), (4, 1536), (3, 1025)])
def test_gelu_mul(T, I, dtype):
    gate, up = randn(T, 2 * I, dtype=dtype, scale=4.0).chunk(2, dim=-1)
    gate[0, :2] = torch.tensor([40.0, -40.0])
    assert_close(flex_kernels.gelu_mul_triton(gate, up), flex_kernels.gelu_mul_reference(gate, up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap(dtype):
    logits = randn(3, 5000, dtype=dtype, scale=20.0)
    logits[0, :3] = torch.tensor([1e4, -1e4, 0.0])
    capped = flex_kernels.soft_cap_triton(logits, 30.0)
    assert_close(capped, flex_kernels.soft_cap_reference(logits, 30.0))
    assert capped.abs().max() == 30.0


# --- qk_norm_rope_store ----------------------------------------------------------------------------------------------


def rope_tables(positions, rotary_dim):
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim)
    angles = torch.arange(positions, device=DEVICE)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "T, H, HKV, D, R, with_norm, packed_kv",
    [
        (3, 4, 2, 128, 128, True, False),
        (5, 9, 3, 64, 64, False, True),
        (2, 8, 1, 256, 64, True, True),
        (1, 5, 1, 80, 32, True, False),
        (4, 3, 3, 512, 512, True, True),
    ],
)
def test_qk_norm_rope_store(T, H, HKV, D, R, with_norm, packed_kv, dtype):
    slots = 64
    qkv = randn(T, (H + 2 * HKV) * D, dtype=dtype)
    q_norm, k_norm = (randn(D, dtype=dtype), randn(D, dtype=dtype)) if with_norm else (None, None)
    cos, sin = rope_tables(50, R)
    positions = torch.randint(0, 50, (T,), device=DEVICE)
    token_slots = torch.randperm(slots, device=DEVICE)[:T]
    # A pool whose heads are strided, inside a larger buffer: everything but the T slots must stay as it is.
    buffers = [randn(HKV + 1, 2, slots, D, dtype=dtype) for _ in range(2)]
    before = [buffer.clone() for buffer in buffers]
    expected_buffers = [buffer.clone() for buffer in buffers]

    def run(op, k_buffer, v_buffer):
        return op(
            qkv, q_norm, k_norm, 1e-6, cos, sin, positions, token_slots, k_buffer[:HKV, 1], v_buffer[:HKV, 1], H,
            packed_kv,
        )

    outputs = run(flex_kernels.qk_norm_rope_store_triton, *buffers)
    expected = run(flex_kernels.qk_norm_rope_store_reference, *expected_buffers)
    for actual, wanted in zip(outputs, expected) if packed_kv else [(outputs, expected)]:
        assert actual.is_contiguous() and actual.shape == wanted.shape
        assert_close(actual, wanted)
    for buffer, wanted, old in zip(buffers, expected_buffers, before):
        assert_close(buffer, wanted)
        written = torch.zeros(buffer.shape, dtype=torch.bool, device=DEVICE)
        written[:HKV, 1, token_slots] = True
        assert torch.equal(buffer[~written], old[~written])
        assert not torch.equal(buffer[written], old[written])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, H, HKV, D", [(3, 4, 1, 64), (2, 8, 1, 512), (5, 6, 2, 32)])
@pytest.mark.parametrize("kind", ["v normed", "v from k", "q alone"])
def test_qk_norm_rope_store_variants(T, H, HKV, D, kind, dtype):
    heads = {"v normed": H + 2 * HKV, "v from k": H + HKV, "q alone": H}[kind]
    qkv, q_norm, k_norm = randn(T, heads * D, dtype=dtype, scale=3.0), randn(D, dtype=dtype), randn(D, dtype=dtype)
    positions, token_slots = torch.randint(0, 50, (T,), device=DEVICE), torch.randperm(16, device=DEVICE)[:T]
    results = []
    for op in (flex_kernels.qk_norm_rope_store_triton, flex_kernels.qk_norm_rope_store_reference):
        pools = [None, None] if kind == "q alone" else [torch.zeros(HKV, 16, D, dtype=dtype, device=DEVICE) for _ in range(2)]
        packed_kv = kind == "v normed"
        out = op(qkv, q_norm, k_norm, 1e-6, *rope_tables(50, D), positions, token_slots, *pools, H, packed_kv, norm_v=True)
        results.append([*(out if packed_kv else [out]), *(pool for pool in pools if pool is not None)])
    for actual, expected in zip(*results):
        assert_close(actual, expected)
    if kind != "q alone":
        v = qkv.view(T, heads, D)[:, -HKV:].float()
        normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
        assert_close(results[0][-1][:, token_slots].transpose(0, 1), normed.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_qk_norm_rope_reference_is_hugging_face(family, dtype):
    """Bit by bit: it rounds where Hugging Face rounds."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    norm = (modeling.Qwen3RMSNorm if family == "qwen3" else modeling.Gemma4RMSNorm)(64).to(dtype)
    norm.weight = torch.nn.Parameter(torch.randn(64, dtype=dtype), requires_grad=False)
    cos, sin = (table.cpu() for table in rope_tables(20, 64))
    positions = torch.tensor([3, 17, 4])
    qkv = torch.randn(3, 4 * 64).to(dtype)
    q, k = norm(qkv.view(3, 4, 64)[None, :, :2]), norm(qkv.view(3, 4, 64)[None, :, 2:3])
    rope = [table[positions].to(dtype)[None] for table in (cos, sin)]
    if family == "qwen3":
        q, k = modeling.apply_rotary_pos_emb(q, k, *rope, 2)
    else:
        q, k = (modeling.apply_rotary_pos_emb(x, *rope, 2) for x in (q, k))
    pools = torch.zeros(2, 1, 16, 64, dtype=dtype)
    q_ours, k_ours, _ = flex_kernels.qk_norm_rope_store_reference(
        qkv, norm.weight, norm.weight, 1e-6, cos, sin, positions, torch.tensor([1, 2, 3]), *pools, 2, True, family == "gemma4"
    )
    compare = torch.equal if dtype == torch.bfloat16 else torch.allclose
    assert compare(q_ours, q[0]) and compare(k_ours, k[0])


def test_kernels_round_where_their_references_do():
    """A missing rounding changes the bits of a third of the results and more; another order of sums those of very few."""
    T, K, I, dtype = 5, 256, 128, HALF_TYPES[-1]
    x, gate_up, down = (randn(*shape, dtype=dtype) for shape in ((T, K), (2 * I, K), (K, I)))
    residual, norm = randn(T, K, dtype=dtype, scale=8.0), randn(K, dtype=dtype)
    hidden = flex_linear.gate_up_silu_reference(x, gate_up)
    wide = flex_linear.LinearOptions(16, 64, 1, 4, 2, wide=True)
    qkv, pools = randn(T, 4 * 64, dtype=dtype), torch.zeros(4, 1, 16, 64, dtype=dtype, device=DEVICE)
    rope = qkv, norm[:64], norm[64:128], 1e-6, *rope_tables(50, 64), torch.arange(T, device=DEVICE), torch.arange(T, device=DEVICE)
    pairs = [(flex_linear.gate_up_silu_triton(x, gate_up, options), hidden) for options in (small_options(1), small_options(2), wide)]
    added = flex_linear.linear_add_norm_triton(hidden, down, residual, norm, 1e-6, small_options(2))
    pairs += zip(added, flex_linear.linear_add_norm_reference(hidden, down, residual, norm, 1e-6))
    for norm_v in (False, True):
        triton = flex_kernels.qk_norm_rope_store_triton(*rope, *pools[:2], 2, True, norm_v)
        pairs += zip(triton, flex_kernels.qk_norm_rope_store_reference(*rope, *pools[2:], 2, True, norm_v))
    for index, (actual, expected) in enumerate(pairs):
        assert (actual == expected).float().mean() > 0.97, index


# --- paged decode attention ------------------------------------------------------------------------------------------


def paged_case(lengths, H, HKV, D, page_size, dtype, padded=0):
    """Rows over shuffled pages; what no row may see is NaN. `padded` rows of length 1 sit on page 0."""
    lengths = list(lengths) + [1] * padded
    pages_per_row = [-(-length // page_size) for length in lengths]
    order = (torch.randperm(sum(pages_per_row) + 2) + 1).tolist()
    table = torch.full((len(lengths), max(pages_per_row) + 1), 2**30, dtype=torch.int32)
    pools = [torch.full((HKV, (len(order) + 1) * page_size, D), torch.nan, dtype=dtype) for _ in range(2)]
    for row, (length, count) in enumerate(zip(lengths, pages_per_row)):
        pages = [0] * count if row >= len(lengths) - padded else [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages)
        n = torch.arange(length)
        slots = table[row, n // page_size].long() * page_size + n % page_size
        for pool in pools:
            pool[:, slots] = torch.randn(HKV, length, D).to(dtype)
    if padded:
        table[-padded:] = 0
    q = torch.randn(len(lengths), H + 1, D).to(dtype)[:, :H]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return [x.to(DEVICE) for x in (q, *pools, table, lengths)]


def check_attention(q, k_pool, v_pool, table, lengths, page_size, window=None, softcap=None, **options):
    scale = q.shape[-1] ** -0.5
    safe_table = table.where(table < 2**30, 0)
    expected = flex_decode_attention.paged_decode_attention_reference(
        q, k_pool, v_pool, safe_table, lengths, page_size, scale, window, softcap
    )
    options = flex_decode_attention.DecodeOptions(**({"block_n": 32, "num_stages": 2} | options))
    plan = flex_decode_attention.decode_attention_plan_triton(lengths, len(k_pool), q.shape[-1], q.dtype, window, options)
    for _ in range(2):  # a plan serves every layer: the second launch finds the counters at zero again
        out = flex_decode_attention.paged_decode_attention_triton(
            q, k_pool, v_pool, table, lengths, page_size, scale, window, softcap, plan
        )
        assert out.isfinite().all()
        assert_close(out, expected)
    assert not plan.arrivals_BH.any()
    return plan


@pytest.mark.parametrize(
    "lengths, H, HKV, D, page_size",
    [
        ([1], 3, 3, 64, 16),  # group 1
        ([33, 100], 9, 3, 64, 32),  # group 3
        ([200, 7, 64], 8, 2, 128, 64),  # group 4
        ([65, 128, 1, 40, 31], 5, 1, 64, 16),  # group 5
        ([90, 17], 8, 1, 256, 64),  # group 8
        ([50], 6, 2, 80, 32),  # head size that is no power of two
    ],
)
def test_paged_decode_attention(lengths, H, HKV, D, page_size):
    check_attention(*paged_case(lengths, H, HKV, D, page_size, torch.float32, padded=1), page_size)


HALF_TYPES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])  # the interpreter has no bf16 dot


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_paged_decode_attention_half(dtype):
    check_attention(*paged_case([70, 33, 9], 8, 2, 64, 32, dtype, padded=1), 32, block_n=64)


@pytest.mark.parametrize("block_n", [16, 64])
def test_paged_decode_attention_window(block_n):
    window, page_size = 32, 16
    lengths = [window - 1, window, window + 1, 1, 131]
    check_attention(*paged_case(lengths, 4, 2, 64, page_size, torch.float32), page_size, window=window, block_n=block_n)


def test_window_counts_keys():
    """Length 16 and window 4 see 4 keys: with equal scores the output is the mean of the last 4 values."""
    _, k_pool, v_pool, table, lengths = paged_case([16], 1, 1, 64, 16, torch.float32)
    q = torch.zeros(1, 1, 64, device=DEVICE)
    page = int(table[0, 0]) * 16
    for op in (flex_decode_attention.paged_decode_attention_triton, flex_decode_attention.paged_decode_attention_reference):
        out = op(q, k_pool, v_pool, table, lengths, 16, 1.0, window=4)
        torch.testing.assert_close(out[0, 0], v_pool[0, page + 12 : page + 16].mean(0))


def test_paged_decode_attention_softcap():
    check_attention(*paged_case([70, 5], 4, 2, 64, 32, torch.float32), 32, softcap=2.0)


@pytest.mark.parametrize("ctas_per_sm, min_tiles", [(1, 1), (16, 1), (16, 3)])
def test_decode_plan_covers_every_tile_once(ctas_per_sm, min_tiles):
    lengths = torch.tensor([1, 700, 64, 65, 33, 1, 300], dtype=torch.int32, device=DEVICE)
    for window in (None, 100):
        options = flex_decode_attention.DecodeOptions(block_n=32, ctas_per_sm=ctas_per_sm, min_tiles=min_tiles)
        plan = flex_decode_attention.decode_attention_plan_triton(lengths, 2, 64, torch.float32, window, options)
        chunks = [chunk for chunk in plan.chunks_S5.tolist() if chunk[0] >= 0]
        assert chunks == plan.chunks_S5[: len(chunks)].tolist()
        sizes = [end - begin for _, _, begin, end, _ in chunks]
        first_partial = 0
        assert min(sizes) >= 1 and all(a >= b - 1 for a, b in zip(sizes, sizes[1:]))
        for row, length in enumerate(lengths.tolist()):
            mine = [chunk for chunk in chunks if chunk[0] == row]
            first = max(length - window, 0) // 32 if window else 0
            assert [tile for _, _, b, e, _ in mine for tile in range(b, e)] == list(range(first, -(-length // 32)))
            assert [(chunk[1], chunk[4]) for chunk in mine] == [(1, i) for i in range(len(mine))]
            assert plan.partials_B2[row].tolist() == [first_partial, len(mine)]
            first_partial += len(mine)
        assert first_partial <= plan.num_partials


def test_split_rows_agree_with_unsplit():
    case = paged_case([500, 40], 4, 2, 64, 16, torch.float32)
    split = check_attention(*case, 16, block_n=16, ctas_per_sm=64)
    whole = check_attention(*case, 16, block_n=16, min_tiles=1000)
    assert split.partials_B2[:, 1].max() > 8 and (whole.partials_B2[:, 1] == 1).all()


@pytest.mark.gpu
def test_pool_past_2_31_elements():
    page_size, D, num_pages = 64, 128, 2**31 // (64 * 128) // 2 + 16
    k_pool = torch.zeros(3, num_pages * page_size, D, dtype=torch.bfloat16, device="cuda")
    v_pool = torch.zeros_like(k_pool)
    assert k_pool.numel() > 2**31
    table = torch.arange(num_pages - 4, num_pages, dtype=torch.int32, device="cuda")[None]
    slots = (table[0, :, None].long() * page_size + torch.arange(page_size, device="cuda")).flatten()
    k_pool[:, slots], v_pool[:, slots] = (randn(3, len(slots), D, dtype=torch.bfloat16) for _ in range(2))
    cos, sin = rope_tables(300, D)
    qkv = randn(1, 12 * D, dtype=torch.bfloat16)
    position = torch.tensor([255], device="cuda")
    q = flex_kernels.qk_norm_rope_store_triton(qkv, None, None, 1e-6, cos, sin, position, slots[-1:], k_pool, v_pool, 6)
    assert torch.equal(v_pool[:, slots[-1]], qkv.view(12, D)[9:])
    lengths = torch.tensor([256], dtype=torch.int32, device="cuda")
    check_attention(q, k_pool, v_pool, table, lengths, page_size, block_n=64)


# --- sampling --------------------------------------------------------------------------------------------------------


def sampling_args(B, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(B).contiguous().to(DEVICE)

    return (
        column(temperature, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32),
        column(min_p, torch.float32), column(seed, torch.int64), column(position, torch.int64),
    )  # fmt: skip


def oracle_kept(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Hugging Face's filters in fp64, with everything tied with the last kept token kept."""
    scaled = logits_V.double().cpu() / temperature
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if top_k:
        kept = scaled >= scaled.topk(min(top_k, len(scaled))).values[-1]
    probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    if top_p < 1.0:
        values, _ = probabilities.sort(descending=True)
        count = int((values.cumsum(0) < top_p).sum()) + 1
        kept &= probabilities >= values[min(count, len(values)) - 1]
        probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    if min_p:
        kept &= probabilities >= min_p * probabilities.max() * (1 - 1e-6)
    return kept


FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 300}, {"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9}, {"top_k": 50, "top_p": 0.95, "min_p": 0.02}, {"top_p": 1e-6}, {},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_against_reference_and_oracle(dtype):
    V, temperature = 5003, 0.7
    logits = randn(len(FILTERS), V + 13, dtype=dtype, scale=3.0)[:, :V]
    args = list(sampling_args(len(FILTERS), temperature, seed=torch.arange(len(FILTERS)) - 3, position=11))
    for column, (name, off) in enumerate({"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items(), start=1):
        args[column] = torch.tensor([f.get(name, off) for f in FILTERS], dtype=args[column].dtype, device=DEVICE)
    tokens, logprobs, full_logprobs = flex_sampling.sample_triton(logits, *args)
    expected = flex_sampling.sample_reference(logits, *args)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(full_logprobs, expected[2], atol=2e-4, rtol=1e-5)
    for row, filters in enumerate(FILTERS):
        kept = oracle_kept(logits[row], temperature, **filters)
        scaled = logits[row].double().cpu() / temperature
        assert kept[tokens[row]]
        wanted = scaled[tokens[row]] - scaled[kept].logsumexp(0)
        assert abs(float(logprobs[row]) - float(wanted)) < 1e-4, filters
        assert abs(float(full_logprobs[row]) - float(scaled.log_softmax(0)[tokens[row]])) < 1e-4


def test_sample_searches_the_row_when_the_filters_keep_more_than_the_lanes_hold():
    """The kernel keeps six logits for each of 4096 lanes; here one lane holds seven of the largest."""
    logits = randn(6, 4096 * 6 + 100)
    logits[:, 5::4096] += torch.linspace(20.0, 19.0, 7, device=DEVICE)
    filters = [{"top_k": 5}, {"top_k": 6}, {"top_k": 7}, {"top_p": 0.9}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.2}]
    args = list(sampling_args(6, seed=torch.arange(6)))
    for column, (name, off) in enumerate({"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items(), start=1):
        args[column] = torch.tensor([f.get(name, off) for f in filters], dtype=args[column].dtype, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        outputs = flex_sampling.sample_triton(logits.to(dtype), *args), flex_sampling.sample_reference(logits.to(dtype), *args)
        for actual, expected in zip(*outputs):
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-5)


def test_sample_keeps_ties_at_the_threshold():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -torch.inf]], device=DEVICE)
    four = math.log(math.exp(2) + 3 * math.exp(1))
    for op in (flex_sampling.sample_triton, flex_sampling.sample_reference):
        for filters in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": math.exp(-1.0)}):
            for seed in range(6):
                token, logprob, _ = op(logits, *sampling_args(1, seed=seed, **filters))
                assert int(token) < 4
                assert abs(float(logprob) - (float(logits[0, token]) - four)) < 1e-5


def test_sample_greedy():
    logits = randn(3, 9000, dtype=torch.bfloat16)
    logits[0, [17, 5000, 8999]] = 9.0  # equal: the lowest id wins, also across slices
    for op in (flex_sampling.sample_triton, flex_sampling.sample_reference):
        tokens, logprobs, full_logprobs = op(logits, *sampling_args(3, temperature=0.0, top_k=5, top_p=0.5))
        assert tokens[0] == 17 and torch.equal(tokens[1:], logits[1:].float().argmax(-1))
        expected = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-5)
        assert torch.equal(logprobs, full_logprobs)


def test_sample_reports_broken_rows():
    logits = randn(5, 4100)
    logits[1, 4099], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, ::2] = -torch.inf
    for op in (flex_sampling.sample_triton, flex_sampling.sample_reference):
        for filters in ({}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}):
            tokens, logprobs, full_logprobs = op(logits, *sampling_args(5, **filters))
            assert (tokens[1:4] == -1).all() and logprobs[1:4].isnan().all() and full_logprobs[1:4].isnan().all()
            assert tokens[0] >= 0 and tokens[4] % 2 == 1 and logprobs[[0, 4]].isfinite().all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}])
def test_sample_follows_the_distribution(filters):
    draws, temperature = 20000, 0.8
    logits = torch.randn(12).to(DEVICE)  # the same draw on every device
    ids = torch.arange(draws)
    args = sampling_args(draws, temperature, seed=ids // 100, position=ids % 100, **filters)
    tokens, logprobs, _ = flex_sampling.sample_reference(logits.expand(draws, -1), *args)
    kept = oracle_kept(logits, temperature, **filters)
    probabilities = (logits.double().cpu() / temperature).masked_fill(~kept, -torch.inf).softmax(-1)
    counts = torch.bincount(tokens.cpu(), minlength=12)
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept].numpy(), (probabilities[kept] * draws).numpy()).pvalue > 1e-3
    torch.testing.assert_close(logprobs.cpu().double(), probabilities.log()[tokens.cpu()], atol=1e-5, rtol=1e-5)


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, position_ptr, V, BLOCK: tl.constexpr):
    tokens = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    bits = flex_sampling._noise_bits(*flex_sampling._noise_keys(tl.load(seed_ptr + row), tl.load(position_ptr + row)), tokens)
    noise = flex_sampling._exponential_noise(bits)
    floor = flex_sampling._exponential_noise_floor(bits)
    tl.store(out_ptr + row * V + tokens, tl.where(floor <= noise * 1.000001, -tl.log(noise), float("nan")), mask=tokens < V)


def test_noise_is_the_same_in_kernel_and_reference():
    seeds = torch.tensor([0, -1, 2**62 + 5, 7], device=DEVICE)
    positions = torch.tensor([0, 3, 2**40, 2047], device=DEVICE)
    noise = torch.empty(4, 1000, device=DEVICE)
    _noise_kernel[(4,)](noise, seeds, positions, 1000, BLOCK=1024)
    torch.testing.assert_close(noise, flex_sampling.gumbel_noise_reference(seeds, positions, 1000), atol=1e-6, rtol=1e-5)


def test_noise_is_independent_across_seeds_positions_and_tokens():
    seeds, positions = torch.arange(30).repeat_interleave(30), torch.arange(30).repeat(30)
    noise = flex_sampling.gumbel_noise_reference(seeds, positions, 500)
    assert noise.isfinite().all()
    assert len(noise.unique(dim=0)) == 900
    uniform = torch.exp(-torch.exp(-noise.double())) - 0.5
    assert abs(float(uniform.mean())) < 5 * math.sqrt(1 / 12 / uniform.numel())
    grid = uniform.view(30, 30, 500) * math.sqrt(12)
    for shifted, kept in [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[..., 1:], grid[..., :-1])]:
        assert abs(float((shifted * kept).mean())) < 5 / math.sqrt(kept.numel())
    alone = flex_sampling.gumbel_noise_reference(seeds[7:8], positions[7:8], 500)
    assert torch.equal(alone[0], noise[7])  # the other rows of the batch don't matter


# --- skinny matrix products ------------------------------------------------------------------------------------------


def small_options(split_k, **options):
    return flex_linear.LinearOptions(**{"block_n": 64, "block_k": 32, "split_k": split_k, "num_stages": 2} | options)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("T, N, K, split_k", [(1, 64, 64, 1), (5, 100, 200, 2), (17, 130, 96, 3)])
def test_linear(T, N, K, split_k, dtype):
    x, weight = randn(T, K, dtype=dtype), randn(N, K, dtype=dtype, scale=K**-0.5)
    bias, residual = randn(N, dtype=dtype), randn(T, N, dtype=dtype)
    for extra in ((), (bias,), (None, residual), (bias, residual)):
        expected = flex_linear.linear_reference(x, weight, *extra)
        for _ in range(2):  # the second launch finds the counters at zero again
            assert_close(flex_linear.linear_triton(x, weight, *extra, options=small_options(split_k)), expected)


@pytest.mark.parametrize("T, I, K, split_k", [(1, 64, 64, 1), (5, 100, 200, 2)])
def test_gate_up_silu(T, I, K, split_k):
    x, weight = randn(T, K, dtype=torch.float16), randn(2 * I, K, dtype=torch.float16, scale=K**-0.5)
    assert_close(flex_linear.gate_up_silu_triton(x, weight, small_options(split_k)), flex_linear.gate_up_silu_reference(x, weight))


@pytest.mark.parametrize("T, N, K, split_k", [(1, 64, 64, 1), (5, 100, 200, 4)])
def test_linear_add_norm(T, N, K, split_k):
    x, weight = randn(T, K, dtype=torch.float16), randn(N, K, dtype=torch.float16, scale=K**-0.5)
    residual, norm_weight = randn(T, N, dtype=torch.float16), randn(N, dtype=torch.float16)
    outputs = flex_linear.linear_add_norm_triton(x, weight, residual, norm_weight, 1e-6, small_options(split_k))
    for actual, wanted in zip(outputs, flex_linear.linear_add_norm_reference(x, weight, residual, norm_weight, 1e-6)):
        assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("T, N, K, split_k, tail_n", [(1, 48, 64, 1, 0), (70, 136, 192, 3, 16), (5, 40, 96, 1, 16)])
def test_wide_linear(T, N, K, split_k, tail_n, tma, dtype):
    options = small_options(split_k, block_n=32, tail_n=tail_n, wide=True, tma=tma)
    x, weight = randn(T, K, dtype=dtype), randn(2 * N, K, dtype=dtype, scale=K**-0.5)
    one, bias, residual, norm_weight = weight[:N], randn(N, dtype=dtype), randn(T, N, dtype=dtype), randn(N, dtype=dtype)
    for _ in range(2):  # the second launch finds the counters at zero again
        y = flex_linear.linear_triton(x, one, bias, residual, options)
        assert_close(y, flex_linear.linear_reference(x, one, bias, residual))
    assert_close(flex_linear.gate_up_silu_triton(x, weight, options), flex_linear.gate_up_silu_reference(x, weight))
    assert_close(flex_linear.linear_splits_triton(x, one, options).sum(0), flex_linear.linear_reference(x, one).float(), dtype)
    gelu = flex_kernels.gelu_mul_reference(*torch.nn.functional.linear(x, weight).chunk(2, dim=-1))
    assert_close(flex_linear.gate_up_gelu_triton(x, weight, options), gelu)
    outputs = flex_linear.linear_add_norm_triton(x, one, residual, norm_weight, 1e-6, options)
    for actual, wanted in zip(outputs, flex_linear.linear_add_norm_reference(x, one, residual, norm_weight, 1e-6)):
        assert_close(actual, wanted)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_linear_options_fit_the_gpu(capability, monkeypatch):
    """What the shapes of Qwen3-4B, Llama-3.2-3B and Gemma-4 E2B are given, and where wide tiles have no room."""
    monkeypatch.setattr(flex_linear, "cuda_capability", lambda: capability)
    limit = {80: 163, 90: 227, 120: 99}[capability] * 1024
    shapes = [(19456, 2560), (19520, 2560), (2560, 9728), (16384, 3072), (3072, 8192), (12288, 1536), (24576, 1536), (12288, 1000)]
    for N, K in shapes:
        gated = N > K and N != 19520
        for T in (1, 8, 33, 64, 65, 128, 129, 256):
            options = flex_linear.linear_options(T, N, K, gated)
            assert options is None or T <= 128
            if options is not None:
                halves, block_t = 2 if gated else 1, max(flex_linear.next_power_of_2(T), 64 if options.wide else 16)
                rows = halves * (options.block_n + options.tail_n) + block_t
                assert rows * options.block_k * 2 * options.num_stages <= limit
                assert not options.wide or (K % options.block_k == 0 and capability == 90)
    wide = flex_linear.linear_options(128, 16384, 3072, gated=True)
    assert (wide is not None and wide.wide) == (capability == 90)


def test_dependent_launch_is_for_hopper_and_batches_of_a_decode_step(monkeypatch):
    assert not flex_triton.pdl_options(128)["launch_pdl"] or DEVICE == "cuda"  # nothing to launch in the interpreter
    for capability, expected, sharing in ((80, [], []), (90, [1, 64, 65, 256], [65, 256])):
        monkeypatch.setattr(flex_triton, "cuda_capability", lambda: capability)
        assert [T for T in (1, 64, 65, 256, 257) if flex_triton.pdl_options(T)["launch_pdl"]] == expected
        assert [T for T in (1, 64, 65, 256, 257) if flex_triton.pdl_options(T, shares_sm=True)["launch_pdl"]] == sharing
        assert flex_triton.pdl_options(64, shares_sm=True)["PDL"] == (capability == 90)  # it waits, and lets the next begin


@pytest.mark.parametrize("T, I, K, split_k", [(3, 100, 200, 1), (17, 70, 256, 3)])
def test_gate_up_gelu(T, I, K, split_k):
    x, weight = randn(T, K, dtype=torch.float16), randn(2 * I, K, dtype=torch.float16, scale=K**-0.5)
    expected = flex_kernels.gelu_mul_reference(*torch.nn.functional.linear(x, weight).chunk(2, dim=-1))
    assert_close(flex_linear.gate_up_gelu_triton(x, weight, small_options(split_k)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("T, N, K", [(65, 64, 128), (128, 200, 128), (129, 64, 144), (256, 96, 512)])
def test_halves_of_k_are_summed_by_the_norm(T, N, K):
    x, weight = randn(T, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16, scale=K**-0.5)
    residual, norm = randn(T, N, dtype=torch.bfloat16), randn(N, dtype=torch.bfloat16)
    assert flex_linear.options_for(x, weight) is None and flex_linear._splits_in_two(x, weight)
    expected = flex_linear.linear_add_norm_reference(*(t.float() for t in (x, weight, residual, norm)), 1e-6)
    for actual, exact in zip(flex_linear.linear_add_norm(x, weight, residual, norm, 1e-6), expected):
        assert (actual.float() - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_norm_add_norm_of_split_sums():
    x, weight = randn(5, 200, dtype=torch.float16), randn(96, 200, dtype=torch.float16, scale=200**-0.5)
    norms, residual = (randn(96, dtype=torch.float16), 1e-6, randn(5, 96, dtype=torch.float16)), randn(96, dtype=torch.float16)
    splits = flex_linear.linear_splits_triton(x, weight, small_options(3))
    expected = flex_kernels.norm_add_norm_reference(torch.nn.functional.linear(x, weight), *norms, residual)
    for actual, wanted in zip(flex_kernels.norm_add_norm_triton(splits, *norms, residual), expected):
        assert_close(actual, wanted)


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_steps_two_ends(batch):
    """Rows gathered from slots and moved on, kernel against reference, padded rows (slot 0) among them."""
    torch.manual_seed(batch)
    slots, page_size, columns = 7, 16, flex_kernels.SlotColumn.FIRST_STOP + 3
    ints = torch.randint(0, 60, (slots, columns), device=DEVICE)
    ints[:, flex_kernels.SlotColumn.ENDED] = torch.tensor([1, 0, 0, 1, 0, 0, 0])
    ints[2, flex_kernels.SlotColumn.POSITION] = ints[2, flex_kernels.SlotColumn.LAST_POSITION]
    floats = torch.rand(slots, 3, device=DEVICE)
    page_table = torch.randint(0, 40, (slots, 4), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([4, 2, 0, 3, 0], device=DEVICE)[:batch]
    args = (rows, ints, floats, page_table, page_size)
    expected, actual = flex_kernels.gather_rows_reference(*args), flex_kernels.gather_rows_triton(*args)
    for name, value in vars(expected).items():
        assert torch.equal(getattr(actual, name), value) and getattr(actual, name).dtype == value.dtype, name

    tokens = torch.tensor([int(ints[4, -1]), 70, 5, 71, -1], device=DEVICE)[:batch]  # a stop id, the last position, padding, ...
    logprobs = torch.randn(2, batch, device=DEVICE)
    outcomes = []
    for advance in (flex_kernels.advance_rows_reference, flex_kernels.advance_rows_triton):
        state, step = ints.clone(), torch.ones(1, dtype=torch.int64, device=DEVICE)
        ring_tokens = torch.zeros(3, 6, dtype=torch.int64, device=DEVICE)
        ring_logprobs = torch.zeros(3, 2, 6, device=DEVICE)
        advance(rows, state, step, ring_tokens, ring_logprobs, tokens, *logprobs)
        outcomes.append((state, step, ring_tokens, ring_logprobs))
    for expected, actual in zip(*outcomes):
        assert torch.equal(expected, actual)
    assert outcomes[0][0][4, flex_kernels.SlotColumn.ENDED] == 1 and outcomes[0][1] == 2
