"""Gemma-4 against Hugging Face: tokens, layers and windows, shared keys, variants, LoRA and 4-bit, and the scripts."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.bnb import Linear4bit

import gemma4_flex_inference
import lora_checks
import tiny_models
import verify_gemma4_numerics
from conftest import SCRIPTS
from flex_engine import Attend, DecodeBatch, EngineConfig, FlexEngine, HFWalker, PagedKVCache, SamplingParams
from flex_nf4 import load_4bit, quantize_nf4
from flex_paged_attention import TritonAttention, for_head_size
from gemma4_flex_inference import Gemma4Walker, text_model
from lora_adapters import LINEAR_TARGETS, load_adapter
from numerics import LogitError, engine_last_logits, hf_greedy, hf_logits, shuffle_free_pages
from qwen3_flex_inference import Qwen3Walker
from tiny_models import VOCAB, gemma4, gemma4_multimodal, random_prompts, unshared
from written_walkers import walker_class_of

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE, NEW, WINDOW = 16, 40, 24
LENGTHS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 70, 130]  # the last two several windows long
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)


def make_engine(walker, num_pages: int | None = None, **config) -> FlexEngine:
    config = {"max_batch_size": 8, "max_seq_len": 180, "page_size": PAGE, **config}
    if num_pages is not None:
        page_bytes = PAGE * PagedKVCache.bytes_per_token(walker.specs, walker.dtype)
        config["kv_memory_gb"] = (num_pages + 0.5) * page_bytes / 1e9
    engine = FlexEngine(walker, None, EngineConfig(**config))
    shuffle_free_pages(engine)
    return engine


def tokens_of(engine: FlexEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.token_ids for output in engine.generate(prompts, params) for completion in output.outputs]


def greedy_of(model, prompts: list[list[int]]) -> list[list[int]]:
    """Hugging Face's tokens; varied, or they would prove nothing."""
    tokens = [hf_greedy(model, prompt, NEW) for prompt in prompts]
    assert all(len(set(completion)) >= 16 for completion in tokens)
    return tokens


def last_logits(model, prompts: list[list[int]]) -> torch.Tensor:
    return torch.cat([hf_logits(model, prompt, [0]) for prompt in prompts])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def reference():
    """Never walked, so its weights are nobody else's."""
    return gemma4(seed=1)


@pytest.fixture(scope="module")
def expected(reference, prompts) -> list[list[int]]:
    return greedy_of(reference, prompts)


@pytest.fixture
def model(reference):
    return unshared(reference)


# ------------------------------------------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("walker", [Gemma4Walker, HFWalker])
def test_tokens_equal_hugging_face(model, prompts, expected, walker):
    """Mixed lengths around and past several windows, in a padded bucket and over up to 11 shuffled pages."""
    engine = make_engine(walker(model), steps_per_look=3)
    assert tokens_of(engine, prompts) == expected
    assert tokens_of(engine, prompts[5:6]) == expected[5:6]


