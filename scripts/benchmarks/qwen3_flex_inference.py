"""Rollouts with Qwen3 and Llama (and what is built like them): flex_attention, paged KV, one CUDA graph per batch bucket.

    python scripts/benchmarks/qwen3_flex_inference.py                        # embedded model on a CPU, Qwen3-4B-Base on a GPU
    python scripts/benchmarks/qwen3_flex_inference.py --capture_cudagraph --load_format dummy --model_name qwen3-4b-base
    python scripts/benchmarks/qwen3_flex_inference.py --model_name meta-llama/Llama-3.2-3B-Instruct --chat_template native

To serve another architecture copy this file and change the walker; README.md, "Add an architecture", says how.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor, nn

from flex_cli import build_parser, run_script
from flex_engine import Attend, AttentionSpec, WrittenWalker
from flex_kernels import rms_norm
from flex_weights import Product


@dataclass
class Layer:
    input_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class Qwen3Walker(WrittenWalker):
    """Qwen3 and Llama: pre-norm, GQA with rotary positions (Qwen3: q and k normed per head), SiLU-gated MLP."""

    model_types = ("qwen3", "llama")

    def build(self, decoder: nn.Module, lm_head: nn.Module) -> None:
        config = self.config
        hold, projection = self.weights.hold, self.projection
        self.eps = config.rms_norm_eps
        self.embed = self.embedding(decoder.embed_tokens)
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.specs.append(
                AttentionSpec(
                    config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling,
                    window=getattr(attention, "sliding_window", None),
                )  # fmt: skip
            )
            self.layers.append(
                Layer(
                    input_norm=hold(layer.input_layernorm.weight),
                    qkv=projection(attention.q_proj, attention.k_proj, attention.v_proj),
                    q_norm=hold(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
                    k_norm=hold(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
                    o=projection(attention.o_proj),
                    mlp_norm=hold(layer.post_attention_layernorm.weight),
                    gate_up=projection(mlp.gate_proj, mlp.up_proj),
                    down=projection(mlp.down_proj),
                )
            )
        self.final_norm = hold(decoder.norm.weight)
        self.lm_head = projection(lm_head)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        residual_TC = self.embed(tokens_T)
        x_TC, _ = rms_norm(residual_TC, self.layers[0].input_norm, self.eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms)):
            x_TC = attend(index, layer.qkv(x_TC), layer.q_norm, layer.k_norm, self.rope, self.eps)
            if attend.prefill and index == len(self.layers) - 1:
                return None  # the last keys and values are stored, and nothing else is wanted of a prefill
            x_TC, residual_TC = layer.o.add_norm(x_TC, residual_TC, layer.mlp_norm, self.eps)
            x_TI = layer.gate_up.silu_gated(x_TC)
            x_TC, residual_TC = layer.down.add_norm(x_TI, residual_TC, next_norm, self.eps)
        return self.lm_head(x_TC)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser(__doc__, default_model="unsloth/Qwen3-4B-Base")
    return run_script(parser, Qwen3Walker, argv)


if __name__ == "__main__":
    sys.exit(main())
