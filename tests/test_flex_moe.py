"""Qwen3-MoE in the engine: the walker, its compiled form, and LoRA on experts, against Hugging Face on tiny models."""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

import flex_cli
import flex_lora
import flex_models
import flex_moe
import flex_moe_bench
import flex_moe_micro_bench
import flex_moe_parity
import lora_adapters as la
import lora_checks as lc
import make_lora_adapter
import qwen3_moe_flex
import tiny_models as tm
import verify_qwen3_moe_numerics
from conftest import ROOT, SCRIPTS
from flex_compile import COMPILE_VARIABLE
from flex_engine import EngineConfig, FlexEngine, HFWalker, SamplingParams
from flex_models import dummy_model
from flex_nf4 import load_4bit, quantize_nf4
from flex_profile import decode_step_bytes, expert_reads_of, profile_decode_step
from numerics import Reference, engine_last_logits, hf_greedy, verify
from qwen3_flex_inference import Qwen3Walker
from qwen3_moe_flex import FlexMoEInference
from written_walkers import walker_class_of

pytestmark = pytest.mark.usefixtures("one_thread")
MODES = flex_lora.LORA_MODES
STACKS = list(flex_lora.EXPERT_PARAMETERS)
PROMPTS = tm.random_prompts([40, 3, 70, 1])
NEAR = dict(atol=2e-4, rtol=1e-4)


def engine_of(model, walker_class=FlexMoEInference, **options) -> FlexEngine:
    return FlexEngine(walker_class(model, **options), config=EngineConfig(max_batch_size=6, max_seq_len=160, page_size=16))


def greedy(engine: FlexEngine, prompts=PROMPTS, max_tokens: int = 40) -> list[list[int]]:
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@torch.no_grad()
def trainer_logits(model) -> torch.Tensor:
    return torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS])


def assert_serves(engine: FlexEngine, model, **tolerance) -> None:
    torch.testing.assert_close(engine_last_logits(engine, PROMPTS), trainer_logits(model), **(tolerance or NEAR))


# ----------------------------------------------------------------------------------------------------------------- the walker

VARIANTS = {
    "norm_topk_prob": dict(norm_topk_prob=True),
    "no norm_topk_prob": dict(norm_topk_prob=False),
    "decoder_sparse_step": dict(decoder_sparse_step=2, mlp_only_layers=[]),
    "all sparse": dict(mlp_only_layers=[]),
    "window": dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "one expert": dict(num_experts_per_tok=1),
    "all experts": dict(num_experts_per_tok=8),
}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_hugging_faces(variant, implementation):
    model = tm.qwen3_moe(**VARIANTS[variant])
    reference = tm.unshared(model)
    reference.set_experts_implementation(implementation)
    engine = engine_of(model)
    assert engine.walker.specs == HFWalker(reference).specs
    tokens = greedy(engine)
    assert tokens == [hf_greedy(reference, prompt, 40) for prompt in PROMPTS]
    assert len({token for row in tokens for token in row}) >= 16


def sparse_mlps(model):
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def test_ties_in_the_router_send_all_tokens_to_the_same_experts():
    """Which of equal probabilities wins is nobody's promise, so the experts are equal too."""
    model = tm.qwen3_moe()
    for mlp in sparse_mlps(model):
        mlp.gate.weight.data.zero_()
        for stack in (mlp.experts.gate_up_proj, mlp.experts.down_proj):
            stack.data[:] = stack.data[:1].clone()
    reference = tm.unshared(model)
    assert greedy(engine_of(model)) == [hf_greedy(reference, prompt, 40) for prompt in PROMPTS]


def test_experts_without_a_token():
    """Router rows that are multiples of one another leave the middle experts to nobody; their weights are not read."""
    model = tm.qwen3_moe()
    for mlp in sparse_mlps(model):
        mlp.gate.weight.data[:] = mlp.gate.weight.data[0] * torch.arange(1, 9)[:, None]
    reference = tm.unshared(model)
    for mlp in sparse_mlps(model):
        mlp.experts.gate_up_proj.data[3:5] = mlp.experts.down_proj.data[3:5] = float("nan")
    assert greedy(engine_of(model)) == [hf_greedy(reference, prompt, 40) for prompt in PROMPTS]


