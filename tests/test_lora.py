"""LoRA modes against PEFT's own forward and merge, what is refused, what may not drift, adapters on disk, and the kernels."""

import argparse
import copy
import json

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import flex_kernels
import flex_linear
import flex_lora
import flex_lora_kernels as lk
import flex_nf4
import lora_adapters as la
import lora_checks as lc
import make_lora_adapter
import tiny_models as tm
from flex_engine import EngineConfig, FlexEngine, HFWalker, SamplingParams
from flex_weights import Projection
from gemma4_flex_inference import Gemma4Walker
from numerics import engine_last_logits
from qwen3_flex_inference import Qwen3Walker

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = flex_lora.LORA_MODES
PROMPTS = tm.random_prompts([5, 20, 33])
NEAR = dict(atol=2e-4, rtol=1e-4)


def adapt(model, name="default", seed=0, **options) -> PeftModel:
    """LoRA on all seven projections, unless `options` of LoraConfig say otherwise."""
    return tm.adapted(model, name, seed, **{"target_modules": list(la.LINEAR_TARGETS), **options})


def engine_of(model, mode=None, **walker_options) -> FlexEngine:
    walker = Qwen3Walker(model, lora_mode=mode, **walker_options)
    return FlexEngine(walker, config=EngineConfig(max_batch_size=4, max_seq_len=96, page_size=16))


@torch.no_grad()
def trainer_logits(model) -> torch.Tensor:
    return torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS])


def assert_serves(engine: FlexEngine, model, **tolerance) -> None:
    torch.testing.assert_close(engine_last_logits(engine, PROMPTS), trainer_logits(model), **(tolerance or NEAR))


def greedy(engine: FlexEngine) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def train_step(model, lr=0.05) -> None:
    """One step of AdamW on what is trainable, as a GRPO trainer takes it."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    model(input_ids=torch.tensor([PROMPTS[1]]), labels=torch.tensor([PROMPTS[1]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


# --- every kind of LoRA serves what PEFT computes ----------------------------------------------------------------------

KINDS = {
    "seven targets": {},
    "odd rank": dict(r=3),
    "q and v only": dict(target_modules=["q_proj", "v_proj"]),
    "regex": dict(target_modules=r".*\.layers\.1\.(self_attn|mlp)\.(k|o|up)_proj"),
    "one layer": dict(layers_to_transform=[1]),
    "all-linear": dict(target_modules="all-linear"),
    "rank and alpha patterns": dict(rank_pattern={"k_proj": 20, "layers.0.mlp.up_proj": 1}, alpha_pattern={"v_proj": 1}),
    "rsLoRA": dict(use_rslora=True),
    "DoRA": dict(use_dora=True),
    "DoRA, odd rank": dict(use_dora=True, r=17, target_modules=["k_proj", "down_proj", "up_proj"]),
    "lora_bias": dict(lora_bias=True),
    "fan_in_fan_out": dict(fan_in_fan_out=True),  # which PEFT resets on a linear
    "dropout": dict(lora_dropout=0.5),
    "PiSSA": dict(init_lora_weights="pissa"),
    "trained biases": dict(bias="all"),
    "lm_head": dict(target_modules=["q_proj", "lm_head"]),
    "embedding": dict(target_modules=["o_proj", "embed_tokens"]),
    "embedding and lm_head": dict(target_modules=["embed_tokens", "lm_head", "down_proj"]),
    "modules_to_save lm_head": dict(modules_to_save=["lm_head"]),
    "modules_to_save embedding and lm_head": dict(modules_to_save=["embed_tokens", "lm_head"]),
    "modules_to_save norms": dict(modules_to_save=["input_layernorm", "norm"]),
    "modules_to_save a whole MLP": dict(target_modules=["q_proj"], modules_to_save=["mlp"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, mode):
    model = tm.qwen3()
    plain = trainer_logits(model)
    adapted = adapt(model, **KINDS[kind])
    before = trainer_logits(adapted)
    engine = engine_of(adapted, mode)
    assert torch.equal(trainer_logits(adapted), before), "the trainer's own forward has changed"
    assert (before - plain).abs().max() > 0.1, "the adapter changes nothing, so nothing is tested"
    assert_serves(engine, adapted)
    train_step(adapted)
    engine.refresh_lora()
    assert (trainer_logits(adapted) - before).abs().max() > 0.01
    assert_serves(engine, adapted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=["q_proj", "lm_head"]),
        dict(target_modules=["q_proj", "embed_tokens"]),
        dict(target_modules=["embed_tokens", "lm_head"]),
        dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
        dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ],
    ids=["lm_head", "embedding", "both", "tied adapter", "lm_head saved", "tied, saved"],
)
@pytest.mark.filterwarnings("ignore")
def test_tied_embeddings(options, mode):
    model = tm.qwen3(tie_word_embeddings=True)
    adapted = adapt(model, **options)
    engine = engine_of(adapted, mode)
    assert_serves(engine, adapted)
    train_step(adapted, lr=0.01)
    engine.refresh_lora()
    assert_serves(engine, adapted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, dict(lora_bias=True), dict(use_dora=True)], ids=["plain", "lora_bias", "DoRA"])
def test_llama_with_biases(options, mode):
    adapted = adapt(tm.llama(attention_bias=True, mlp_bias=True), **options)
    assert_serves(engine_of(adapted, mode), adapted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, dict(target_modules=["embed_tokens", "q_proj", "lm_head"])], ids=["seven", "embedding"])
def test_gemma4(options, mode):
    """Projections with GELU gates and sandwich norms, layers that read others' keys, a scaled embedding."""
    adapted = adapt(tm.gemma4(), **options)
    walker = Gemma4Walker(adapted, lora_mode=mode)
    engine = FlexEngine(walker, config=EngineConfig(max_batch_size=4, max_seq_len=96, page_size=16))
    assert_serves(engine, adapted)
    train_step(adapted)
    engine.refresh_lora()
    assert_serves(engine, adapted)