VARIANTS = {
    "values are keys": dict(attention_k_eq_v=True, num_global_key_value_heads=2, num_key_value_heads=4),
    "no embedding per layer": dict(hidden_size_per_layer_input=0),
    "nothing shared": dict(num_kv_shared_layers=0),
    "biases": dict(attention_bias=True),
    "no cap": dict(final_logit_softcapping=None),
    "tied": dict(tie_word_embeddings=True),
    "images would be seen both ways": dict(use_bidirectional_attention="vision"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, prompts):
    model = gemma4(seed=2, **VARIANTS[variant])
    reference, engine = unshared(model), make_engine(Gemma4Walker(model))
    torch.testing.assert_close(engine_last_logits(engine, prompts), last_logits(reference, prompts), atol=1e-4, rtol=1e-4)
    if variant != "tied":  # which repeats itself
        assert tokens_of(engine, prompts[4:6]) == greedy_of(reference, prompts[4:6])


@pytest.mark.parametrize("build", [gemma4, *(functools.partial(gemma4, **variant) for variant in VARIANTS.values())])
def test_specs_are_what_hugging_face_passes_to_its_attention(build):
    model = build()
    assert Gemma4Walker(model).specs == HFWalker(model).specs


def test_what_the_specs_say(model):
    specs = Gemma4Walker(model).specs
    assert [(spec.head_dim, spec.window, spec.store_layer) for spec in specs] == [
        (32, WINDOW, None), (64, None, None), (32, WINDOW, None), (64, None, None), (32, WINDOW, 2), (64, None, 3),
    ]  # fmt: skip
    assert {spec.scale for spec in specs} == {1.0}


class Recording:
    """An Attend that keeps what each layer gave it and got back."""

    def __init__(self, attend: Attend):
        self.attend, self.prefill, self.seen = attend, attend.prefill, []

    def __call__(self, layer, qkv_TE, *args, **options):
        out_TE = self.attend(layer, qkv_TE, *args, **options)
        self.seen.append((layer, qkv_TE, out_TE))
        return out_TE


def test_layer_by_layer(model, reference, prompts):
    """Each layer's raw q, k, v and its attention's output, on the last position of every prompt."""
    hooked: dict[tuple[int, str], list[torch.Tensor]] = {}
    handles = []
    for index, layer in enumerate(reference.model.layers):
        for name, module in layer.self_attn.named_children():

            def keep(module, args, out, key=(index, name)):
                hooked.setdefault(key, []).append((args[0] if key[1] == "o_proj" else out)[0, -1])

            handles.append(module.register_forward_hook(keep))
    expected = last_logits(reference, prompts)
    for handle in handles:
        handle.remove()

    engine, recorded = make_engine(Gemma4Walker(model)), []
    forward = engine.walker.forward

    def record(tokens_T, positions_T, attend):
        recorded.append(Recording(attend))
        return forward(tokens_T, positions_T, recorded[-1])

    engine.walker.forward = record
    torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=2e-5, rtol=1e-5)
    prefill, decode = recorded
    assert [layer for layer, *_ in prefill.seen] == [0, 1, 2, 3], "a prefill ends with the last layer that stores"
    for layer, qkv_TE, out_TE in decode.seen:
        parts = [torch.stack(hooked[layer, name]) for name in ("q_proj", "k_proj", "v_proj") if (layer, name) in hooked]
        assert len(parts) == (3 if layer < 4 else 1)
        torch.testing.assert_close(qkv_TE[: len(prompts)], torch.cat(parts, dim=-1), atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(out_TE[: len(prompts)], torch.stack(hooked[layer, "o_proj"]), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("walker", [Gemma4Walker, HFWalker])
def test_the_window(model, reference, prompts, walker):
    """One key more or less in the sliding layers shows from the first length that it touches, and in the shared layers too."""
    expected, engine = last_logits(reference, prompts), make_engine(walker(model))
    torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=2e-5, rtol=1e-5)
    specs = engine.walker.specs
    for window, first_wrong in ((WINDOW - 1, WINDOW), (WINDOW + 1, WINDOW + 1), (None, WINDOW + 1)):
        engine.cache.specs = [dataclasses.replace(spec, window=window if spec.window else None) for spec in specs]
        wrong = (engine_last_logits(engine, prompts) - expected).abs().amax(-1) > 1e-3
        assert wrong.tolist() == [length >= first_wrong for length in LENGTHS]


def test_how_many_keys_a_row_sees():
    """Length 16, window 4. Scores are equal, so attention is the mean of the values that are seen, and those are positions."""
    length, counts = 16, [1, 2, 3] + [4] * 13
    engine = make_engine(Gemma4Walker(gemma4(sliding_window=4)))
    walker, cache, backend = engine.walker, engine.cache, engine.backend
    pages = cache.pages.allocate(1)
    values = torch.arange(length, dtype=torch.float32)[:, None, None].expand(length, 1, 32)
    cache.layers[0][0][:, cache.token_slots(pages, length)] = 0
    cache.layers[0][1][:, cache.token_slots(pages, length)] = values.transpose(0, 1)
    table = torch.zeros(length, cache.page_table.shape[1], dtype=torch.int32)
    table[:, 0] = pages[0]
    batch = DecodeBatch.of(torch.arange(length), table, PAGE)
    q_BHD = torch.zeros(length, 4, 32)
    o_BHD = backend.decode(q_BHD, *cache.layers[0], walker.specs[0], backend.plan(cache, batch))
    means = [sum(range(row - count + 1, row + 1)) / count for row, count in enumerate(counts)]
    torch.testing.assert_close(o_BHD[:, 0, 0], torch.tensor(means))
    cache.pages.release(pages)


def test_reference_without_a_cache(reference, prompts):
    """transformers before `shared_kv_states` gave another answer here; where it does not, HFWalker, which runs without, is right."""
    for prompt in prompts[3:6]:
        without = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(without, hf_logits(reference, prompt, [0])[0], atol=2e-5, rtol=1e-5)


def test_bfloat16_is_as_near_as_hugging_face(prompts):
    """Scales rounded as Hugging Face rounds them, norms in its order."""
    model = gemma4(seed=1)
    for parameter in (*model.parameters(), *(layer.layer_scalar for layer in model.model.layers)):
        parameter.data = parameter.data.bfloat16()
    exact = last_logits(unshared(model).float(), prompts)
    own = LogitError.between(engine_last_logits(make_engine(Gemma4Walker(model)), prompts), exact)
    plain = LogitError.between(last_logits(unshared(model), prompts), exact)
    assert own.mean_abs < 1.1 * plain.mean_abs and own.max_abs < 1.5 * plain.max_abs


def test_caps_scalars_and_embeddings_matter_here(model, prompts):
    """What the identities above would not notice if it made no difference."""
    engine = make_engine(Gemma4Walker(model))
    right = engine_last_logits(engine, prompts[4:])
    assert 2 < right.abs().max() < 3, "the cap bites"

    def changes() -> bool:
        return (engine_last_logits(engine, prompts[4:]) - right).abs().max() > 1e-2

    walker = engine.walker
    for module in (walker.layers[1].scalar, walker.layers[5].layer_input.norm, walker.embed_inputs.weight, walker.input_norm):
        saved = module.clone()
        module.mul_(1.1)
        assert changes()
        module.copy_(saved)
    walker.config.final_logit_softcapping = None
    assert changes()


def test_ids_beyond_the_per_layer_vocabulary(prompts):
    """They have no embedding of their own in the layers; padding's serves, as Hugging Face does for images."""
    model = gemma4(seed=1, vocab_size_per_layer_input=VOCAB - 20)
    plain, decoder = unshared(model), unshared(model).model
    prompt = [5, VOCAB - 1, 7, VOCAB - 20, VOCAB - 21]
    ids = torch.tensor([prompt])
    known = ids.where(ids < VOCAB - 20, 0)
    embeds = decoder.embed_tokens(ids)
    own = decoder.get_per_layer_inputs(known, None)
    expected = plain(inputs_embeds=embeds, per_layer_inputs=own).logits[0, -1]
    engine = make_engine(Gemma4Walker(model))
    torch.testing.assert_close(engine_last_logits(engine, [prompt])[0], expected, atol=2e-5, rtol=1e-5)


REFUSED = {
    "enable_moe_block": dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    "use_bidirectional_attention 'all'": dict(use_bidirectional_attention="all"),
    "hidden_activation 'silu'": dict(hidden_activation="silu"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_refused_variants_are_named(field):
    with pytest.raises(ValueError, match=f"^{field}"):
        Gemma4Walker(gemma4(**REFUSED[field]))


def test_the_hf_walker_runs_experts_and_refuses_what_is_not_causal(prompts):
    model = gemma4(seed=1, **REFUSED["enable_moe_block"])
    expected = last_logits(unshared(model), prompts)
    torch.testing.assert_close(engine_last_logits(make_engine(HFWalker(model)), prompts), expected, atol=5e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="attends to later tokens too"):
        HFWalker(gemma4(use_bidirectional_attention="all"))


# ----------------------------------------------------------------------------------------------------------------- shared keys


def test_kernel_options_by_head_size():
    options = {"256": {"block_n": 64}, "512": {"block_n": 32, "num_warps": 8}}
    assert [for_head_size(options, size) for size in (256, 512, 128)] == [options["256"], options["512"], None]
    assert for_head_size({"block_n": 64}, 512) == {"block_n": 64} and for_head_size(None, 512) is None
    assert TritonAttention(options).decode_options is options
    with pytest.raises(ValueError, match="decode_kernel_options"):
        TritonAttention({"256": {"BLOCK_N": 64}})


def test_every_walker_is_found_by_its_model():
    assert walker_class_of(gemma4()) is walker_class_of(gemma4_multimodal()) is Gemma4Walker
    assert walker_class_of(tiny_models.llama()) is Qwen3Walker
    with pytest.raises(ValueError, match="no written walker takes gemma2; use --walker hf"):
        walker_class_of(tiny_models.gemma2())


def test_flex_backend(model, prompts, expected):
    """Two head sizes and two block masks in one step."""
    engine = make_engine(Gemma4Walker(model), max_batch_size=2, attention_backend="flex")
    assert tokens_of(engine, prompts[4:6]) == expected[4:6]


def test_sharing_layers_have_no_pages_of_their_own(model):
    engine = make_engine(Gemma4Walker(model))
    layers = engine.cache.layers
    assert [layer.data_ptr() for layer in layers[4:]] == [layers[2].data_ptr(), layers[3].data_ptr()]
    assert PagedKVCache.bytes_per_token(engine.walker.specs, torch.float32) == 2 * 4 * (2 * 32 + 2 * 64)


def test_shared_layers_attend_over_the_packed_keys_of_a_prefill(model, reference, prompts):
    """As an architecture needs whose sharing layers lie below storing ones: here they run though nothing asks for it."""
    engine, outputs = make_engine(Gemma4Walker(model)), {}
    engine.walker.last_storing = len(engine.walker.layers) - 1
    prefill = engine.backend.prefill

    def keep(q_THD, k_THD, v_THD, spec, plan):
        outputs[len(outputs)] = (k_THD, v_THD)
        return prefill(q_THD, k_THD, v_THD, spec, plan)

    engine.backend.prefill = keep
    torch.testing.assert_close(engine_last_logits(engine, prompts), last_logits(reference, prompts), atol=2e-5, rtol=1e-5)
    assert len(outputs) == 6
    assert outputs[4][0] is outputs[2][0] and outputs[5][1] is outputs[3][1]


def test_preemption_changes_nothing(model, prompts, expected):
    """A pool that holds little more than the longest sequence."""
    engine = make_engine(Gemma4Walker(model), num_pages=14, steps_per_look=5)
    assert tokens_of(engine, prompts) == expected
    assert engine.stats().preemptions > 0 and engine.stats().peak_pages_used <= 13


def test_completions_share_prompt_pages(model, prompts, expected):
    engine = make_engine(Gemma4Walker(model))
    greedy_three = dataclasses.replace(GREEDY, n=3)
    assert tokens_of(engine, prompts[5:], greedy_three) == [tokens for tokens in expected[5:] for _ in range(3)]
    assert engine.stats().prefill_tokens == 70 + 130
    sampled = SamplingParams(max_tokens=NEW, seed=3, n=4)
    first = tokens_of(engine, prompts[5:], sampled)
    assert len(set(map(tuple, first))) == 8
    tight = make_engine(Gemma4Walker(unshared(model)), num_pages=20, max_batch_size=3)
    assert tokens_of(tight, prompts[5:], sampled) == first


def test_padded_rows_write_only_to_page_0(model, prompts):
    engine = make_engine(Gemma4Walker(model))
    for layer in engine.cache.layers:
        layer.normal_()
    before = [layer.clone() for layer in engine.cache.layers]
    handed_out = set(engine.cache.pages.free[-30:])
    tokens_of(engine, prompts[:3])
    untouched = [page for page in range(1, engine.cache.num_pages) if page not in handed_out]
    for layer, old in zip(engine.cache.layers, before):
        pages, old_pages = (x.unflatten(2, (-1, PAGE)) for x in (layer, old))
        assert torch.equal(pages[:, :, untouched], old_pages[:, :, untouched])
        changed = (pages[:, :, 0] != old_pages[:, :, 0]).any((0, 1, 3))
        assert set(changed.nonzero().flatten().tolist()) == {0, *((len(prompt) - 1) % PAGE for prompt in prompts[:3])}


# -------------------------------------------------------------------------------------------------- the shell, and the trainer


def test_the_text_model_shares_every_weight_and_drops_the_towers(prompts):
    raw = gemma4_multimodal(seed=1)
    raw.generation_config.eos_token_id = [1, 106, 50]
    expected = last_logits(unshared(raw), prompts)
    text = text_model(raw)
    assert {id(p) for p in text.parameters()} < {id(p) for p in raw.parameters()}
    assert not any("tower" in name or "vision" in name or "audio" in name for name, _ in text.named_parameters())
    tower = weakref.ref(raw.model.vision_tower)
    del raw
    assert tower() is None
    torch.testing.assert_close(last_logits(text, prompts), expected, atol=2e-5, rtol=1e-5)
    engine = make_engine(Gemma4Walker(text))
    assert engine.eos_ids == [1, 50, 106]
    torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=2e-5, rtol=1e-5)
    assert text_model(text) is text


def test_every_end_of_sequence_id_stops(prompts):
    raw = gemma4_multimodal(seed=1)
    whole = tokens_of(make_engine(Gemma4Walker(text_model(unshared(raw)))), prompts[3:4])[0]
    raw.generation_config.eos_token_id = [1, whole[20], whole[9]]
    engine = make_engine(Gemma4Walker(text_model(raw)))
    completion = engine.generate(prompts[3:4], dataclasses.replace(GREEDY, ignore_eos=False))[0].outputs[0]
    first = min(whole.index(whole[20]), whole.index(whole[9]))
    assert completion.token_ids == whole[: first + 1] and completion.finish_reason == "stop"


def adapted(model, **options):
    """A LoRA that is not a no-op."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": list(LINEAR_TARGETS), "init_lora_weights": False, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**chosen)).eval()


LANGUAGE_LINEARS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj|.*per_layer_(model_projection|input_gate|projection)"


def train_step(model) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    ids = torch.tensor(random_prompts([40], seed=9))
    model.train()
    model(input_ids=ids, labels=ids, mm_token_type_ids=torch.zeros_like(ids)).loss.backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize("lora_mode", ["merged", "active"])
def test_lora_of_a_trainer_that_holds_the_whole_model(lora_mode, prompts):
    """k and v are adapted on storing layers alone, where they exist; the trainer's names run under `model.language_model`."""
    trainer = adapted(gemma4_multimodal(seed=1), target_modules=LANGUAGE_LINEARS)
    names = [name for name, _ in trainer.named_parameters() if "lora_A" in name]
    assert all("model.language_model." in name for name in names)
    assert sum("k_proj" in name for name in names) == 4 and sum("q_proj" in name for name in names) == 6
    engine = make_engine(Gemma4Walker(trainer, lora_mode=lora_mode))
    for step in range(2):
        before = engine_last_logits(engine, prompts)
        torch.testing.assert_close(before, last_logits(unshared(trainer), prompts), atol=1e-4, rtol=1e-4)
        train_step(trainer)
        engine.refresh_lora()
        assert (engine_last_logits(engine, prompts) - before).abs().max() > 0.05
    trained = last_logits(unshared(trainer), prompts)
    torch.testing.assert_close(engine_last_logits(engine, prompts), trained, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_the_whole_model_loads_onto_the_text_model(tmp_path, prompts):
    trainer = adapted(gemma4_multimodal(seed=1), exclude_modules=r".*_tower.*")
    trainer.save_pretrained(tmp_path)
    text = load_adapter(text_model(gemma4_multimodal(seed=1)), tmp_path)
    expected = last_logits(trainer, prompts)
    torch.testing.assert_close(engine_last_logits(make_engine(Gemma4Walker(text)), prompts), expected, atol=1e-4, rtol=1e-4)


def test_adapters_on_the_towers_are_refused_by_name():
    trainer = adapted(gemma4_multimodal(), target_modules=r".*vision_tower.*q_proj\.linear|.*language_model.*q_proj")
    with pytest.raises(ValueError, match="adapter tensors that this walker can't apply: .*vision_tower"):
        Gemma4Walker(trainer)


@pytest.mark.parametrize("lora_mode", ["merged", "active"])
def test_nothing_drifts(lora_mode, model):
    engine = make_engine(Gemma4Walker(adapted(model), lora_mode=lora_mode))
    report = lora_checks.verify_no_drift(engine, cycles=3)
    assert report.passed, report


def test_an_adapted_embedding_is_scaled_like_the_table(model, prompts):
    trainer = adapted(model, target_modules=["embed_tokens", "embed_tokens_per_layer", "q_proj"])
    expected = last_logits(unshared(trainer), prompts)
    for lora_mode in ("merged", "active"):
        engine = make_engine(Gemma4Walker(trainer, lora_mode=lora_mode))
        torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=1e-4, rtol=1e-4)


def test_4bit_with_lora(prompts):
    sizes = dict(intermediate_size=128, hidden_size_per_layer_input=64)  # rows of whole blocks
    raw = quantize_nf4(gemma4_multimodal(seed=1, **sizes), torch.float32)
    trainer = adapted(text_model(raw))
    assert type(trainer.get_base_model().model.layers[0].mlp.up_proj) is Linear4bit, "PEFT knows that the base is 4-bit"
    expected = last_logits(trainer, prompts)
    engine = make_engine(Gemma4Walker(trainer))
    assert engine.walker.adapters.mode == "active"
    torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=2e-4, rtol=1e-4)


def test_4bit_checkpoints(tmp_path, prompts):
    """Quantized while it loads, and quantized before: such checkpoints come without the tied output matrix."""
    sizes = dict(intermediate_size=128, hidden_size_per_layer_input=64, tie_word_embeddings=True)
    raw = gemma4_multimodal(seed=1, **sizes)
    raw.config.tie_word_embeddings = True
    raw.tie_weights()
    raw.save_pretrained(tmp_path / "plain")
    loaded = load_4bit(str(tmp_path / "plain"), torch.float32, torch.device("cpu"))
    loaded.save_pretrained(tmp_path / "quantized")
    expected = last_logits(loaded, prompts)
    again = load_4bit(str(tmp_path / "quantized"), torch.float32, torch.device("cpu"))
    for model in (loaded, again):
        engine = make_engine(Gemma4Walker(text_model(model)))
        torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=2e-4, rtol=1e-4)


