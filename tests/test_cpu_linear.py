"""Packed weights on a CPU: the products, and that no way of changing a weight leaves a stale copy behind."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flex_cpu
import flex_linear
from flex_engine import EngineConfig, FlexEngine, SamplingParams
from numerics import hf_greedy
from qwen3_flex_inference import Qwen3Walker
from qwen3_moe_flex import FlexMoEInference
from tiny_models import adapted, qwen3, qwen3_moe, random_prompts, unshared

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"),
]

PROMPTS = random_prompts([5, 20, 33])
NEW = 12
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def packings(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that were packed, in order."""
    shapes, of = [], flex_cpu.PackedWeights.of

    def recording(packed, weight_NK):
        before = list(packed.entries.values())
        result = of(packed, weight_NK)
        if list(packed.entries.values()) != before:
            shapes.append(tuple(weight_NK.shape))
        return result

    monkeypatch.setattr(flex_cpu.PackedWeights, "of", recording)
    return shapes


def make_engine(model, walker=Qwen3Walker, **options) -> FlexEngine:
    return FlexEngine(walker(model, **options), config=EngineConfig(max_batch_size=4, max_seq_len=96, page_size=16))


def greedy(max_tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def assert_as_transformers(outputs, model) -> None:
    """Greedy tokens, and the log-probability of each, by a model that was never walked."""
    reference = unshared(model)
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        assert completion.token_ids == hf_greedy(reference, prompt, len(completion.token_ids))
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.full_logprobs), expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------ one product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, N, K", [(1, 7, 3), (2, 96, 64), (8, 960, 576), (17, 33, 100), (32, 576, 1536), (200, 64, 48)])
def test_products(T, N, K, dtype):
    generator = torch.Generator().manual_seed(T)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((T, 2 * K), (3 * N, K), (3 * N,)))
    packed = flex_cpu.PackedWeights()
    with torch.no_grad():
        for x_TK in (x[:, :K], x[:, :K].contiguous()):
            for weight_NK, bias_N in ((weight[N : 2 * N], bias[N : 2 * N]), (weight[::3], None)):
                with packed.in_use():
                    y = flex_linear.dense(x_TK, weight_NK, bias_N)
                exact = F.linear(x_TK.double(), weight_NK.double(), None if bias_N is None else bias_N.double())
                torch.testing.assert_close(y.double(), exact, atol=1e-4 * K**0.5 if dtype == torch.float32 else 0.1, rtol=0.01)
                assert y.is_contiguous()
    assert len(packed.entries) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(dtype):
    x, weight = torch.randn(64, 576).to(dtype), torch.randn(960, 576).to(dtype)
    with torch.no_grad(), flex_cpu.PackedWeights().in_use():
        whole = flex_linear.dense(x, weight)
        for rows in (2, 4, 6, 8, 10, 16, 24, 32):
            assert torch.equal(flex_linear.dense(x[:rows], weight), whole[:rows]), rows


def test_where_nothing_is_packed():
    packed, weight = flex_cpu.PackedWeights(), torch.randn(8, 4)
    with packed.in_use():
        assert flex_linear.dense(torch.randn(2, 4, requires_grad=True), weight).requires_grad
        with torch.no_grad():
            flex_linear.dense(torch.randn(2, 4).half(), weight.half())
            flex_linear.dense(torch.randn(0, 4), weight)
            with torch.inference_mode():
                flex_linear.dense(torch.randn(2, 4), weight.clone())
    with torch.no_grad():
        flex_linear.dense(torch.randn(2, 4), weight)
    assert not packed.entries


def test_a_write_that_bumps_the_version_is_seen():
    packed, x, weight = flex_cpu.PackedWeights(), torch.randn(2, 4), torch.randn(8, 4)
    with torch.no_grad(), packed.in_use():
        for _ in range(3):
            torch.testing.assert_close(flex_linear.dense(x, weight), F.linear(x, weight))
            weight[2:5].mul_(2)  # through a view


# ------------------------------------------------------------------------------------------------------ what lives how long


def test_packed_once_a_call_and_gone_behind_it(packings):
    model = qwen3(seed=1)
    engine = make_engine(model)
    products = 4 * model.config.num_hidden_layers + 1
    for call in (1, 2):
        assert_as_transformers(engine.generate(PROMPTS, greedy()), model)
        assert len(packings) == call * products and not engine.packed.entries


def test_an_interrupted_call_keeps_nothing(monkeypatch):
    model = qwen3(seed=1)
    engine = make_engine(model)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_look", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPTS, greedy())
    assert not engine.packed.entries
    assert_as_transformers(engine.generate(PROMPTS, greedy()), model)


def test_between_the_results_of_a_stream_nobody_else_packs(packings):
    engine = make_engine(qwen3(seed=1))
    stream = engine.stream(iter([(PROMPTS, [greedy(3), greedy(), greedy()])]))
    next(stream)
    with torch.no_grad():
        packings.clear()
        flex_linear.dense(torch.randn(2, 4), torch.randn(8, 4))
    assert not packings and engine.packed.entries
    stream.close()
    assert not engine.packed.entries


# --------------------------------------------------------------------------------------------------- weights that change


def optimizer_step(model, **options) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2, **options)
    ids = torch.tensor(random_prompts([30], seed=9))
    with torch.enable_grad():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def in_place(model) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


def through_data(model) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def through_numpy(model) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 1.1


def new_data(model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def new_parameters(model) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.data * 1.1)


def cast_and_back(model) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(1.1)
            module.to(torch.bfloat16).float()


