"""Tiny random Hugging Face models: fp32, untied, with weights large enough that greedy decoding does not repeat itself.

A tied model with the usual standard deviation of 0.02 repeats two tokens whatever its attention does, so it would prove nothing.
"""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from flex_lora import active_tensors

VOCAB = 320
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def build(model_class: type[PreTrainedModel], config, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a norm or bias that is left out
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def qwen3(seed: int = 0, **overrides) -> PreTrainedModel:
    """head_dim 32 where hidden / heads is 16; q and k norms."""
    return build(Qwen3ForCausalLM, Qwen3Config(**{**SIZES, "head_dim": 32, **overrides}), seed)


def qwen3_moe(seed: int = 0, **overrides) -> PreTrainedModel:
    """A dense layer between two sparse ones, of 8 experts each; 3 of them for a token."""
    moe = dict(num_hidden_layers=3, mlp_only_layers=[1], num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48)
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**SIZES, "head_dim": 32, **moe, "norm_topk_prob": True, **overrides}), seed)


def llama(seed: int = 0, **overrides) -> PreTrainedModel:
    """Three query heads per KV head, llama3 rope scaling with an original context of 64."""
    sizes = {**SIZES, "hidden_size": 96, "num_attention_heads": 6, "rope_parameters": dict(LLAMA3_ROPE), **overrides}
    return build(LlamaForCausalLM, LlamaConfig(**sizes), seed)


def qwen2(seed: int = 0, **overrides) -> PreTrainedModel:
    """Biases on q, k and v."""
    return build(Qwen2ForCausalLM, Qwen2Config(**{**SIZES, **overrides}), seed)


def mistral(seed: int = 0, **overrides) -> PreTrainedModel:
    """Every layer sees a window of 24 tokens."""
    return build(MistralForCausalLM, MistralConfig(**{**SIZES, "sliding_window": 24, **overrides}), seed)


def gemma2(seed: int = 0, **overrides) -> PreTrainedModel:
    """Soft caps that bite, and layers that alternate between a window of 24 and full attention."""
    sizes = {
        **SIZES,
        "head_dim": 32,
        "sliding_window": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
        "attn_implementation": "eager",
        **overrides,
    }
    return build(Gemma2ForCausalLM, Gemma2Config(**sizes), seed)


GEMMA4_SIZES = dict(
    SIZES,
    num_hidden_layers=6,
    num_kv_shared_layers=2,
    num_key_value_heads=1,
    layer_types=["sliding_attention", "full_attention"] * 3,
    sliding_window=24,
    head_dim=32,
    global_head_dim=64,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=VOCAB,
    final_logit_softcapping=3.0,
    use_double_wide_mlp=True,
    pad_token_id=0,
)


def gemma4(seed: int = 0, **overrides) -> PreTrainedModel:
    """Two head sizes, a window of 24, upper layers that share keys, a soft cap that bites, layer scalars that are not one."""
    return with_layer_scalars(build(Gemma4ForCausalLM, Gemma4TextConfig(**{**GEMMA4_SIZES, **overrides}), seed))


def gemma4_multimodal(seed: int = 0, **overrides) -> PreTrainedModel:
    """The same language model under its vision and audio towers."""
    tower = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Gemma4Config(
        text_config=Gemma4TextConfig(**{**GEMMA4_SIZES, **overrides}),
        vision_config=Gemma4VisionConfig(**tower, intermediate_size=32, num_key_value_heads=2, head_dim=16),
        audio_config=Gemma4AudioConfig(**tower, subsampling_conv_channels=[8, 4], output_proj_dims=32),
        initializer_range=SIZES["initializer_range"],
        tie_word_embeddings=False,
    )
    return with_layer_scalars(build(Gemma4ForConditionalGeneration, config, seed))


def with_layer_scalars(model: PreTrainedModel) -> PreTrainedModel:
    for index, layer in enumerate(model.get_decoder().layers):
        layer.layer_scalar.fill_(0.9 + 0.05 * index)
    return model


def unshared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy to compare with: what the engine does to the model's weights can't reach it."""
    return copy.deepcopy(model).eval()


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


class SpellingTokenizer:
    """Token 7 reads `<7>`, and a text is its characters' code points: every position in a text belongs to a known token."""

    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def adapted(model: PreTrainedModel, name: str, seed: int, **options) -> PeftModel:
    """A LoRA adapter of rank 4 with B far from zero; `options` are LoraConfig's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options})
        peft_model = get_peft_model(model, config, adapter_name=name)
        for _, parameter, _ in active_tensors(peft_model):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return peft_model.eval()