def test_layer_scalars_are_followed(model, prompts):
    """They are buffers, and move as parameters do."""
    engine = make_engine(Gemma4Walker(model))
    addresses = [layer.scalar.data_ptr() for layer in engine.walker.layers]
    model.bfloat16().float()
    for layer in model.model.layers:
        layer.layer_scalar = torch.nn.Buffer(layer.layer_scalar * 1.5)
    engine.refresh_lora()
    assert [layer.scalar.data_ptr() for layer in engine.walker.layers] == addresses
    moved = gemma4(seed=1)
    moved.load_state_dict(model.state_dict())
    torch.testing.assert_close(engine_last_logits(engine, prompts), last_logits(moved, prompts), atol=1e-4, rtol=1e-4)


def test_packing_makes_no_second_copy():
    model = gemma4()
    Gemma4Walker(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())


# ----------------------------------------------------------------------------------------------------------------- the scripts


def test_verify_script(capsys):
    argv = ["--n_prompts", "2", "--max_new_tokens", "16"]
    if torch.cuda.is_available():
        argv += ["--model_name", "gemma-4-tiny", "--load_format", "dummy", "--dtype", "float32"]
    assert verify_gemma4_numerics.main(argv) == 0
    output = capsys.readouterr().out
    for row in ("engine - HF float32", "HF text - HF whole", "engine - HF whole", "PASS  tokens", "PASS  logprobs"):
        assert row in output