@pytest.mark.parametrize("mode", MODES)
def test_another_adapter_name_and_several_adapters(mode):
    adapted = adapt(tm.qwen3(), name="policy")
    engine = engine_of(adapted, mode)
    assert_serves(engine, adapted)
    alone = trainer_logits(adapted)

    adapted.add_adapter("critic", LoraConfig(r=6, target_modules=["v_proj", "up_proj"], init_lora_weights=False))
    engine.refresh_lora()
    torch.testing.assert_close(engine_last_logits(engine, PROMPTS), alone, **NEAR)  # inactive
    adapted.set_adapter("critic")
    engine.refresh_lora()
    assert_serves(engine, adapted)
    adapted.base_model.set_adapter(["policy", "critic"])
    engine.refresh_lora()
    assert (trainer_logits(adapted) - alone).abs().max() > 0.1
    assert_serves(engine, adapted)


@pytest.mark.parametrize("mode", MODES)
def test_peft_wraps_switches_and_unwraps_after_the_engine_is_built(mode):
    model = tm.qwen3()
    plain = trainer_logits(model)
    engine = engine_of(model, mode)
    adapted = adapt(model)
    engine.refresh_lora()
    assert_serves(engine, adapted)
    with adapted.disable_adapter():
        engine.refresh_lora()
        torch.testing.assert_close(engine_last_logits(engine, PROMPTS), plain, **NEAR)
    engine.refresh_lora()
    assert_serves(engine, adapted)
    adapted.add_adapter("saved", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"], init_lora_weights=False))
    adapted.set_adapter("saved")
    engine.refresh_lora()
    assert_serves(engine, adapted)
    adapted.set_adapter("default")
    merged = adapted.merge_and_unload()
    engine.refresh_lora()
    assert_serves(engine, merged)


def test_scaling_is_read_at_each_refresh():
    adapted = adapt(tm.qwen3())
    engine = engine_of(adapted)
    for module in adapted.modules():
        if flex_lora.is_lora(module):
            module.set_scale("default", 0.5)
    engine.refresh_lora()
    assert_serves(engine, adapted)


# --- what is refused, by name --------------------------------------------------------------------------------------------


def refused(model, *words: str, mode="merged") -> None:
    with pytest.raises(ValueError) as error:
        Qwen3Walker(model, lora_mode=mode)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_are_not_read_are_named(mode):
    tokens = adapt(tm.qwen3(), trainable_token_indices=[1, 2])
    refused(tokens, "embed_tokens.token_adapter.trainable_tokens_delta.default", "--walker hf", mode=mode)
    arrow = get_peft_model(tm.qwen3(), LoraConfig(target_modules=["q_proj"], init_lora_weights="mica", r=4))
    refused(arrow, "q_proj.lora_A.default.weight (Linear, MiCALinearVariant)", mode=mode)
    dora = adapt(tm.qwen3(), target_modules=["embed_tokens"], use_dora=True)
    refused(dora, "embed_tokens.lora_embedding_A.default", "DoraEmbeddingVariant", mode=mode)


def test_a_layer_that_the_walker_does_not_know_is_named():
    class WithoutMlpAdapters(Qwen3Walker):
        def projection(self, *linears):
            return super().projection(*(getattr(linear, "base_layer", linear) for linear in linears))

    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.default\.weight \(Linear\).* and 24 more"):
        WithoutMlpAdapters(adapt(tm.qwen3()))


def test_other_peft_methods_merged_layers_and_mixtures_are_refused():
    targets = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    refused(get_peft_model(tm.qwen3(), IA3Config(**targets)), "'default' is IA3")
    adapted = adapt(tm.qwen3())
    adapted.merge_adapter()
    refused(adapted, "layers.0.self_attn.q_proj: adapter default is merged", "unmerge_adapter")
    adapted = adapt(tm.qwen3(), use_dora=True)
    adapted.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.base_model.set_adapter(["default", "second"])
    refused(adapted, "q_proj: DoRA with several active adapters (default, second)")
    refused(tm.qwen3(), "lora_mode must be one of merged, active, not 'fused'", mode="fused")


@pytest.mark.parametrize("mode", MODES)
def test_a_merge_behind_the_engines_back_is_refused_and_can_be_undone(mode):
    adapted = adapt(tm.qwen3())
    engine = engine_of(adapted, mode)
    adapted.merge_adapter()
    with pytest.raises(ValueError, match="would be applied twice"):
        engine.refresh_lora()
    adapted.unmerge_adapter()
    engine.refresh_lora()
    assert_serves(engine, adapted, atol=1e-3, rtol=1e-3)


def test_a_failed_rebuild_is_tried_again():
    adapted = adapt(tm.qwen3())
    engine = engine_of(adapted)
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False))
    adapted.base_model.set_adapter(["default", "other"])
    for _ in range(2):
        with pytest.raises(ValueError, match="DoRA with several"):
            engine.refresh_lora()
    adapted.set_adapter("other")
    engine.refresh_lora()
    assert_serves(engine, adapted)