def test_walker_is_chosen_by_the_config_and_refuses_what_it_does_not_compute():
    assert walker_class_of(tm.qwen3_moe()) is FlexMoEInference
    with pytest.raises(ValueError, match="hidden_act 'gelu' is not silu"):
        FlexMoEInference(tm.qwen3_moe(hidden_act="gelu"))


def test_weights_that_the_trainer_moves_are_followed():
    model = tm.qwen3_moe()
    engine = engine_of(model)
    before = engine_last_logits(engine, PROMPTS)
    addresses = [layer.mlp.experts.down_ECI.data_ptr() for layer in engine.walker.layers if hasattr(layer.mlp, "experts")]
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1
    engine.refresh_lora()
    assert addresses == [layer.mlp.experts.down_ECI.data_ptr() for layer in engine.walker.layers if hasattr(layer.mlp, "experts")]
    assert (engine_last_logits(engine, PROMPTS) - before).abs().max() > 1e-2
    assert_serves(engine, model)


# ----------------------------------------------------------------------------------------------------------------------- LoRA


def adapt(model, name="default", seed=0, **options) -> PeftModel:
    """LoRA on attention, both stacks and nothing else, unless `options` of LoraConfig say otherwise."""
    return tm.adapted(model, name, seed, **{"target_modules": list(la.ATTENTION_TARGETS), "target_parameters": STACKS, **options})