def test_verify_script_notices_a_wrong_walker(capsys, monkeypatch):
    monkeypatch.setattr(gemma4_flex_inference, "soft_cap", lambda logits, cap: logits)
    argv = ["--n_prompts", "2", "--max_new_tokens", "16", "--model_name", "gemma-4-tiny", "--load_format", "dummy"]
    assert verify_gemma4_numerics.main([*argv, "--dtype", "float32"]) == 1
    assert "FAIL  logprobs" in capsys.readouterr().out


def test_inference_script(tmp_path, capsys):
    stats = tmp_path / "stats.json"
    argv = ["--n_prompts", "2", "--max_new_tokens", "8", "--n_rounds", "1", "--stats_path", str(stats)]
    assert gemma4_flex_inference.main([*argv, "--model_name", "gemma-4-tiny", "--load_format", "dummy"]) == 0
    assert stats.exists() and "gemma-4-tiny" in capsys.readouterr().out


def test_transformers_without_gemma4(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name.endswith("gemma4") else find_spec(name, *args)
    )
    for main in (gemma4_flex_inference.main, verify_gemma4_numerics.main):
        with pytest.raises(SystemExit, match=r"^error: this transformers has no Gemma-4; pip install -U 'transformers>=5.5'$"):
            main([])


def test_other_scripts_need_neither_gemma4_nor_torchvision():
    """Importing them needs neither, and Gemma-4's classes need no torchvision."""
    code = """
import sys
class WithoutGemma4:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformers.models.gemma4"):
            raise ModuleNotFoundError(name)
sys.modules["torchvision"] = None
sys.meta_path.insert(0, WithoutGemma4())
import qwen3_flex_inference, verify_qwen3_numerics, gemma4_flex_inference, verify_gemma4_numerics
sys.meta_path.pop(0)
from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_core_names_no_architecture():
    core = "cli decode_attention engine kernels linear lora models nf4 paged_attention sampling weights".split()
    files = [*(f"flex_{name}.py" for name in core), "numerics.py", "lora_adapters.py"]
    assert not [name for name in files if "gemma4" in (SCRIPTS / name).read_text().lower()]


def test_preset_has_the_real_shapes():
    from flex_models import find_config

    config = find_config("unsloth/gemma-4-E2B-it")
    assert (config.num_hidden_layers, config.num_kv_shared_layers, config.hidden_size, config.vocab_size) == (35, 20, 1536, 262144)
    assert {config.per_layer_config[index].head_dim for index in range(35)} == {256, 512}
    with torch.device("meta"):
        from transformers import Gemma4ForCausalLM

        model = Gemma4ForCausalLM(config)
    assert 4.5e9 < sum(p.numel() for p in model.parameters()) < 5.2e9


COMPILE = """
import kernel_bench, torch
import flex_decode_attention as decode, flex_kernels as kernels, flex_linear as linear
from triton.runtime import driver
from triton.runtime.jit import JITFunction