# --- numerics of the two modes -------------------------------------------------------------------------------------------


def ulp(x: torch.Tensor) -> torch.Tensor:
    """bfloat16's step at x: 8 bits of mantissa."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 8)


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, dict(use_rslora=True, lora_alpha=3), dict(use_dora=True)], ids=["plain", "rsLoRA", "DoRA"])
def test_merged_is_within_one_ulp_of_pefts_own_merge(options, adapter_dtype):
    adapted = adapt(tm.qwen3().bfloat16(), **options)
    for _, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data = parameter.data.to(adapter_dtype)
    reference = copy.deepcopy(adapted)
    walker = Qwen3Walker(adapted, lora_mode="merged")
    merged = dict(reference.merge_and_unload().named_parameters())
    base = dict(adapted.get_base_model().named_parameters())
    assert len(walker.adapters.merges) == 14
    for part, room in walker.adapters.merges:
        name = part.name.removeprefix("base_model.model.")
        ours, theirs, before = room.float(), merged[f"{name}.weight"].float(), base[f"{name}.base_layer.weight"].float()
        step = ulp(torch.maximum(ours.abs(), theirs.abs()))
        if adapter_dtype == torch.bfloat16:  # PEFT rounds the delta to bfloat16 before it adds it
            step = torch.maximum(step, ulp((theirs - before).abs() + step))
        assert ((ours - theirs).abs() <= step).all()
        assert (ours != before).any()


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_lies_as_near_to_fp32_as_pefts_forward_does(mode, adapter_dtype):
    adapted = adapt(tm.qwen3().bfloat16())
    for _, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data = parameter.data.to(adapter_dtype)
    exact = trainer_logits(copy.deepcopy(adapted).float())
    own_error = (trainer_logits(adapted) - exact).abs().mean()
    engine = engine_of(adapted, mode)
    assert engine.walker.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = greedy(engine)
    assert greedy(engine) == under_autocast
    assert (engine_last_logits(engine, PROMPTS) - exact).abs().mean() <= 2 * own_error


def test_active_follows_a_trainer_under_autocast_with_fp32_masters():
    """TRL's default for a model id: fp32 parameters, bf16 autocast. The engine computes in bf16 over copies."""
    adapted = adapt(tm.qwen3())
    exact = trainer_logits(adapted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own_error = (trainer_logits(adapted) - exact).abs().mean()
    for mode in MODES:
        engine = engine_of(adapted, mode, dtype=torch.bfloat16)
        assert (engine_last_logits(engine, PROMPTS) - exact).abs().mean() <= 2 * own_error
        train_step(adapted)
        engine.refresh_lora()
        exact = trainer_logits(adapted)
        assert (engine_last_logits(engine, PROMPTS) - exact).abs().mean() <= 2 * own_error


# --- whose memory, which addresses ---------------------------------------------------------------------------------------


def storages(model) -> dict[str, int]:
    return {name: parameter.untyped_storage().data_ptr() for name, parameter in model.named_parameters()}


def test_active_shares_the_base_and_merged_leaves_it_where_it_is():
    adapted = adapt(tm.qwen3())
    before = storages(adapted)
    merged = engine_of(adapted, "merged")
    after = storages(adapted)
    assert all(before[name] == after[name] for name in before), "the frozen base has moved"
    own = {room.untyped_storage().data_ptr() for _, room in merged.walker.adapters.merges}
    assert not own & set(after.values())
    layer = merged.walker.layers[0]
    assert layer.input_norm.data_ptr() == adapted.get_base_model().model.layers[0].input_layernorm.weight.data_ptr()

    active = engine_of(adapted, "active").walker
    base = adapted.get_base_model().model.layers[0]
    first = active.layers[0].qkv.stacked.weight
    for name in "qkv":
        weight = getattr(base.self_attn, f"{name}_proj").base_layer.weight
        assert weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert not any(module.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                   for module in adapted.modules() if isinstance(module, nn.Linear) and module.out_features == 4)  # fmt: skip


def test_parts_without_adapter_of_a_merged_projection_stay_shared():
    adapted = adapt(tm.qwen3(), target_modules=["q_proj", "v_proj"])
    engine = engine_of(adapted, "merged")
    attention = adapted.get_base_model().model.layers[0].self_attn
    packed = engine.walker.layers[0].qkv.weight
    assert attention.k_proj.weight.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    attention.k_proj.weight.data.mul_(1.5)  # in place, so no refresh is needed
    assert_serves(engine, adapted)


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_refreshes_keep_addresses_base_bits_and_what_a_plain_trainer_learns(mode):
    adapted, plain = adapt(tm.qwen3()), adapt(tm.qwen3())
    engine = engine_of(adapted, mode)
    own = {id(parameter) for _, parameter, _ in flex_lora.active_tensors(adapted)}
    base = [(name, parameter) for name, parameter in adapted.named_parameters() if id(parameter) not in own]
    base_hash = lc.fingerprint(base)
    addresses = [tensor.data_ptr() for tensor in engine.walker.adapters.written()]
    slots = [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()]
    for _ in range(4):
        for model in (adapted, plain):
            train_step(model)
        engine.refresh_lora()
        greedy(engine)
    for (name, ours), (_, theirs) in zip(adapted.named_parameters(), plain.named_parameters()):
        assert torch.equal(ours, theirs), name
    assert lc.fingerprint(base) == base_hash
    assert [tensor.data_ptr() for tensor in engine.walker.adapters.written()] == addresses
    assert [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()] == slots
    assert_serves(engine, adapted)


def test_the_same_prompt_under_adapter_a_then_b():
    adapted = adapt(tm.qwen3())
    engine = engine_of(adapted)
    first = greedy(engine)
    saved = {name: parameter.data.clone() for name, parameter, _ in flex_lora.active_tensors(adapted)}
    for _, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    engine.refresh_lora()
    second = greedy(engine)
    assert second == greedy(engine_of(adapted)) != first
    for name, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data.copy_(saved[name])
    engine.refresh_lora()
    assert greedy(engine) == first


# --- trainers that move weights ------------------------------------------------------------------------------------------


def to_other_storage(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


MOVERS = {
    "data = clone": to_other_storage,
    "to(float64) and back": lambda model: model.double().float(),
    "load_state_dict": lambda model: model.load_state_dict({k: v * 1.01 for k, v in model.state_dict().items()}),
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(
        {k: v.clone() * 1.01 for k, v in model.state_dict().items()}, assign=True
    ),
    "safe_merge": lambda model: (model.merge_adapter(safe_merge=True), model.unmerge_adapter()),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mover", MOVERS)
def test_moved_weights_are_taken_back(mover, mode, tied):
    adapted = adapt(tm.qwen3(tie_word_embeddings=tied))
    engine = engine_of(adapted, mode)
    slots = [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()]
    MOVERS[mover](adapted)
    engine.refresh_lora()
    assert_serves(engine, adapted, atol=1e-3, rtol=1e-3)
    assert [slot.tensor.data_ptr() for slot in engine.walker.weights.slots.values()] == slots
    assert all(slot.holds(parameter) for slot in engine.walker.weights.slots.values() for parameter in slot.parameters())


def test_full_fine_tuning_is_read_in_place_and_other_dtypes_are_copied():
    model = tm.qwen3()
    engine = engine_of(model)
    train_step(model, lr=1e-3)
    assert_serves(engine, model)  # before any refresh: the parameters are the engine's weights
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    engine.refresh_lora()
    assert_serves(engine, copy.deepcopy(model).float())


def test_sharded_missing_and_untied_weights_are_refused_by_name():
    model = tm.qwen3()
    model.model.layers[1].mlp.up_proj.weight.data = torch.empty(0)
    refused(model, "model.layers.1.mlp.up_proj.weight is sharded")
    tied = tm.qwen3(tie_word_embeddings=True)
    engine = engine_of(tied)
    tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.data * 2)
    with pytest.raises(ValueError, match="tied to another weight and now differs"):
        engine.refresh_lora()


# --- drift and rounding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [tm.qwen3, tm.llama])
def test_verify_no_drift(make, mode):
    engine = engine_of(make().bfloat16(), mode)
    report = lc.verify_no_drift(engine, max_tokens=4)
    assert report.passed and report.lora_mode == mode and report.cycles == 10
    assert any(flex_lora.is_lora(module) for module in engine.walker.model.modules()), "it makes an adapter if there is none"
    assert json.loads(json.dumps(report.as_dict()))["base_bit_identical"] is True


def test_verify_no_drift_needs_a_written_walker():
    engine = FlexEngine(HFWalker(tm.qwen3()), config=EngineConfig(max_batch_size=2, max_seq_len=32, page_size=16))
    with pytest.raises(ValueError, match="HFWalker runs PEFT's own layers"):
        lc.verify_no_drift(engine)


def test_verify_no_drift_fails_where_something_drifts(monkeypatch):
    def onto_itself(outs, bases, *factors):
        lk.merge_low_rank_reference(outs, outs, *factors)

    engine = engine_of(adapt(tm.qwen3()), "merged")
    monkeypatch.setattr(flex_lora, "merge_low_rank", onto_itself)
    report = lc.verify_no_drift(engine, cycles=2, max_tokens=2)
    assert not report.inference_deterministic and not report.refresh_idempotent and not report.passed

    engine = engine_of(adapt(tm.qwen3().bfloat16()), "active")
    refresh = engine.refresh_lora

    def merge_and_unmerge():
        engine.walker.model.merge_adapter()
        engine.walker.model.unmerge_adapter()
        refresh()

    monkeypatch.setattr(engine, "refresh_lora", merge_and_unmerge)
    assert not lc.verify_no_drift(engine, cycles=2, max_tokens=2).base_bit_identical


def test_fingerprint_sees_a_bit_an_order_and_a_name(monkeypatch):
    monkeypatch.setattr(lc, "HASH_CHUNK", 100)
    x = torch.randn(333).bfloat16()
    flipped, swapped = x.clone(), x.clone()
    flipped.view(torch.int16)[200] ^= 1
    swapped[[7, 8]] = x[[8, 7]]
    hashes = {lc.fingerprint([(name, t)]) for name, t in (("a", x), ("b", x), ("a", flipped), ("a", swapped), ("a", x[None]))}
    assert len(hashes) == 5 and lc.fingerprint([("a", x.clone())]) in hashes


def test_merge_rounding_grows_with_the_delta():
    shares = []
    for scale in (1e-4, 1e-2, 1.0):
        adapted = adapt(tm.qwen3().bfloat16())
        for name, parameter, _ in flex_lora.active_tensors(adapted):
            if "lora_B" in name:
                parameter.data *= scale
        rounding = lc.merge_rounding(adapted)
        assert len(rounding.layers) == 14 and 0 <= rounding.unmoved <= 1
        shares.append(rounding.share)
    assert shares[0] < 0.5 < shares[1] and shares[2] == pytest.approx(1, abs=0.01)
    assert lc.merge_rounding(adapt(tm.qwen3())).share == pytest.approx(1, abs=1e-4)


def test_merge_rounding_report():
    adapted = adapt(tm.qwen3())
    report = lc.merge_rounding_report(Qwen3Walker, adapted, PROMPTS, max_tokens=8)
    assert json.loads(json.dumps(report.as_dict()))["rounding"]["share"] == pytest.approx(1, abs=1e-4)
    assert "a merge keeps 100.0% of the delta" in str(report) and "hf_generate" in str(report)
    errors = report.errors
    assert errors.keys() == {"hf_generate", "merged", "active"}
    assert all(error.max_abs < 1e-3 and 0 <= error.kl < 1e-6 and error.tokens == 24 for error in errors.values())
    other = lc.LogprobError.between(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert other.mean_abs == 0.25 and other.max_abs == 0.5 and other.kl == pytest.approx((torch.e**-0.5 - 0.5) / 2)


# --- adapters on disk ----------------------------------------------------------------------------------------------------


def rewrite(path, change) -> None:
    file = path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.fixture
def saved(tmp_path):
    """A saved adapter and the logits of the model that it belongs to."""
    adapted = adapt(tm.qwen3(), name="policy", modules_to_save=["lm_head"], rank_pattern={"k_proj": 5})
    adapted.save_pretrained(tmp_path)
    return tmp_path / "policy", trainer_logits(adapted)


RENAMES = {
    "as saved": lambda name: name,
    "without PEFT's prefix": lambda name: name.removeprefix("base_model.model."),
    "under another prefix": lambda name: name.replace("base_model.model.", "actor.module.", 1),
    "of a larger model": lambda name: name.replace("base_model.model.", "base_model.model.language.", 1),
    "with the adapter's name": lambda name: name.replace("lora_A.", "lora_A.policy.").replace("lora_B.", "lora_B.policy."),
}


@pytest.mark.parametrize("rename", RENAMES)
def test_load_adapter(rename, saved):
    path, expected = saved
    rewrite(path, lambda state: {RENAMES[rename](name): tensor for name, tensor in state.items()})
    adapted = la.load_adapter(tm.qwen3(), path, adapter_name="rollout")
    torch.testing.assert_close(trainer_logits(adapted), expected)
    assert_serves(engine_of(adapted), adapted)


def test_load_adapter_names_what_does_not_fit(saved):
    path, _ = saved
    whole = load_file(path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def fails(change, *words):
        save_file(change(dict(whole)), path / "adapter_model.safetensors")
        with pytest.raises(ValueError) as error:
            la.load_adapter(tm.qwen3(), path)
        assert all(word in str(error.value) for word in words), str(error.value)

    fails(lambda state: {k: v for k, v in state.items() if k != name}, f"{name} is not in the file")
    strange = name.replace("layers.0", "layers.7")
    fails(lambda state: state | {strange: whole[name].clone()}, f"{strange} has no place in the model")
    fails(lambda state: {k.replace("self_attn", "attention"): v for k, v in state.items()}, "attention.k_proj", "and 13 more")
    targets = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    get_peft_model(tm.qwen3(), IA3Config(**targets)).save_pretrained(path)
    fails(lambda state: state, "IA3")


@pytest.mark.filterwarnings("ignore")
def test_load_adapter_with_a_saved_embedding(tmp_path):
    adapted = adapt(tm.qwen3(), target_modules=["embed_tokens", "q_proj"])
    adapted.save_pretrained(tmp_path)
    assert any("base_layer" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    torch.testing.assert_close(trainer_logits(la.load_adapter(tm.qwen3(), tmp_path)), trainer_logits(adapted))


def test_make_lora_adapter(tmp_path, capsys):
    model = tm.qwen3()
    model.config.save_pretrained(tmp_path / "model")
    arguments = ["--model_name", str(tmp_path / "model"), "--output", str(tmp_path / "adapter")]
    assert make_lora_adapter.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(state) == 28 and all(32 in tensor.shape and tensor.std() > 1e-3 for tensor in state.values())
    plain = trainer_logits(model)
    adapted = la.load_adapter(model, tmp_path / "adapter")
    assert (trainer_logits(adapted) - plain).abs().max() > 1e-3
    assert_serves(engine_of(adapted), adapted)


def test_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name")
    parser.add_argument("--seed", type=int, default=0)
    la.add_lora_arguments(parser)

    def parsed(*arguments):
        args = parser.parse_args(arguments)
        la.check_lora_arguments(args)
        return args

    assert parsed("--lora_mode", "active").lora_mode == "active"
    assert parsed("--model_name_4bit", "x").load_in_4bit
    for arguments in (
        ("--model_name", "a", "--model_name_4bit", "b"),
        ("--load_in_4bit", "--lora_mode", "merged"),
        ("--no_merge_lora",),
        ("--no_merge_lora", "--lora_adapter", "x", "--lora_mode", "active"),
        ("--no_merge_lora", "--lora_adapter", "x", "--verify_no_drift"),
    ):
        with pytest.raises(ValueError, match="--"):
            parsed(*arguments)
    model = tm.qwen3()
    assert la.attach_adapter(model, parsed()) is model
    assert isinstance(la.attach_adapter(model, parsed("--verify_no_drift")), PeftModel)


def test_pefts_own_layers_through_the_hugging_face_walker():
    adapted = adapt(tm.qwen3(), use_dora=True)
    engine = FlexEngine(HFWalker(adapted), config=EngineConfig(max_batch_size=4, max_seq_len=64, page_size=16))
    torch.testing.assert_close(engine_last_logits(engine, PROMPTS), trainer_logits(adapted), **NEAR)


# --- kernels -------------------------------------------------------------------------------------------------------------

# The interpreter multiplies bfloat16 as if it were integers.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(DEVICE, dtype)


def low_rank_inputs(T, sizes, R, dtype, scaled, splits=1):
    """y and xa are columns of one product, as `ActiveProjection` makes them."""
    N = sum(sizes)
    both = randn(splits, T, N + len(sizes) * R, dtype=torch.float32 if splits > 1 else dtype) * splits**-0.5
    return *both.tensor_split([N], dim=-1), randn(R, N, dtype=dtype) * R**-0.5, randn(N) if scaled else None


def assert_near(actual, expected):
    tolerance = 2e-5 if expected.dtype == torch.float32 else 0.02
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "T, sizes, R, splits",
    [(1, (64,), 16, 1), (33, (100, 36, 36), 16, 1), (5, (65, 200), 32, 3), (3, (576,), 64, 2), (300, (64, 32), 16, 1)],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_add_low_rank(interpreter, T, sizes, R, splits, scaled, dtype):
    y, xa, b, scale = low_rank_inputs(T, sizes, R, dtype, scaled, splits)
    for residual in (None, randn(T, sum(sizes) + 3, dtype=dtype)[:, 3:]):
        actual, expected = (
            op(y, xa, b, sizes, scale, residual) for op in (lk.add_low_rank_triton, lk.add_low_rank_reference)
        )
        assert_near(actual, expected)


def test_a_low_rank_part_below_the_last_bit_breaks_no_ties(interpreter):
    """A quarter of these sums lie half way between two numbers; PEFT's layer has lost so small a part before it adds the residual."""
    y, residual = 1 + torch.rand(1, 8, 64).to(HALF) / 2, 4 + torch.rand(8, 64).to(HALF)
    xa, b = torch.ones(1, 8, 16, dtype=HALF), torch.full((16, 64), 2.0**-20, dtype=HALF)
    for op in (lk.add_low_rank_triton, lk.add_low_rank_reference):
        assert torch.equal(op(y, xa, b, [64], None, residual), y[0] + residual)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("T, I, R, scaled, splits", [(1, 64, 16, False, 1), (33, 100, 32, True, 1), (5, 129, 16, False, 3)])
def test_low_rank_gates(interpreter, T, I, R, scaled, splits, dtype):
    y, xa, b, scale = low_rank_inputs(T, (I, I), R, dtype, scaled, splits)
    assert_near(lk.low_rank_silu_mul_triton(y, xa, b, scale), lk.low_rank_silu_mul_reference(y, xa, b, scale))
    assert_near(lk.low_rank_gelu_mul_triton(y, xa, b, scale), lk.low_rank_gelu_mul_reference(y, xa, b, scale))


@pytest.mark.parametrize("T", [5, 70, 300])
@pytest.mark.parametrize("kind", ["plain", "stacked", "stacked, bias", "NF4"])
def test_active_projection_launches_kernels_over_every_base(interpreter, monkeypatch, kind, T):
    """As on a GPU: few tokens by the skinny product, in splits of K or whole, more by cuBLAS; y and xA in one storage or two."""
    for module in (flex_kernels, flex_linear, flex_nf4, lk):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    K, R, eps = 512 if kind.startswith("stacked") else 256, 16, 1e-6
    for sizes in ([64], [64, 64]):
        N, extra = sum(sizes), len(sizes) * R
        weight, b = randn(N, K, dtype=HALF) * K**-0.5, randn(R, N, dtype=HALF) * R**-0.5
        a = randn(extra, K, dtype=HALF) * K**-0.5
        bias = randn(N, dtype=HALF) if "bias" in kind else None
        stacked = base = None
        if kind == "NF4":
            codes = randn(N, K // 8).mul(2**29).int()
            scales = randn(K // 64, N).abs() * K**-0.5
            weight = flex_nf4.nf4_dequantize_reference(codes, scales, HALF)
            base = flex_nf4.NF4Projection(codes, scales, HALF, None)
        elif kind == "plain":
            base = Projection(weight, None)
        else:
            storage = torch.cat([weight, a])
            a = storage[N:]
            stacked = Projection(storage, None if bias is None else torch.cat([bias, bias.new_zeros(extra)]))
        product = flex_lora.ActiveProjection(a.unflatten(0, (len(sizes), R)), b, sizes, stacked, base)
        x, residual, norm = randn(T, K, dtype=HALF), randn(T, N, dtype=HALF), randn(N, dtype=HALF)
        deltas = [
            scaled.float().T @ part.float() for scaled, part in zip(b.split(sizes, dim=1), a.unflatten(0, (len(sizes), R)))
        ]
        expected = nn.functional.linear(x.float(), weight.float() + torch.cat(deltas), None if bias is None else bias.float())
        assert_near(product(x), expected.to(HALF))
        normed = flex_kernels.rms_norm_reference(expected, norm.float(), eps, residual.float())
        for actual, wanted in zip(product.add_norm(x, residual, norm, eps), normed):
            assert_near(actual, wanted.to(HALF))
        if len(sizes) == 2:
            gate, up = expected.chunk(2, dim=-1)
            assert_near(product.silu_gated(x), (nn.functional.silu(gate) * up).to(HALF))
            assert_near(product.gelu_gated(x), (nn.functional.gelu(gate, approximate="tanh") * up).to(HALF))


@pytest.mark.parametrize("out_dtype, source_dtype", [(HALF, torch.float32), (HALF, HALF), (torch.float32, torch.float32)])
def test_copy_scaled(interpreter, out_dtype, source_dtype):
    """Transposed rooms beside each other, as B has; rows of a storage, as A has; nothing around them is written."""
    packed, expected = (torch.zeros(16, 300, dtype=out_dtype, device=DEVICE) for _ in range(2))

    def rooms(storage):
        return [storage[:, :100].T[:, :9], storage[:, 100:200].T[:, 9:16], storage[:9, 200:300], storage[9:12, 200:300]]

    sources = [randn(*room.shape, dtype=source_dtype) for room in rooms(packed)]
    scalings = [0.5, 2.0, 1.0, 1.0]
    lk.copy_scaled_reference(rooms(expected), sources, scalings)
    for _ in range(2):
        lk.copy_scaled_triton(rooms(packed), sources, scalings)
        torch.testing.assert_close(packed, expected)
        packed.zero_()
    lk.copy_scaled_triton(rooms(packed), [source.clone() for source in sources], [2 * scaling for scaling in scalings])
    torch.testing.assert_close(packed, 2 * expected)


@pytest.mark.parametrize(
    "base_dtype, adapter_dtype", [(torch.bfloat16, torch.float32), (HALF, HALF), (torch.float32, torch.float32)]
)
def test_merge_low_rank(interpreter, base_dtype, adapter_dtype):
    """Two shapes in one call, parts of a packed weight, odd sizes, an embedding's transposed factors."""
    packed = torch.zeros(70 + 129, 130, dtype=base_dtype, device=DEVICE)
    outs = [*packed.split([70, 129]), torch.zeros(70, 130, dtype=base_dtype, device=DEVICE)]
    bases = [randn(*out.shape, dtype=base_dtype) for out in outs]
    lefts = [randn(70, 33, dtype=adapter_dtype), randn(129, 3, dtype=adapter_dtype), randn(33, 70, dtype=adapter_dtype).T]
    rights = [randn(33, 130, dtype=adapter_dtype), randn(3, 130, dtype=adapter_dtype), randn(130, 33, dtype=adapter_dtype).T]
    scalings = [0.5, 2.0, 1.25]
    expected = [torch.empty_like(out) for out in outs]
    lk.merge_low_rank_reference(expected, bases, lefts, rights, scalings)
    lk.merge_low_rank_triton(outs, bases, lefts, rights, scalings)
    for actual, reference in zip(outs, expected):
        tolerance = 1e-4 if base_dtype == torch.float32 else 0.02
        torch.testing.assert_close(actual, reference, atol=tolerance, rtol=tolerance)


def test_cycles_of_training_and_refresh_leave_the_base_alone(tmp_path, capsys):
    """The script: bfloat16 weights that a first update hardly reaches through a merge, and a base with the bits it had."""
    import lora_cycles

    flags = ["--load_format", "dummy", "--model_name", "gemma-4-tiny", "--dtype", "bfloat16", "--cycles", "10", "--batch_size", "2"]
    flags += ["--max_new_tokens", "4", "--prompt_tokens", "8", "--lora_rank", "4", "--learning_rate", "1e-5", "--json", str(tmp_path / "x.json")]
    assert lora_cycles.main(flags) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["base_unchanged"] and report["merge_keeps"]["1"] < report["merge_keeps"]["10"] < 1
    assert set(report["logprob_errors"]) == {"hf_generate", "merged", "active"} and "bit by bit" in capsys.readouterr().out
