"""Walkers against Hugging Face, architecture by architecture, and weights that trainers move."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

import tiny_models
from flex_engine import EngineConfig, FlexEngine, HFWalker, SamplingParams
from numerics import engine_last_logits, hf_greedy, hf_logits, shuffle_free_pages
from qwen3_flex_inference import Qwen3Walker
from tiny_models import gemma2, llama, mistral, qwen2, qwen3, random_prompts, unshared

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 40
LENGTHS = [2, 17, 40, 64, 70]
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)


def make_engine(walker, max_seq_len: int = 160) -> FlexEngine:
    engine = FlexEngine(walker, None, EngineConfig(max_batch_size=8, max_seq_len=max_seq_len, page_size=16))
    shuffle_free_pages(engine)
    return engine


def tokens_of(engine: FlexEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, GREEDY)]


def greedy_of(model, prompts: list[list[int]]) -> list[list[int]]:
    """Hugging Face's tokens; varied, or they would prove nothing."""
    tokens = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    assert all(len(set(completion)) >= 16 for completion in tokens)
    return tokens


# --------------------------------------------------------------------------------------------------------------- architectures

YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)
BY_HF = {
    "qwen3": qwen3,
    "llama": llama,
    "qwen2": qwen2,
    "mistral": mistral,
    "gemma2": gemma2,
    "qwen3 with windows": functools.partial(qwen3, use_sliding_window=True, sliding_window=24, max_window_layers=1),
}
WRITTEN = {
    "qwen3": qwen3,
    "qwen3 with biases": functools.partial(qwen3, attention_bias=True),
    "qwen3 with windows": BY_HF["qwen3 with windows"],
    "qwen3, tied": functools.partial(qwen3, tie_word_embeddings=True, initializer_range=0.3),
    "llama": llama,
    "llama with biases": functools.partial(llama, attention_bias=True, mlp_bias=True),
    "llama, yarn": functools.partial(llama, rope_parameters=YARN),
    "llama, linear": functools.partial(llama, rope_parameters=LINEAR),
}


@pytest.mark.parametrize(
    "walker, build",
    [pytest.param(HFWalker, build, id=f"hf: {name}") for name, build in BY_HF.items()]
    + [pytest.param(Qwen3Walker, build, id=f"written: {name}") for name, build in WRITTEN.items()],
)
def test_tokens_equal_hugging_face(walker, build):
    model, prompts = build(seed=1), random_prompts(LENGTHS)
    expected = greedy_of(unshared(model), prompts)
    engine = make_engine(walker(model))
    assert tokens_of(engine, prompts) == expected


@pytest.mark.parametrize("walker", [HFWalker, Qwen3Walker])
def test_head_dim_is_not_hidden_over_heads(walker):
    specs = walker(qwen3()).specs
    assert [(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in specs] == [(4, 2, 32)] * 2
    assert specs[0].scale == 32**-0.5


@pytest.mark.parametrize("build", WRITTEN.values(), ids=WRITTEN)
def test_written_specs_are_what_hugging_face_passes_to_its_attention(build):
    model = build()
    assert HFWalker(model).specs == Qwen3Walker(model).specs


def test_llama3_rope_scaling_matters_here():
    """Dropping it gives other tokens past the original context of 64, so the identity above would notice."""
    prompts = random_prompts(LENGTHS)
    plain = llama(seed=1, rope_parameters=dict(rope_type="default", rope_theta=10_000.0))
    plain.load_state_dict(llama(seed=1).state_dict())
    assert greedy_of(plain, prompts[-1:]) != greedy_of(llama(seed=1), prompts[-1:])


@pytest.mark.parametrize("walker", [HFWalker, Qwen3Walker])
@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="dynamic", rope_theta=10_000.0, factor=2.0),
        dict(
            rope_type="longrope", rope_theta=10_000.0, factor=2.0, original_max_position_embeddings=64,
            short_factor=[1.0] * 8, long_factor=[2.0] * 8,
        ),
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_that_depends_on_the_length_is_refused(walker, rope):
    model = llama(rope_parameters=rope)
    with pytest.raises(ValueError, match=f"rope_type '{rope['rope_type']}' is not supported"):
        make_engine(walker(model))


