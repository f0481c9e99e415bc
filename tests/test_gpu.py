"""What only a GPU can show: captured graphs, the paged kernels inside an engine, large pools, sleep and wake.

Each engine is compared with plain Hugging Face in fp32 with IEEE products, or with another engine bit by bit.
"""

from __future__ import annotations

import random

import pytest
import tiny_models
import torch
from flex_engine import EngineConfig, FlexEngine, HFWalker, SamplingParams
from qwen3_flex_inference import Qwen3Walker

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 200]


@pytest.fixture(autouse=True)
def ieee_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(model):
    return model.to("cuda")


def make_engine(model, walker=Qwen3Walker, **config) -> FlexEngine:
    config = {"max_batch_size": 5, "max_seq_len": 320, "page_size": 16, **config}
    engine = FlexEngine(walker(model), None, EngineConfig(**config))
    random.Random(0).shuffle(engine.cache.pages.free)
    return engine


def tokens_of(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@torch.no_grad()
def hf_greedy(model, prompts, max_tokens) -> list[list[int]]:
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        results.append(out[0, len(prompt) :].tolist())
    return results


@pytest.mark.parametrize("walker", [Qwen3Walker, HFWalker])
@pytest.mark.parametrize("backend", ["triton", "flex", "sdpa"])
@pytest.mark.parametrize("build", [tiny_models.qwen3, tiny_models.llama])
def test_identity_with_hugging_face(build, backend, walker):
    size = {"head_dim": 64}  # the smallest head that flex_attention takes on a GPU is 16; kernels are tuned for 64 and more
    model = on_gpu(build(**size))
    prompts = tiny_models.random_prompts(LENGTHS)
    reference = hf_greedy(on_gpu(tiny_models.unshared(model)), prompts, GREEDY.max_tokens)
    assert len({token for tokens in reference for token in tokens}) >= 16
    for graphed in (True, False):
        engine = make_engine(model, walker, attention_backend=backend, capture_cudagraph=graphed)
        assert tokens_of(engine.generate(prompts, GREEDY)) == reference
        assert not engine.stats().fallbacks


@pytest.mark.parametrize("build", [tiny_models.mistral, tiny_models.gemma2])
@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_windows_and_soft_caps(build, backend):
    model = on_gpu(build(head_dim=64))
    prompts = tiny_models.random_prompts([1, 23, 24, 25, 100, 200])
    reference = hf_greedy(on_gpu(tiny_models.unshared(model)), prompts, GREEDY.max_tokens)
    engine = make_engine(model, HFWalker, attention_backend=backend)
    assert tokens_of(engine.generate(prompts, GREEDY)) == reference


def test_sampling_is_the_same_graphed_and_eager():
    model = on_gpu(tiny_models.qwen3(head_dim=64))
    prompts = tiny_models.random_prompts(LENGTHS)
    params = SamplingParams(max_tokens=40, n=3, seed=7, top_k=40, top_p=0.9, min_p=0.01, ignore_eos=True)
    graphed = make_engine(model, capture_cudagraph=True).generate(prompts, params)
    eager = make_engine(model, capture_cudagraph=False).generate(prompts, params)
    assert tokens_of(graphed) == tokens_of(eager)


def hide_pages(engine: FlexEngine, left: int) -> list[int]:
    """Leaves the engine `left` free pages."""
    hidden = engine.cache.pages.allocate(engine.cache.pages.num_free - left)
    engine.cache.pages.check = lambda: None  # the hidden pages have no holder
    return hidden


def test_a_padded_row_writes_to_the_padding_page_only():
    engine = make_engine(on_gpu(tiny_models.qwen3(head_dim=64)), max_batch_size=4)
    hidden = torch.tensor(hide_pages(engine, left=8), device="cuda")
    engine.cache.flat.normal_()

    def untouched() -> torch.Tensor:
        return torch.stack([kv.unflatten(2, (engine.cache.num_pages, -1))[:, :, hidden] for kv in engine.cache.layers])

    before = untouched()
    engine.generate(tiny_models.random_prompts([3, 5, 7]), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert torch.equal(before, untouched())


def test_no_length_is_baked_into_a_graph():
    model = on_gpu(tiny_models.qwen3(head_dim=64))
    short, long = tiny_models.random_prompts([2, 3, 4]), tiny_models.random_prompts([150, 200, 180], seed=1)
    engine = make_engine(model)
    engine.generate(short, GREEDY)
    assert tokens_of(engine.generate(long, GREEDY)) == tokens_of(make_engine(model).generate(long, GREEDY))


def test_recycled_pages_give_a_fresh_engines_tokens():
    model = on_gpu(tiny_models.llama(head_dim=64))
    engine = make_engine(model, kv_memory_gb=6e-3)
    for seed in range(6):
        prompts = tiny_models.random_prompts(LENGTHS, seed)
        assert tokens_of(engine.generate(prompts, GREEDY)) == tokens_of(make_engine(model).generate(prompts, GREEDY))


def test_places_refilled_behind_running_steps_change_nothing():
    """Five places for sixty prompts that end one by one: each refill writes into pages and places of rows that still run."""
    model, rng = on_gpu(tiny_models.qwen3(head_dim=64)), random.Random(0)
    prompts = tiny_models.random_prompts([rng.randint(1, 200) for _ in range(60)])
    params = [SamplingParams(max_tokens=rng.randint(1, 60), seed=index, ignore_eos=True) for index in range(60)]
    behind, apart = (tokens_of(make_engine(model, overlap_looks=overlap).generate(prompts, params)) for overlap in (True, False))
    assert behind == apart


def test_preemption_in_a_tiny_pool():
    model = on_gpu(tiny_models.qwen3(head_dim=64))
    prompts = tiny_models.random_prompts(LENGTHS)
    roomy, tiny = make_engine(model), make_engine(model)
    hide_pages(tiny, left=40)
    assert tokens_of(tiny.generate(prompts, GREEDY)) == tokens_of(roomy.generate(prompts, GREEDY))
    assert tiny.stats().preemptions > 0


def test_refreshed_weights_are_read_by_captured_graphs():
    model = on_gpu(tiny_models.qwen3(head_dim=64))
    prompts = tiny_models.random_prompts([5, 50])
    engine = make_engine(model)
    first = tokens_of(engine.generate(prompts, GREEDY))
    graphs = dict(engine.graphs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)  # moves every parameter
    engine.refresh_lora()
    second = tokens_of(engine.generate(prompts, GREEDY))
    assert engine.graphs == graphs and first != second
    assert second == hf_greedy(model, prompts, GREEDY.max_tokens)


def test_sleep_gives_memory_back_and_graphs_stay_valid():
    model = on_gpu(tiny_models.qwen3(head_dim=64))
    prompts = tiny_models.random_prompts(LENGTHS)
    engine = make_engine(model, kv_memory_gb=1.0)
    before = tokens_of(engine.generate(prompts, GREEDY))
    graphs = dict(engine.graphs)

    def freed_by_sleep() -> int:
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - awake
        assert not engine.cache.memory.mapped
        engine.wake_up()
        return freed

    assert max(freed_by_sleep() for _ in range(5)) > 0.5e9  # other processes on the GPU take and give memory meanwhile
    assert tokens_of(engine.generate(prompts, GREEDY)) == before and engine.graphs == graphs


def test_pools_beyond_two_to_the_31_elements():
    model = on_gpu(tiny_models.qwen3(head_dim=64, num_hidden_layers=1, num_key_value_heads=1))
    prompts = tiny_models.random_prompts([30, 200])
    small = make_engine(model, attention_backend="triton")
    per_page = small.cache.pool_bytes // small.cache.num_pages
    kv_memory_gb = per_page * (2**31 // (16 * 64) + 4096) / 1e9
    with pytest.raises(ValueError, match="beyond the 2\\^31"):
        make_engine(model, attention_backend="flex", kv_memory_gb=kv_memory_gb)
    large = make_engine(model, attention_backend="triton", kv_memory_gb=kv_memory_gb)
    k_pool = large.cache.layers[0][0]
    assert k_pool.numel() > 2**31
    large.cache.pages.free.sort()  # the last pages are handed out first
    assert tokens_of(large.generate(prompts, GREEDY)) == tokens_of(small.generate(prompts, GREEDY))