IN_PLACE = {
    "AdamW": lambda model: optimizer_step(model, foreach=False),
    "AdamW foreach": lambda model: optimizer_step(model, foreach=True),
    "AdamW fused": lambda model: optimizer_step(model, fused=True),
    "in place": in_place,
    ".data in place": through_data,
    "numpy": through_numpy,
    "load_state_dict": lambda model: model.load_state_dict(qwen3(seed=2).state_dict()),
}
MOVED = {
    "new .data": new_data,
    "new parameters": new_parameters,
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(qwen3(seed=2).state_dict(), assign=True),
    "to bfloat16 and back": cast_and_back,
}


def assert_changed(outputs, before) -> None:
    logprobs, old = (torch.tensor([output.outputs[0].full_logprobs for output in each]) for each in (outputs, before))
    assert (logprobs - old).abs().max() > 1e-2, "the weights are nearly the same, so nothing is tested"


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_full_fine_tuning_in_place(change, refresh, tied):
    """The parameters themselves are read, so this holds without a refresh as well."""
    model = qwen3(seed=1, tie_word_embeddings=tied)
    engine = make_engine(model)
    for _ in range(2):
        before = engine.generate(PROMPTS, greedy())
        IN_PLACE[change](model)
        if refresh:
            engine.refresh_lora()
        outputs = engine.generate(PROMPTS, greedy())
        assert_as_transformers(outputs, model)
        if change != "load_state_dict":
            assert_changed(outputs, before)


@pytest.mark.parametrize("change", MOVED)
def test_weights_that_are_replaced(change):
    model = qwen3(seed=1)
    engine = make_engine(model)
    before = engine.generate(PROMPTS, greedy())
    MOVED[change](model)
    engine.refresh_lora()
    outputs = engine.generate(PROMPTS, greedy())
    assert_as_transformers(outputs, model)
    assert_changed(outputs, before)


def merge_and_unload(model) -> None:
    model.merge_and_unload()


def merge_and_unmerge(model) -> None:
    """Leaves rounding in the base, which is read anew."""
    optimizer_step(model)
    model.merge_adapter()
    model.unmerge_adapter()


@pytest.mark.parametrize("mode", ["merged", "active"])
@pytest.mark.parametrize("change", [optimizer_step, through_data, new_data, merge_and_unmerge, merge_and_unload])
@pytest.mark.parametrize("targets", [ALL_LINEARS, ["q_proj", "lm_head"]], ids=["all", "q and lm_head"])
def test_adapters(change, mode, targets):
    model = adapted(qwen3(seed=1), "default", 0, target_modules=targets)
    engine = make_engine(model, lora_mode=mode)
    for _ in range(1 if change is merge_and_unload else 2):
        before = engine.generate(PROMPTS, greedy())
        assert_as_transformers(before, model)
        change(model)
        engine.refresh_lora()
        outputs = engine.generate(PROMPTS, greedy())
        assert_as_transformers(outputs, model)
        if change is not merge_and_unload:
            assert_changed(outputs, before)


def test_a_model_at_the_addresses_of_another():
    """Whatever memory the allocator hands out again: three models, each gone before the next is made."""
    for seed in range(3):
        model = qwen3(seed=seed)
        engine = make_engine(model)
        assert_as_transformers(engine.generate(PROMPTS, greedy()), model)
        del model, engine
        gc.collect()


def test_an_engine_between_the_results_of_another():
    models = [qwen3(seed=seed) for seed in range(2)]
    streaming, generating = (make_engine(model) for model in models)
    for output in streaming.stream(iter([(PROMPTS, [greedy(NEW - i) for i in range(3)])])):
        assert_as_transformers([output], models[0])
        assert_as_transformers(generating.generate(PROMPTS, greedy()), models[1])
        through_data(models[1])


def test_mixture_of_experts():
    model = qwen3_moe(seed=1)
    engine = make_engine(model, FlexMoEInference)
    for _ in range(2):
        assert_as_transformers(engine.generate(PROMPTS, greedy()), model)
        through_data(model)


@pytest.mark.parametrize("change", [in_place, through_data])
def test_a_stream_that_has_run_dry_reads_the_weights_anew(change):
    model = qwen3(seed=1)
    engine, done = make_engine(model), []

    def arrivals():
        yield [PROMPTS[0]], [greedy()]
        while not done:
            yield [], []
        change(model)
        yield [PROMPTS[1]], [greedy()]

    for output in engine.stream(arrivals()):
        assert_as_transformers([output], model)
        done.append(output)
    assert len(done) == 2


def test_a_refresh_while_a_stream_runs():
    """What is under way keeps the keys of the old weights; what comes later is computed with the new ones alone."""
    model = qwen3(seed=1)
    engine, old = make_engine(model), unshared(model)

    def arrivals():
        yield [PROMPTS[0], PROMPTS[2]], [greedy(4), greedy(20)]
        while not given:
            yield [], []
        yield [PROMPTS[1]], [greedy()]

    given = []
    for output in engine.stream(arrivals()):
        if not given:
            assert_as_transformers([output], old)
            through_data(model)
            engine.refresh_lora()
        elif output.index == 2:
            assert_as_transformers([output], model)
        given.append(output)
    assert len(given) == 3


def test_weights_that_are_not_numbers_are_named():
    model = qwen3(seed=1)
    engine = make_engine(model)
    engine.generate(PROMPTS, greedy())
    good = model.model.layers[1].mlp.down_proj.weight.data.clone()
    model.model.layers[1].mlp.down_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        engine.generate(PROMPTS, greedy())
    model.model.layers[1].mlp.down_proj.weight.data.copy_(good)
    assert_as_transformers(engine.generate(PROMPTS, greedy()), model)