WINDOW = 24


@pytest.mark.parametrize("walker, build", [(HFWalker, mistral), (HFWalker, gemma2), (Qwen3Walker, WRITTEN["qwen3 with windows"])])
def test_logits_around_the_window(walker, build):
    """Lengths W-1, W, W+1 and far past it; and a window off by one would show from the first length that it touches."""
    model = build(seed=1)
    reference = unshared(model)
    prompts = random_prompts([WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, 150])
    expected = torch.cat([hf_logits(reference, prompt, [0]) for prompt in prompts])
    engine = make_engine(walker(model))
    torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=2e-4, rtol=1e-4)
    assert {spec.window for spec in engine.walker.specs} >= {WINDOW}
    for window, first_wrong in ((WINDOW - 1, 1), (WINDOW + 1, 2), (None, 2)):
        engine.cache.specs = [dataclasses.replace(spec, window=window if spec.window else None) for spec in engine.walker.specs]
        wrong = (engine_last_logits(engine, prompts) - expected).abs().amax(-1) > 1e-2
        assert wrong.tolist() == [index >= first_wrong for index in range(len(prompts))]


def test_soft_caps_matter_here():
    engine = make_engine(HFWalker(gemma2(seed=1)))
    prompts = random_prompts([40])
    right = engine_last_logits(engine, prompts)
    engine.cache.specs = [dataclasses.replace(spec, softcap=None) for spec in engine.walker.specs]
    assert (engine_last_logits(engine, prompts) - right).abs().max() > 1e-2


def test_other_architectures_are_refused():
    with pytest.raises(ValueError, match="Qwen3Walker walks qwen3, llama, not gemma2; use --walker hf"):
        Qwen3Walker(gemma2())
    config = BloomConfig(vocab_size=tiny_models.VOCAB, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="BloomForCausalLM does not call its attention through transformers' AttentionInterface"):
        HFWalker(BloomForCausalLM(config))


# -------------------------------------------------------------------------------------------------- weights that trainers move