driver.set_active(kernel_bench._CompileOnly(90))
run, compiled = JITFunction.run, []
def compile_only(self, *args, grid, warmup, **options):
    compiled.append(run(self, *args, grid=grid, warmup=True, **options))
    return compiled[-1]
JITFunction.run = compile_only
bf16, T, C = torch.bfloat16, 64, 1536
def x(*shape, dtype=bf16):
    return torch.empty(*shape, dtype=dtype)
for sums in (x(T, C), x(4, T, C, dtype=torch.float32)):
    kernels.norm_add_norm_triton(sums, x(C), 1e-6, x(T, C), x(C), x(1))
kernels.norm_add_norm_triton(x(T, 256), x(256), 1e-3, x(T, 256), scale=2**-0.5)
kernels.gelu_mul_triton(x(T, 256), x(T, 35, 256)[:, 3])
kernels.soft_cap_triton(x(T, 4096), 30.0)
linear.gate_up_gelu_triton(x(T, C), x(256, C))
lengths, table = torch.full((T,), 640, dtype=torch.int32), torch.zeros(T, 10, dtype=torch.int32)
index = torch.zeros(T, dtype=torch.int64)
for D, window in ((256, 512), (512, None)):
    pool, rope = x(1, 4096, D), x(640, D, dtype=torch.float32)
    for heads, pools in ((10, (pool, pool)), (8, (None, None))):
        qkv = x(T, heads * D)
        kernels.qk_norm_rope_store_triton(qkv, x(D), x(D), 1e-6, rope, rope, index, index, *pools, 8, norm_v=True)
    for shared in (None, decode.SharedPages(table, 64, 8)):
        plan = decode.decode_attention_plan_triton(lengths, 1, D, bf16, window, shared=shared)
        decode.paged_decode_attention_triton(x(T, 8, D), pool, pool, table, lengths, 64, 1.0, window, None, plan)