TARGETS = {
    "experts and attention": {},
    "experts": dict(target_modules=[]),
    "down_proj": dict(target_parameters=["down_proj"], target_modules=[]),
    "gate_up_proj": dict(target_parameters=["gate_up_proj"], target_modules=[]),
    "router": dict(target_parameters=["gate.weight"]),
    "router and experts": dict(target_parameters=["gate.weight", *STACKS]),
    "rslora": dict(use_rslora=True),
    "ranks": dict(r=3, rank_pattern={r".*\.gate_up_proj": 20}, alpha_pattern={r".*\.gate_up_proj": 5}),
    "one layer": dict(target_parameters=["layers.2.mlp.experts.down_proj"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_on_stacks_are_served(targets, mode):
    plain = trainer_logits(tm.qwen3_moe())
    adapted = adapt(tm.qwen3_moe(), **TARGETS[targets])
    expected = trainer_logits(adapted)
    assert (expected - plain).abs().max() > 0.1
    engine = engine_of(adapted, lora_mode=mode)
    torch.testing.assert_close(engine_last_logits(engine, PROMPTS), expected, **NEAR)
    assert greedy(engine, PROMPTS[:2], 16) == [hf_greedy(adapted, prompt, 16) for prompt in PROMPTS[:2]]


def test_the_other_reading_of_b_is_far_off(monkeypatch):
    """PEFT's B is [rows, r * E] with its second axis (r, E); read as (E, r) it is another adapter altogether."""
    adapted = adapt(tm.qwen3_moe())
    expected = trainer_logits(adapted)

    def misread(delta):
        left, right = (linear.weight.data for linear in delta.linears)
        experts = flex_lora.num_experts(delta.layer)
        if experts == 1:
            return left, right
        return left.unflatten(1, (experts, -1)).permute(1, 0, 2), right.unflatten(0, (experts, -1))

    monkeypatch.setattr(flex_lora.Delta, "factors", misread)
    assert (engine_last_logits(engine_of(adapted), PROMPTS) - expected).abs().max() > 0.5


@pytest.mark.parametrize("mode", MODES)
def test_refresh_keeps_addresses_and_follows_the_adapter(mode):
    adapted = adapt(tm.qwen3_moe())
    engine = engine_of(adapted, lora_mode=mode)
    addresses = [tensor.data_ptr() for tensor in engine.walker.adapters.written()]
    before = engine_last_logits(engine, PROMPTS)
    for _, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data += 0.05 * torch.randn_like(parameter)
    for _ in range(2):  # the scaling must not be applied twice
        engine.refresh_lora()
        assert_serves(engine, adapted)
    assert (engine_last_logits(engine, PROMPTS) - before).abs().max() > 0.05
    assert addresses == [tensor.data_ptr() for tensor in engine.walker.adapters.written()]
    with adapted.disable_adapter():
        engine.refresh_lora()
        assert_serves(engine, adapted)
    engine.refresh_lora()
    assert_serves(engine, adapted)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("mode", MODES)
def test_captured_graphs_follow_a_refresh(mode, compiled):
    adapted = adapt(tm.qwen3_moe(hidden_size=128, moe_intermediate_size=64, intermediate_size=128).to("cuda", torch.bfloat16))
    engine = engine_of(adapted, lora_mode=mode, compile_walker=compiled)
    assert engine.use_graphs
    before = greedy(engine)
    for _, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data += 0.1 * torch.randn_like(parameter)
    engine.refresh_lora()
    after = greedy(engine)
    assert after != before
    assert after == greedy(engine_of(adapted, lora_mode=mode, compile_walker=compiled))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_drifts(mode):
    report = lc.verify_no_drift(engine_of(adapt(tm.qwen3_moe()), lora_mode=mode), cycles=3, max_tokens=8)
    assert report.passed, report


def test_fresh_adapter_reaches_the_experts():
    fresh = la.fresh_adapter(tm.qwen3_moe(), rank=4)
    names = [name for name, _, kind in flex_lora.active_tensors(fresh) if kind == "ParamWrapper"]
    assert len(names) == 2 * 2 * 2  # A and B of two stacks in two sparse layers
    assert not any("mlp.gate." in name for name in names)
    assert_serves(engine_of(fresh.eval()), fresh)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no stacked experts"):
        la.fresh_adapter(tm.qwen3(), targets="experts")


@pytest.mark.parametrize("mode", MODES)
def test_several_active_adapters_are_summed(mode):
    adapted = adapt(tm.qwen3_moe())
    alone = trainer_logits(adapted)
    second = LoraConfig(r=6, lora_alpha=3, target_modules=[], target_parameters=STACKS, init_lora_weights=False)
    adapted.add_adapter("second", second)
    adapted.base_model.set_adapter(["default", "second"])
    for name, parameter in adapted.named_parameters():
        if ".second." in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    adapted.eval()
    assert (trainer_logits(adapted) - alone).abs().max() > 0.05
    assert_serves(engine_of(adapted, lora_mode=mode), adapted)


def test_every_tensor_is_read_or_named():
    class WithoutExpertAdapters(FlexMoEInference):
        def sparse_mlp(self, mlp):
            mlp_base = mlp.experts.get_base_layer()
            return qwen3_moe_flex.SparseMLP(
                self.projection(mlp.gate), flex_lora.Experts(mlp_base.gate_up_proj.data, mlp_base.down_proj.data), 3, True
            )

    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.\S*lora_A\.default\.weight \(ParamWrapper\).*and 4 more"):
        WithoutExpertAdapters(adapt(tm.qwen3_moe()))
    merged = adapt(tm.qwen3_moe())
    merged.merge_adapter()
    with pytest.raises(ValueError, match="adapter default is merged into the base weight"):
        FlexMoEInference(merged)


def test_merged_experts_stay_within_their_bound(monkeypatch):
    adapted = adapt(tm.qwen3_moe())
    sizes = [p.numel() for name, p in tm.qwen3_moe().named_parameters() if name.endswith(tuple(STACKS))]
    assert flex_lora.merged_experts_gb(adapted, torch.float32) == pytest.approx(4 * sum(sizes) / 1e9)
    assert engine_of(adapted).walker.adapters.mode == "merged"
    monkeypatch.setattr(flex_lora, "MAX_MERGED_EXPERTS_GB", 3.9 * sum(sizes) / 1e9)
    with pytest.raises(ValueError, match="a second copy of the adapted experts takes .* use --lora_mode active"):
        FlexMoEInference(adapted, lora_mode="merged")
    engine = engine_of(adapted)
    assert engine.walker.adapters.mode == "active"
    assert_serves(engine, adapted)
    attention_only = adapt(tm.qwen3_moe(), target_parameters=None)
    assert engine_of(attention_only).walker.adapters.mode == "merged"


# ------------------------------------------------------------------------------------------------------------ adapters on disk


def per_expert_adapter(folder, ranks=lambda expert, projection: 4, config=None, skip=()) -> dict[str, torch.Tensor]:
    """An adapter that names each expert's projections, as tools write it that know experts as linears."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    shapes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    for layer in (0, 2):
        for expert in range(8):
            for projection, (rows, columns) in shapes.items():
                if (expert, projection) in skip:
                    continue
                rank = ranks(expert, projection)
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}"
                tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn(rank, columns, generator=generator)
                tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(rows, rank, generator=generator)
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn(4, 64, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(128, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    chosen = dict(peft_type="LORA", r=4, lora_alpha=8, target_modules=["q_proj", *la.MLP_TARGETS], task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(chosen | (config or {})))
    return tensors


@torch.no_grad()
def merged_by_hand(tensors, scaling) -> torch.nn.Module:
    model = tm.qwen3_moe()
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        path, delta = name.removeprefix("base_model.model.").split(".lora_A")[0], None
        rank = len(a)
        delta = scaling(path, rank) * tensors[name.replace("lora_A", "lora_B")] @ a
        if ".experts." not in path:
            model.get_submodule(path).weight += delta
            continue
        experts, expert, projection = path.rsplit(".", 2)
        stack = getattr(model.get_submodule(experts), "down_proj" if projection == "down_proj" else "gate_up_proj")[int(expert)]
        (stack[48:] if projection == "up_proj" else stack[: len(delta)]).add_(delta)
    return model


def plain_scaling(path, rank):
    return 8 / rank


PER_EXPERT = {
    "plain": ({}, {}, plain_scaling),
    "rslora": ({}, dict(use_rslora=True), lambda path, rank: 8 / math.sqrt(rank)),
    "ranks of their own": (dict(ranks=lambda e, p: 2 + e % 3 if p != "up_proj" else 7), {}, plain_scaling),
    "some left out": (
        dict(skip={(3, "gate_proj"), (5, "up_proj"), (6, "down_proj"), (6, "gate_proj"), (6, "up_proj")}), {}, plain_scaling,
    ),
    "alpha pattern": ({}, dict(alpha_pattern={"up_proj": 2}), lambda path, rank: (2 if path.endswith("up_proj") else 8) / rank),
    "all-linear": ({}, dict(target_modules="all-linear"), plain_scaling),
}


@pytest.mark.parametrize("prefix", ["", "model.", "base_model.model.base_model.model.model."])
def test_adapters_of_single_experts_under_other_prefixes(prefix, tmp_path):
    tensors = per_expert_adapter(tmp_path)
    renamed = {prefix + name.removeprefix("base_model.model.model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    loaded = la.load_adapter(tm.qwen3_moe(), tmp_path)
    torch.testing.assert_close(trainer_logits(loaded), trainer_logits(merged_by_hand(tensors, plain_scaling)), **NEAR)


@pytest.mark.parametrize("case", PER_EXPERT)
def test_adapters_of_single_experts_are_stacked(case, tmp_path):
    options, config, scaling = PER_EXPERT[case]
    tensors = per_expert_adapter(tmp_path, config=config, **options)
    loaded = la.load_adapter(tm.qwen3_moe(), tmp_path)
    expected = trainer_logits(merged_by_hand(tensors, scaling))
    torch.testing.assert_close(trainer_logits(loaded), expected, **NEAR)
    for mode in MODES:
        torch.testing.assert_close(engine_last_logits(engine_of(loaded, lora_mode=mode), PROMPTS), expected, **NEAR)


def test_adapters_of_single_experts_name_what_does_not_fit(tmp_path):
    tensors = per_expert_adapter(tmp_path)
    first, dense = (f"base_model.model.model.layers.{layer}.mlp.experts" for layer in (0, 1))

    def refused(match, added={}, dropped=None):
        altered = {name: tensor for name, tensor in (tensors | added).items() if name != dropped}
        save_file(altered, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=match):
            la.load_adapter(tm.qwen3_moe(), tmp_path)

    up = f"{first}.1.up_proj"
    refused(r"experts\.8\.up_proj\.lora_A\.weight has no place", {f"{first}.8.up_proj.lora_A.weight": torch.ones(4, 64)})
    refused(r"experts\.1\.up_proj\.lora_B\.weight is not in the file", dropped=f"{up}.lora_B.weight")
    refused(r"experts\.1\.up_proj\.lora_B\.weight has no place", dropped=f"{up}.lora_A.weight")
    refused(r"experts\.1\.up_proj\.lora_A\.weight: shapes", {f"{up}.lora_A.weight": torch.ones(4, 60)})
    refused(r"experts\.1\.up_proj\.lora_magnitude", {f"{up}.lora_magnitude_vector": torch.ones(48)})
    refused(r"layers\.1\.mlp\.experts\.0\.up_proj\.lora_A", {f"{dense}.0.up_proj.lora_A.weight": torch.ones(4, 64)})


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "model.base_model.model."])
def test_stacked_adapters_round_trip(prefix, tmp_path):
    adapted = adapt(tm.qwen3_moe())
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({prefix + name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}, path)
    loaded = la.load_adapter(tm.qwen3_moe(), tmp_path)
    torch.testing.assert_close(trainer_logits(loaded), trainer_logits(adapted))
    dropped = next(name for name in tensors if "experts" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, path)
    with pytest.raises(ValueError, match="is not in the file"):
        la.load_adapter(tm.qwen3_moe(), tmp_path)


# ------------------------------------------------------------------------------------------------------------ compiled walker


@pytest.mark.parametrize("mode, opts", [("walker", "stock"), ("walker_fullgraph", "inference_freeze")])
def test_compiled_walker_gives_the_same_tokens(mode, opts):
    torch._dynamo.reset()
    model = tm.qwen3_moe()
    expected = [hf_greedy(tm.unshared(model), prompt, 12) for prompt in PROMPTS]
    engine = engine_of(model, compile_walker=mode, compile_opts=opts)
    torch._dynamo.utils.counters.clear()
    assert [greedy(engine, PROMPTS[:n], 12) for n in (4, 2, 1)] == [expected[:n] for n in (4, 2, 1)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # for every bucket
    if opts == "inference_freeze":
        with pytest.raises(ValueError, match="inference_freeze bakes the weights in, so no refresh reaches them"):
            engine.refresh_lora()


def test_compiled_walker_follows_an_active_adapter():
    torch._dynamo.reset()
    adapted = adapt(tm.qwen3_moe())
    engine = engine_of(adapted, lora_mode="active", compile_walker=True)
    assert_serves(engine, adapted)
    for _, parameter, _ in flex_lora.active_tensors(adapted):
        parameter.data *= 1.5
    engine.refresh_lora()
    assert_serves(engine, adapted)


def test_compile_mode_comes_from_the_argument_or_the_environment(monkeypatch):
    assert FlexMoEInference(tm.qwen3_moe()).compile_mode == "off"
    monkeypatch.setenv(COMPILE_VARIABLE, "1")
    assert FlexMoEInference(tm.qwen3_moe()).compile_mode == "walker_fullgraph"
    assert FlexMoEInference(tm.qwen3_moe(), compile_walker=False).compile_mode == "off"
    monkeypatch.setenv(COMPILE_VARIABLE, "fast")
    with pytest.raises(ValueError, match="UNSLOTH_FLEX_COMPILE_WALKER must be 0, 1 or one of off, walker, walker_fullgraph, not 'fast'"):
        FlexMoEInference(tm.qwen3_moe())
    with pytest.raises(ValueError, match="compile_opts must be one of stock"):
        FlexMoEInference(tm.qwen3_moe(), compile_walker=True, compile_opts="O9")


def test_compile_flags_that_contradict_others_are_refused(tmp_path):
    flags = ["--model_name=qwen3-moe-tiny", "--load_format=dummy", "--n_prompts=1", f"--stats_path={tmp_path}/stats.json"]
    with pytest.raises(SystemExit, match="--compile_mode compiles a written walker"):
        qwen3_moe_flex.main([*flags, "--walker=hf", "--compile_mode=walker"])
    with pytest.raises(SystemExit, match="--verify_no_drift refreshes the weights, and --compile_opts inference_freeze"):
        qwen3_moe_flex.main([*flags, "--verify_no_drift", "--compile_mode=walker", "--compile_opts=inference_freeze"])


# ---------------------------------------------------------------------------------------------------------- bandwidth's floor


@pytest.mark.parametrize("adapter", [None, "active"])
def test_the_floor_counts_the_experts_that_are_hit(adapter):
    model = tm.qwen3_moe() if adapter is None else adapt(tm.qwen3_moe())
    seen = []
    for mlp in sparse_mlps(model.get_base_model() if adapter else model):
        mlp.gate.register_forward_hook(lambda module, inputs, output: seen.append(output[2][-1]))
    with torch.no_grad():
        for prompt in PROMPTS:
            model(input_ids=torch.tensor([prompt]))
    hit = [len(set(torch.cat(seen[layer::2]).tolist())) for layer in (0, 1)]
    assert all(3 < count < 8 for count in hit)
    engine = engine_of(model, lora_mode=adapter)
    low_rank = 16 * (64 + 96 + 48 + 64) if adapter else 0
    reads = expert_reads_of(engine, PROMPTS)
    assert reads == [4 * count * (3 * 48 * 64 + low_rank) for count in hit]
    difference = decode_step_bytes(engine, 4, 40) - decode_step_bytes(engine, 4, 40, reads)
    stacks = 2 * 8 * 4 * (3 * 48 * 64 + (4 * (64 + 96 + 48 + 64) if adapter else 0))
    assert difference == stacks - sum(reads)
    profiled = profile_decode_step(engine, 4, 40, steps=2)
    everything = decode_step_bytes(engine, 4, 40, [8 * 4 * (3 * 48 * 64 + low_rank)] * 2)
    assert decode_step_bytes(engine, 4, 40, [0]) < profiled.step_bytes <= everything


def test_dense_models_have_no_experts_to_count():
    engine = FlexEngine(Qwen3Walker(tm.qwen3()), config=EngineConfig(max_batch_size=4, max_seq_len=96, page_size=16))
    assert expert_reads_of(engine, PROMPTS[:2]) == []


# -------------------------------------------------------------------------------------------------------------------- 4 bits

NF4_SIZES = dict(hidden_size=128, moe_intermediate_size=64, intermediate_size=128)  # whole blocks of 64


def four_bit(**overrides) -> torch.nn.Module:
    return quantize_nf4(tm.qwen3_moe(**NF4_SIZES, **overrides), torch.float32)


def test_4bit_experts_are_served_and_dequantized_for_the_reference():
    model = four_bit()
    kinds = {type(layer.mlp.experts).__name__ for layer in model.model.layers if hasattr(layer.mlp, "experts")}
    assert kinds == {"NF4Experts"}
    reference = Reference.of(model)
    assert {type(mlp.experts).__name__ for mlp in sparse_mlps(reference.exact)} == {"Qwen3MoeExperts"}
    changed = (trainer_logits(reference.exact) - trainer_logits(tm.qwen3_moe(**NF4_SIZES))).abs().max()
    assert changed > 0.05
    engine = engine_of(model)
    assert_serves(engine, reference.exact, atol=1e-3, rtol=1e-3)
    assert verify(engine, reference, PROMPTS, 12).passed
    codes = [buffer.data_ptr() for mlp in sparse_mlps(model) for buffer in mlp.experts.buffers()]
    banks = [layer.mlp.experts for layer in engine.walker.layers if hasattr(layer.mlp, "experts")]
    assert codes == [t.data_ptr() for b in banks for w in (b.gate_up_EIC, b.down_ECI) for t in (w.codes_EGNW, w.scales_EGN)]


def test_4bit_base_with_lora_on_attention():
    adapted = adapt(four_bit(), target_parameters=None)
    engine = engine_of(adapted)
    assert engine.walker.adapters.mode == "active"
    assert_serves(engine, adapted, atol=1e-3, rtol=1e-3)
    loss = adapted(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for name, p in adapted.named_parameters() if "lora_" in name)


def test_expert_adapters_over_4bit_experts_are_refused(tmp_path):
    per_expert_adapter(tmp_path)
    with pytest.raises(ValueError, match=r"experts\.0\.\w+_proj\.lora_A\.weight has no place in the model"):
        la.load_adapter(four_bit(), tmp_path)
    adapt(tm.qwen3_moe(**NF4_SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"experts\.\S*lora_A\.weight.* has no place in the model"):
        la.load_adapter(four_bit(), tmp_path)


def test_4bit_dummy_and_host_loading(tmp_path):
    config = tm.qwen3_moe(**NF4_SIZES).config
    dummy = dummy_model(config, torch.float32, torch.device("cpu"), seed=0, four_bit=True)
    plain = dummy_model(config, torch.float32, torch.device("cpu"), seed=0)
    assert {name: p.shape for name, p in dummy.named_parameters() if "norm" in name} == {
        name: p.shape for name, p in plain.named_parameters() if "norm" in name
    }
    torch.testing.assert_close(dummy.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert dummy.lm_head.weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert_serves(engine_of(dummy), dummy, atol=1e-3, rtol=1e-3)
    model = tm.qwen3_moe(**NF4_SIZES)
    model.save_pretrained(tmp_path)
    loaded = load_4bit(str(tmp_path), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(trainer_logits(loaded), trainer_logits(four_bit()))


# ------------------------------------------------------------------------------------------------------- parity and benches


@pytest.mark.parametrize("base", ["16-bit", "4-bit"])
def test_a_cast_model_computes_what_a_cast_copy_does(base):
    model = tm.qwen3_moe(**NF4_SIZES).to(torch.bfloat16)
    model = quantize_nf4(model, torch.bfloat16) if base == "4-bit" else model
    copies = Reference.of(model)
    before = lc.fingerprint([*model.named_parameters(), *model.named_buffers()])
    in_place = Reference.in_place(model)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        torch.testing.assert_close(in_place.exact(input_ids=ids).logits, copies.exact(input_ids=ids).logits)
        torch.testing.assert_close(in_place.plain(input_ids=ids).logits, copies.plain(input_ids=ids).logits)
    assert lc.fingerprint([*model.named_parameters(), *model.named_buffers()]) == before
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("compiled", ["0", "1"])
@pytest.mark.parametrize("flags", [["--dtype=bfloat16"], ["--dtype=bfloat16", "--load_in_4bit"], ["--dtype=float32"]], ids=str)
def test_parity(flags, compiled, monkeypatch, capsys):
    torch._dynamo.reset()
    monkeypatch.setenv("FLEX_MOE_COMPILE_WALKER", compiled)
    assert flex_moe_parity.main(["--model_name=qwen3-moe-tiny", "--load_format=dummy", *flags]) == 0
    printed = capsys.readouterr()
    assert f"compiled walker: {'walker_fullgraph' if compiled == '1' else 'off'}" in printed.err
    assert "3 prompts, 96 greedy tokens" in printed.out


def test_parity_fails_where_the_engine_computes_something_else(monkeypatch):
    monkeypatch.setattr(qwen3_moe_flex, "route", lambda logits_TE, top_k, normalize: flex_moe.route(logits_TE, top_k, not normalize))
    for dtype in ("float32", "bfloat16"):
        assert flex_moe_parity.main(["--model_name=qwen3-moe-tiny", "--load_format=dummy", f"--dtype={dtype}"]) == 1


def test_verification_takes_the_tiny_model_without_a_hub(monkeypatch, capsys):
    args = argparse.Namespace(model_name=None, default_model="nobody/has-this", cpu_model="qwen3-moe-tiny", load_format="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flex_models.resolve_model_name(copy := argparse.Namespace(**vars(args)))
    assert (copy.model_name, copy.load_format) == ("nobody/has-this", "auto")  # an inference script would say that it can't be had
    flex_models.resolve_model_name(args, small_without_hub=True)
    assert (args.model_name, args.load_format) == ("qwen3-moe-tiny", "dummy")
    assert "The model hub can't be reached: using random weights of qwen3-moe-tiny" in capsys.readouterr().err


def test_verification_of_the_first_layers(capsys):
    flags = ["--model_name=qwen3-moe-tiny", "--load_format=dummy", "--dtype=float32", "--n_prompts=4", "--max_new_tokens=16"]
    assert verify_qwen3_moe_numerics.main([*flags, "--num_layers=2"]) == 0
    with pytest.raises(SystemExit, match="--num_layers 5: the model has 4"):
        verify_qwen3_moe_numerics.main([*flags, "--num_layers=5"])


@pytest.mark.parametrize("mode", MODES)
def test_verification_with_an_adapter_on_attention_and_experts(mode, tmp_path):
    common = ["--model_name=qwen3-moe-tiny"]
    assert make_lora_adapter.main([*common, "--lora_rank=8", f"--output={tmp_path}"]) == 0
    flags = ["--load_format=dummy", "--dtype=float32", "--n_prompts=4", "--max_new_tokens=16", f"--lora_adapter={tmp_path}"]
    assert verify_qwen3_moe_numerics.main([*common, *flags, f"--lora_mode={mode}"]) == 0


def test_micro_bench_shows_a_row_and_a_sample_for_each_batch(tmp_path, capsys):
    flags = ["--model_name=qwen3-moe-tiny", "--load_format=dummy", "--batch_sizes=1,3", "--max_new_tokens=4", "--n_rounds=1"]
    assert flex_moe_micro_bench.main([*flags, f"--stats_path={tmp_path}/stats.json"]) == 0
    printed = capsys.readouterr()
    assert [line.split(" | ")[0] for line in printed.out.splitlines()[2:4]] == ["| 1", "| 3"]
    assert "batch 3: " in printed.err and "a sample: " in printed.err
    assert len(json.loads((tmp_path / "stats.json").read_text())) == 2
    with pytest.raises(SystemExit, match="--verify_no_drift"):
        flex_moe_micro_bench.main([*flags, "--verify_no_drift", f"--stats_path={tmp_path}/stats.json"])


@pytest.mark.parametrize("backend", ["flex", "hf_naive"])
@pytest.mark.parametrize("four_bit", [[], ["--load_in_4bit"]], ids=["16-bit", "4-bit"])
def test_bench_measures_both_backends(backend, four_bit, tmp_path, capsys):
    path = tmp_path / "rows.json"
    flags = ["--batch_sizes=2", "--max_new_tokens=3", "--prompt_tokens=5", "--n_rounds=1", f"--json={path}", *four_bit]
    assert flex_moe_bench.main([f"--backend={backend}", "--model_name=qwen3-moe-tiny", *flags]) == 0
    assert [row["batch"] for row in json.loads(path.read_text())] == [2]
    assert f"| {backend}" in capsys.readouterr().out


def test_bench_imports_nothing_of_this_project_for_transformers(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\nimport flex_moe_bench\n"
        "assert flex_moe_bench.main(['--backend=hf_naive', '--model_name=qwen3-moe-tiny', '--batch_sizes=1', '--max_new_tokens=2', "
        "'--n_rounds=1']) == 0\n"
        f"own = {{path.stem for path in __import__('pathlib').Path({str(SCRIPTS)!r}).glob('*.py')}}\n"
        "assert not own & set(sys.modules), own & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | {"HF_ATTN_IMPL": "eager"})
    assert done.returncode == 0, done.stderr
    assert "attention eager" in done.stdout


def test_bench_quotes_failures(monkeypatch, capsys):
    monkeypatch.setenv("HF_ATTN_IMPL", "flash_attention_2")
    if importlib.util.find_spec("flash_attn") is None and not torch.cuda.is_available():
        assert flex_moe_bench.main(["--backend=hf_naive", "--model_name=qwen3-moe-tiny"]) == 1
        assert "hf_naive: ImportError: FlashAttention2" in capsys.readouterr().out
    monkeypatch.setenv("HF_ATTN_IMPL", "fastest")
    with pytest.raises(SystemExit, match="HF_ATTN_IMPL must be one of eager, sdpa"):
        flex_moe_bench.main(["--backend=hf_naive", "--model_name=qwen3-moe-tiny"])
    with pytest.raises(SystemExit, match="--model_name nowhere"):
        flex_moe_bench.main(["--model_name=nowhere"])


def test_another_model_is_refused_before_its_weights_are_made(monkeypatch, tmp_path):
    monkeypatch.setattr(flex_cli, "load_model", lambda args: pytest.fail("loaded"))
    with pytest.raises(SystemExit, match="walks qwen3_moe, not qwen3; use --walker hf"):
        qwen3_moe_flex.main(["--load_format", "dummy", "--model_name", "qwen3-0.6b", "--stats_path", str(tmp_path / "x.json")])