def train_step(model, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.tensor(random_prompts([30], seed=9))
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def adamw(model, lr: float = 2e-3, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr, **options)


def replace_data(model, dtype: torch.dtype) -> None:
    """As TRL casts: `.data` of some parameters only."""
    for name, parameter in model.named_parameters():
        if "norm" in name or "q_proj" in name:
            parameter.data = parameter.data.to(dtype)


def checkpointed_step(model) -> None:
    model.gradient_checkpointing_enable()
    train_step(model, adamw(model))
    model.gradient_checkpointing_disable()


def ddp_step(model, tmp_path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        train_step(DistributedDataParallel(model), adamw(model))
    finally:
        torch.distributed.destroy_process_group()


MOVERS = {
    "to bfloat16": lambda model, tmp_path: model.to(torch.bfloat16),
    "to bfloat16 and back": lambda model, tmp_path: model.to(torch.bfloat16).float(),
    "half": lambda model, tmp_path: model.half(),
    "to cpu:0": lambda model, tmp_path: model.to("cpu:0"),
    ".data cast": lambda model, tmp_path: replace_data(model, torch.bfloat16),
    ".data clone": lambda model, tmp_path: [setattr(p, "data", p.data * 1.1) for p in model.parameters()],
    "load_state_dict": lambda model, tmp_path: model.load_state_dict(qwen3(seed=2).state_dict()),
    "load_state_dict(assign=True)": lambda model, tmp_path: model.load_state_dict(qwen3(seed=2).state_dict(), assign=True),
    "AdamW": lambda model, tmp_path: train_step(model, adamw(model, foreach=False)),
    "AdamW foreach": lambda model, tmp_path: train_step(model, adamw(model, foreach=True)),
    "AdamW fused": lambda model, tmp_path: train_step(model, adamw(model, fused=True)),
    "gradient checkpointing": lambda model, tmp_path: checkpointed_step(model),
    "DDP": ddp_step,
}
SAME_VALUES = ("to cpu:0",)


@pytest.mark.parametrize("mover", MOVERS)
def test_moved_weights_are_found_at_refresh(mover, tmp_path):
    """The slots stay where they are, and the engine generates with what the model holds now."""
    model, prompts = qwen3(seed=1), random_prompts([17, 40])
    engine = make_engine(Qwen3Walker(model))
    before = engine_last_logits(engine, prompts)
    addresses = [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()]
    MOVERS[mover](model, tmp_path)
    engine.refresh_lora()
    assert [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()] == addresses

    reference = qwen3(seed=1)  # whose rope has never been cast
    reference.load_state_dict(model.state_dict())
    tokens = tokens_of(engine, prompts)
    assert tokens == greedy_of(reference, prompts)
    logits = engine_last_logits(engine, prompts)
    torch.testing.assert_close(logits, torch.cat([hf_logits(reference, prompt, [0]) for prompt in prompts]), atol=1e-4, rtol=1e-4)
    changed = (logits - before).abs().max() > 2e-3  # far above the tolerance: stale weights would have failed
    assert changed == (mover not in SAME_VALUES)
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            assert any(slot.holds(parameter) for slot in engine.walker.weights.slots.values()), "a second copy"
    engine.refresh_lora()
    assert tokens_of(engine, prompts) == tokens


@pytest.mark.parametrize("mover", ["AdamW", "AdamW foreach", "AdamW fused"])
def test_training_goes_on_as_without_the_engine(mover):
    """An optimizer made before the engine, five steps with a rollout after each: the weights of plain training, bit for bit."""
    options = {"AdamW": {"foreach": False}, "AdamW foreach": {"foreach": True}, "AdamW fused": {"fused": True}}[mover]
    model, plain = qwen3(seed=1), qwen3(seed=1)
    optimizer, plain_optimizer = adamw(model, **options), adamw(plain, **options)
    engine = make_engine(Qwen3Walker(model))
    for _ in range(5):
        train_step(model, optimizer)
        train_step(plain, plain_optimizer)
        engine.refresh_lora()
        engine.generate(random_prompts([20]), GREEDY)
    for parameter, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.data, expected.data, atol=1e-6, rtol=1e-5)


def test_packing_makes_no_second_copy():
    model = qwen3()
    Qwen3Walker(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())
    layer = model.model.layers[0]
    packed = {
        p.weight.untyped_storage().data_ptr() for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    }
    assert len(packed) == 1


def test_save_pretrained_round_trip(tmp_path):
    model, prompts = qwen3(seed=1), random_prompts([17, 40])
    engine = make_engine(Qwen3Walker(model))
    tokens = tokens_of(engine, prompts)
    model.save_pretrained(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 1.1 * sum(p.nbytes for p in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for (name, parameter), (_, expected) in zip(loaded.named_parameters(), model.named_parameters()):
        assert torch.equal(parameter, expected), name
    assert greedy_of(loaded, prompts) == tokens
    assert tokens_of(engine, prompts) == tokens


def test_tied_weights_stay_tied():
    model, prompts = WRITTEN["qwen3, tied"](seed=1), random_prompts([17, 40])
    engine = make_engine(Qwen3Walker(model))
    model.to(torch.bfloat16).float()
    train_step(model, adamw(model))
    engine.refresh_lora()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokens_of(engine, prompts) == greedy_of(unshared(model), prompts)


def with_lora(model):
    """A LoRA that is not a no-op."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
    return wrapped.eval()


@pytest.mark.parametrize("walker", [HFWalker, Qwen3Walker])
@pytest.mark.parametrize("wrapped_first", [True, False], ids=["wrapped before", "wrapped after"])
def test_peft_wrapping(walker, wrapped_first):
    model, prompts = qwen3(seed=1), random_prompts([17, 40])
    plain = greedy_of(unshared(model), prompts)
    if wrapped_first:
        wrapped = with_lora(model)
        engine = make_engine(walker(wrapped))
    else:
        engine = make_engine(walker(model))
        assert tokens_of(engine, prompts) == plain
        wrapped = with_lora(model)
        engine.refresh_lora()
    expected = greedy_of(unshared(wrapped), prompts)
    assert expected != plain
    assert tokens_of(engine, prompts) == expected
    train_step(wrapped, adamw(wrapped, lr=0.05))
    engine.refresh_lora()
    trained = greedy_of(unshared(wrapped), prompts)
    assert trained != expected
    assert tokens_of(engine, prompts) == trained


def test_fp32_masters_walked_in_bfloat16():
    """Full fine-tuning under autocast: the engine computes on a bf16 copy, cast anew at each refresh; masters stay as they are."""
    model, prompts = qwen3(seed=1), random_prompts([17, 40])
    masters = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    engine = make_engine(Qwen3Walker(model, dtype=torch.bfloat16))
    rounded = qwen3(seed=1)
    rounded = make_engine(Qwen3Walker(cast_parameters(rounded, torch.bfloat16)))
    tokens = tokens_of(engine, prompts)
    assert tokens == tokens_of(rounded, prompts)
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr(), parameter.dtype) == (masters[name][0], torch.float32)
        assert torch.equal(parameter, masters[name][1])

    addresses = [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()]
    train_step(model, adamw(model))
    engine.refresh_lora()
    assert [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()] == addresses
    trained = make_engine(Qwen3Walker(cast_parameters(unshared(model), torch.bfloat16)))
    assert tokens_of(engine, prompts) == tokens_of(trained, prompts) != tokens


def cast_parameters(model, dtype: torch.dtype):
    """`.to(dtype)` would cast the rope's frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def test_what_is_not_there_is_refused_by_name(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def replaced(make) -> torch.nn.Module:
        model = qwen3()
        projection = model.model.layers[1].mlp.up_proj
        projection.weight = make(projection.weight)
        return model

    def empty(weight):
        return torch.nn.Parameter(torch.empty(0))

    with pytest.raises(ValueError, match=f"^{name} is on the meta device"):
        Qwen3Walker(replaced(lambda weight: torch.nn.Parameter(weight.to("meta"))))
    with pytest.raises(ValueError, match=f"^{name} is sharded"):
        Qwen3Walker(replaced(empty))

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        distribute = torch.distributed.tensor.distribute_tensor
        with pytest.raises(ValueError, match=f"^{name} is sharded"):
            Qwen3Walker(replaced(lambda weight: torch.nn.Parameter(distribute(weight.data, mesh))))
    finally:
        torch.distributed.destroy_process_group()

    engine = make_engine(Qwen3Walker(model := qwen3()))
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = torch.nn.Parameter(projection.weight.to("meta"))
    with pytest.raises(ValueError, match=f"^{name} is on the meta device"):
        engine.refresh_lora()


def test_a_weight_of_another_shape_is_refused_by_name():
    engine = make_engine(Qwen3Walker(model := qwen3()))
    norm = model.model.layers[0].input_layernorm.weight
    norm.data = norm.data[:32]
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.input_layernorm\.weight: shape"):
        engine.refresh_lora()


def test_a_resized_vocabulary_is_followed():
    model, prompts = qwen3(seed=1), random_prompts([17, 40])
    engine = make_engine(Qwen3Walker(model))
    engine.generate(prompts, GREEDY)
    model.resize_token_embeddings(tiny_models.VOCAB + 8, mean_resizing=False)
    engine.refresh_lora()
    prompts[0][3] = tiny_models.VOCAB + 7
    assert tokens_of(engine, prompts) == greedy_of(unshared(model), prompts)