unrounded = {kernel.name for kernel in compiled if "fma.rn.bf16" in kernel.asm["ptx"]}
assert not unrounded, f"{unrounded} fuse a product of 16-bit values with a sum, so that it is not rounded"
"""


def test_kernels_compile_for_hopper_at_the_real_head_sizes():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=SCRIPTS, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("walker", [Gemma4Walker, HFWalker])
@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_captured_at_the_real_head_sizes(backend, walker, prompts):
    """One graph per bucket covers both regimes; float32 with IEEE products."""
    torch.set_float32_matmul_precision("highest")
    model = gemma4(seed=1, head_dim=256, global_head_dim=512).cuda()
    expected = greedy_of(unshared(model), prompts)
    engine = make_engine(walker(model), attention_backend=backend, steps_per_look=7)
    assert tokens_of(engine, prompts) == expected
    assert tokens_of(engine, prompts[5:], dataclasses.replace(GREEDY, n=3)) == [row for row in expected[5:] for _ in range(3)]
    tight = make_engine(walker(unshared(model)), num_pages=14, attention_backend=backend)
    assert tokens_of(tight, prompts) == expected and tight.stats().preemptions > 0
    assert not engine.stats().fallbacks


@pytest.mark.gpu
def test_bfloat16_on_the_gpu(prompts):
    """The fused kernels, which float32 does not take: split sums, GELU-gated products, norms on both sides."""
    sizes = dict(hidden_size=512, intermediate_size=1024, hidden_size_per_layer_input=256, head_dim=256, global_head_dim=512)
    model = gemma4(seed=1, initializer_range=0.05, **sizes).cuda()
    for parameter in (*model.parameters(), *(layer.layer_scalar for layer in model.model.layers)):
        parameter.data = parameter.data.bfloat16()
    exact = last_logits(unshared(model).float(), prompts)
    plain = LogitError.between(last_logits(unshared(model), prompts), exact)
    engine = make_engine(Gemma4Walker(model))
    own = LogitError.between(engine_last_logits(engine, prompts), exact)
    assert own.mean_abs < 1.25 * plain.mean_abs and own.max_abs < 2 * plain.max_abs
    assert tokens_of(engine, prompts) == tokens_of(engine, prompts), "the same input gives the same tokens"
