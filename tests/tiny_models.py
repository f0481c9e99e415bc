"""Tiny random Hugging Face models: fp32, untied, with weights large enough that greedy decoding does not repeat itself.

A tied model with the usual standard deviation of 0.02 repeats two tokens whatever its attention does, so it would prove nothing.
"""

from __future__ import annotations

import copy

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
