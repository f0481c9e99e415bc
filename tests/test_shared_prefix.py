"""Decode attention that reads a prompt's pages once for all of its completions: kernels, plan, scheduler, engine."""

from __future__ import annotations

import itertools
import random

import pytest
import tiny_models
import torch
from flex_engine import EngineConfig, FlexEngine, HFWalker, RequestOutput, SamplingParams, Scheduler
from qwen3_flex_inference import Qwen3Walker

pytest.importorskip("triton")
from flex_decode_attention import (  # noqa: E402
    DecodeOptions,
    SharedPages,
    decode_attention_plan_triton,
    paged_decode_attention_reference,
    paged_decode_attention_triton,
    shared_pages_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
pytestmark = pytest.mark.usefixtures("interpreter")


def grouped_case(groups, page_size, H, HKV, D, dtype=torch.float32, padded=0):
    """Groups of rows, (shared full pages, lengths), over shuffled pages; `padded` rows of length 1 sit on page 0.

    What no row may see is NaN, and a table's entries past a row's last page are the next row's: not to be read.
    """
    torch.manual_seed(0)
    total = sum(pages + sum(-(-length // page_size) - pages for length in lengths) for pages, lengths in groups)
    order = (torch.randperm(total + 2) + 1).tolist()
    tables, all_lengths = [], []
    for pages, lengths in groups:
        prefix = [order.pop() for _ in range(pages)]
        for length in lengths:
            tables.append(prefix + [order.pop() for _ in range(-(-length // page_size) - pages)])
            all_lengths.append(length)
    tables, all_lengths = tables + [[0]] * padded, all_lengths + [1] * padded
    width = max(map(len, tables)) + 1
    table = torch.tensor([pages + [0 if pages == [0] else 2**30] * (width - len(pages)) for pages in tables], dtype=torch.int32)
    pools = [torch.full((HKV, (total + 3) * page_size, D), torch.nan, dtype=dtype) for _ in range(2)]
    for pages, length in zip(tables, all_lengths):
        n = torch.arange(length)
        slots = torch.tensor(pages)[n // page_size] * page_size + n % page_size
        for pool in pools:
            pool[:, slots] = torch.randn(HKV, length, D).to(dtype)
    q = torch.randn(len(tables), H + 1, D).to(dtype)[:, :H]
    return [x.to(DEVICE) for x in (q, *pools, table, torch.tensor(all_lengths, dtype=torch.int32))]


def make_plan(case, page_size, window=None, share=True, **options):
    q, k_pool, _, table, lengths = case
    options = DecodeOptions(**{"block_n": 16, "shared_queries": 16, **options})
    shared = SharedPages(table, page_size, q.shape[1]) if share else None
    return decode_attention_plan_triton(lengths, len(k_pool), q.shape[2], q.dtype, window, options, shared)


def groups_of(plan) -> list[tuple[int, int, int]]:
    """(first row, rows, tiles) of every group, asserting that its chunks cover tiles 0 ... tiles - 1 once and in order."""
    chunks = [chunk for chunk in plan.chunks_S5.tolist() if chunk[0] >= 0 and chunk[1] > 1]
    found = []
    for (row, rows), own in itertools.groupby(chunks, key=lambda chunk: chunk[:2]):
        own = list(own)
        tiles = [tile for _, _, begin, end, _ in own for tile in range(begin, end)]
        assert tiles == list(range(len(tiles))) and [chunk[4] for chunk in own] == list(range(len(own)))
        found.append((row, rows, len(tiles)))
    return found


def attend(case, page_size, plan, window=None, softcap=None):
    scale = case[0].shape[2] ** -0.5
    return paged_decode_attention_triton(*case, page_size, scale, window, softcap, plan)


def check(case, page_size, window=None, softcap=None, **options):
    """Shared against unshared and the reference; a plan serves every layer, so it is used twice."""
    q, k_pool, v_pool, table, lengths = case
    safe_table = table.where(table < 2**30, 0)
    expected = paged_decode_attention_reference(
        q, k_pool, v_pool, safe_table, lengths, page_size, q.shape[2] ** -0.5, window, softcap
    )
    plan = make_plan(case, page_size, window, **options)
    close = dict(atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    first, second = (attend(case, page_size, plan, window, softcap) for _ in range(2))
    torch.testing.assert_close(first, expected, **close)
    assert torch.equal(first, second) and not plan.arrivals_BH.any()
    unshared = attend(case, page_size, make_plan(case, page_size, window, share=False, **options), window, softcap)
    torch.testing.assert_close(first, unshared, **close)
    return plan


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_group_sizes(size):
    """A group of `size` and one of two behind a row of its own; a tile holds 8 rows of 2 query heads."""
    lengths = [8 * 16 + 1 + 3 * i for i in range(size)]
    case = grouped_case([(0, [3]), (8, lengths), (9, [145, 160])], 16, 4, 2, 64, padded=1)
    expected = {1: [], 9: [(1, 8, 8)]}.get(size, [(1, size, 8)])  # the ninth row reads alone
    assert groups_of(check(case, 16)) == [*expected, (1 + size, 2, 9)]


@pytest.mark.parametrize(
    "H, HKV, D, page_size, options",
    [
        (3, 3, 64, 32, {}),  # group 1
        (6, 2, 80, 16, {}),  # group 3 in a tile of 4, head size that is no power of two
        (8, 1, 128, 64, {"block_n": 32, "shared_queries": 32}),  # group 8
        (4, 2, 64, 16, {"block_n": 64}),  # a tile spans pages
        (4, 2, 64, 16, {"ctas_per_sm": 64}),  # many chunks
        (4, 2, 64, 16, {"min_tiles": 1000}),  # one chunk each
    ],
)
def test_shapes(H, HKV, D, page_size, options):
    prefix = 192 // page_size
    case = grouped_case([(prefix, [193, 250, 201]), (0, [70]), (prefix, [222, 199])], page_size, H, HKV, D, padded=1)
    assert [group[:2] for group in groups_of(check(case, page_size, **options))] == [(0, 3), (4, 2)]


@pytest.mark.parametrize("H, HKV", [(32, 1), (16, 1)])
def test_query_groups_that_fill_the_tile_are_not_shared(H, HKV):
    assert groups_of(check(grouped_case([(8, [140, 150])], 16, H, HKV, 64), 16)) == []


def test_half_precision_and_soft_cap():
    case = grouped_case([(8, [140, 131, 129, 180])], 16, 8, 2, 64, torch.float16, padded=1)
    check(case, 16, block_n=32, shared_queries=32)
    check(case, 16, softcap=2.0)


def test_rows_that_end_with_the_shared_pages():
    """Nothing of their own is left: the last of the group's chunks gives their result."""
    case = grouped_case([(8, [128, 128, 128, 130])], 16, 4, 2, 64)
    plan = check(case, 16)
    assert groups_of(plan) == [(0, 4, 8)] and (plan.chunks_S5[plan.chunks_S5[:, 1] == 1][:, 0] == 3).sum() >= 1


def test_pages_that_some_rows_do_not_fill_are_not_shared():
    """Equal page ids beyond a row's length mean nothing."""
    case = grouped_case([(12, [192, 192, 192])], 16, 4, 2, 64)
    case[4][1] = 150  # sees 9 full pages, and a part of the tenth
    assert groups_of(check(case, 16)) == [(0, 3, 9)]
    case[4][0] = 100  # 6 full pages: too few to share
    assert groups_of(check(case, 16)) == [(1, 2, 9)]


def test_windows():
    """Rows whose window hides a key read alone, the others together."""
    case = grouped_case([(8, [140, 150, 151, 160, 131, 132])], 16, 4, 2, 64)
    assert groups_of(check(case, 16, window=150)) == [(0, 2, 8), (4, 2, 8)]
    assert groups_of(check(case, 16, window=40)) == []


def test_groups_that_share_a_beginning_stay_apart():
    """Two prompts with the same first pages: each group shares all of its own."""
    case = grouped_case([(12, [200, 210, 220, 230, 240, 250])], 16, 4, 2, 64)
    table, lengths = case[3:]
    table[3:, 8:12] = table[:1, 8:12].flip(1)  # other pages from the ninth on
    assert shared_pages_reference(lengths, table, 16).tolist() == [0, 12, 12, 8, 12, 12]
    plan = make_plan(case, 16)
    assert groups_of(plan) == [(0, 3, 12), (3, 3, 12)]


def test_the_plan_against_brute_force():
    rng = random.Random(0)
    for _ in range(8):
        groups = [(rng.randrange(0, 12), rng.choice([1, 1, 2, 3, 5])) for _ in range(rng.randrange(1, 5))]
        groups = [(pages, [pages * 16 + rng.randrange(1, 60) for _ in range(rows)]) for pages, rows in groups]
        case = grouped_case(groups, 16, 4, 2, 16, padded=rng.randrange(3))
        options = dict(ctas_per_sm=rng.choice([1, 8, 64]), min_tiles=rng.choice([1, 3]))
        plan = make_plan(case, 16, **options)
        lengths, tiles = case[4].tolist(), {row: [] for row in range(len(case[4]))}
        indices = {row: [] for row in tiles}
        for row, rows, begin, end, index in plan.chunks_S5.tolist():
            for member in range(row, row + rows) if row >= 0 else ():
                tiles[member] += range(begin, end)
                indices[member].append(index)
        first = 0
        for row, length in enumerate(lengths):
            assert sorted(tiles[row]) == list(range(-(-length // 16)))
            assert sorted(indices[row]) == list(range(len(indices[row])))
            assert plan.partials_B2[row].tolist() == [first, len(indices[row])]
            first += len(indices[row])
        assert first <= plan.num_partials
        wanted = [(sum(len(x) for _, x in groups[:i]), len(x), p) for i, (p, x) in enumerate(groups) if p >= 8 and len(x) > 1]
        assert groups_of(plan) == wanted


def test_padded_rows_form_no_group():
    case = grouped_case([(0, [5])], 16, 4, 2, 64, padded=7)
    assert groups_of(check(case, 16)) == []


# --- the engine keeps groups together --------------------------------------------------------------------------------


def engine_of(model, walker=Qwen3Walker, **config) -> FlexEngine:
    engine = FlexEngine(walker(model), None, EngineConfig(**{"max_batch_size": 5, "max_seq_len": 320, "page_size": 16, **config}))
    random.Random(0).shuffle(engine.cache.pages.free)
    return engine


def test_completions_of_a_prompt_run_side_by_side(monkeypatch):
    """Also where the slots that get free one by one split a group over several admissions."""
    engine = engine_of(tiny_models.qwen3(), max_batch_size=5)
    seen = []

    def shared_tokens(scheduler):
        prefixes = [id(sequence.prefix) for sequence in scheduler.running]
        runs = [prefix for prefix, _ in itertools.groupby(prefixes)]
        assert len(runs) == len(set(runs))
        pages = [sequence.pages for sequence in scheduler.running]
        by_pages = sum(
            16 * full
            for a, b in itertools.pairwise(pages)
            if (full := next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))) >= 8
        )
        seen.append((original(scheduler), by_pages))
        return seen[-1][0]

    original = Scheduler.shared_tokens
    monkeypatch.setattr(Scheduler, "shared_tokens", shared_tokens)
    engine.shared_prefix = True  # no kernel on a CPU reads shared pages once, but the bookkeeping is the same
    params = [SamplingParams(max_tokens=m, n=3, seed=1, ignore_eos=True) for m in (5, 9, 3, 12)]
    engine.generate(tiny_models.random_prompts([150, 200, 20, 129]), params)
    assert all(told == by_pages for told, by_pages in seen)
    assert engine.stats().shared_prefix_tokens == sum(told for told, _ in seen) > 0


@pytest.mark.parametrize("others, pays", [(0, True), (10, True), (16, False)])
def test_sharing_is_on_when_it_pays(others, pays):
    """A pair that shares 128 keys, among rows of 130 that share nothing."""
    engine = engine_of(tiny_models.qwen3(), max_batch_size=40)
    outputs = [RequestOutput(index, [1 + index] * 130) for index in range(1 + others)]
    sequences = engine._sequences(outputs, [SamplingParams(n=2)] + [SamplingParams()] * others)
    scheduler = Scheduler(engine.cache, 40, sequences)
    scheduler.admit(token_budget=10**6)
    assert len(scheduler.running) == 2 + others and scheduler.shared_tokens() == (128 if pays else 0)
    assert scheduler.running[0].pages[:8] == scheduler.running[1].pages[:8]
    scheduler.release_all()


def test_a_cpu_run_shares_nothing():
    engine = engine_of(tiny_models.qwen3())
    engine.generate(tiny_models.random_prompts([150]), SamplingParams(max_tokens=2, n=4, seed=1, ignore_eos=True))
    assert not engine.shared_prefix and engine.stats().shared_prefix_tokens == 0


# --- on a GPU --------------------------------------------------------------------------------------------------------


def tokens_of(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@torch.no_grad()
def hf_greedy(model, prompt, max_tokens) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture
def ieee_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("build", "walker"),
    [
        (tiny_models.qwen3, Qwen3Walker),
        (tiny_models.qwen3, HFWalker),
        (tiny_models.llama, Qwen3Walker),
        (tiny_models.llama, HFWalker),
        (tiny_models.gemma2, HFWalker),
    ],
)
def test_groups_of_eight_give_hugging_faces_tokens(build, walker, ieee_products):
    model = build(head_dim=64).to("cuda")
    prompts = tiny_models.random_prompts([128, 129, 130, 145, 200])
    params = SamplingParams(max_tokens=60, temperature=0, n=8, ignore_eos=True)
    reference_model = tiny_models.unshared(model).to("cuda")
    reference = [tokens for prompt in prompts for tokens in [hf_greedy(reference_model, prompt, params.max_tokens)] * params.n]
    assert len({token for tokens in reference for token in tokens}) >= 16
    for graphed in (True, False):
        engine = engine_of(model, walker, max_batch_size=19, attention_backend="triton", capture_cudagraph=graphed)
        assert tokens_of(engine.generate(prompts, params)) == reference
        assert engine.stats().shared_prefix_tokens > 0


@pytest.mark.gpu
def test_sharing_on_and_off_sample_the_same(ieee_products):
    """Mixed lengths, so that rows end one by one, groups shrink to one row, and places are refilled."""
    model = tiny_models.qwen3(head_dim=64).to("cuda")
    prompts = tiny_models.random_prompts([129, 20, 170, 144, 160])
    params = [SamplingParams(max_tokens=m, n=6, seed=3, ignore_eos=True) for m in (40, 70, 25, 60, 33)]
    on, off = (engine_of(model, max_batch_size=11, attention_backend="triton", shared_prefix=x) for x in (True, False))
    first = tokens_of(on.generate(prompts, params))
    assert first == tokens_of(on.generate(prompts, params)) == tokens_of(off.generate(prompts, params))
    assert on.stats().shared_prefix_tokens > 0 == off.stats().shared_prefix_tokens
    assert True in {shared for _, shared in on.graphs} and {shared for _, shared in off.graphs} == {False}
