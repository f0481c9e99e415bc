"""Rollouts with Qwen3-MoE: the experts that a step's tokens hit are read once, and no others; one CUDA graph per batch bucket.

    python scripts/benchmarks/qwen3_moe_flex.py         # Qwen3-30B-A3B-Instruct-2507 on a GPU, random weights of a tiny one on a CPU
    python scripts/benchmarks/qwen3_moe_flex.py --load_format dummy      # random weights at its shapes, no network
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flex_cli import build_parser, run_script
from flex_compile import Opaque
from flex_engine import Attend, AttentionSpec, WrittenWalker
from flex_kernels import rms_norm
from flex_moe import Experts, route
from flex_weights import Product

DEFAULT_MODEL, TINY_MODEL = "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-moe-tiny"


@dataclass
class DenseMLP:
    gate_up: Product
    down: Product

    def add_norm(self, x_TC: Tensor, residual_TC: Tensor, norm_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.down.add_norm(self.gate_up.silu_gated(x_TC), residual_TC, norm_C, eps)


@dataclass
class SparseMLP:
    """Each token runs through its `top_k` experts, weighted by their share of a softmax over all (`normalize`: over these)."""

    router: Product
    experts: Experts
    top_k: int
    normalize: bool

    def __post_init__(self) -> None:
        experts, top_k, normalize = self.experts, self.top_k, self.normalize

        def routed(logits_TE, x_TC, residual_TC, norm_C, eps):
            return experts.add_norm(x_TC, *route(logits_TE, top_k, normalize), residual_TC, norm_C, eps)

        self.routed = Opaque(routed, lambda logits_TE, x_TC, *_: (torch.empty_like(x_TC), torch.empty_like(x_TC)))

    def add_norm(self, x_TC: Tensor, residual_TC: Tensor, norm_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed_TC, total_TC = self.routed(self.router(x_TC), x_TC, residual_TC, norm_C, numbers=(eps,))
        return normed_TC, total_TC


@dataclass
class Layer:
    input_norm: Tensor
    qkv: Product
    q_norm: Tensor
    k_norm: Tensor
    o: Product
    mlp_norm: Tensor
    mlp: DenseMLP | SparseMLP


class FlexMoEInference(WrittenWalker):
    """Qwen3-MoE: Qwen3's attention, and a mixture of experts in all layers but those that the config keeps dense."""

    model_types = ("qwen3_moe",)

    def build(self, decoder: nn.Module, lm_head: nn.Module) -> None:
        config = self.config
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not silu; use --walker hf")
        hold, projection = self.weights.hold, self.projection
        self.eps = config.rms_norm_eps
        self.embed = self.embedding(decoder.embed_tokens)
        for layer in decoder.layers:
            attention = layer.self_attn
            self.specs.append(
                AttentionSpec(
                    config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling,
                    window=attention.sliding_window,
                )  # fmt: skip
            )
            self.layers.append(
                Layer(
                    input_norm=hold(layer.input_layernorm.weight),
                    qkv=projection(attention.q_proj, attention.k_proj, attention.v_proj),
                    q_norm=hold(attention.q_norm.weight),
                    k_norm=hold(attention.k_norm.weight),
                    o=projection(attention.o_proj),
                    mlp_norm=hold(layer.post_attention_layernorm.weight),
                    mlp=self.sparse_mlp(layer.mlp) if hasattr(layer.mlp, "experts") else self.dense_mlp(layer.mlp),
                )
            )
        self.final_norm = hold(decoder.norm.weight)
        self.lm_head = projection(lm_head)

    def dense_mlp(self, mlp: nn.Module) -> DenseMLP:
        return DenseMLP(self.projection(mlp.gate_proj, mlp.up_proj), self.projection(mlp.down_proj))

    def sparse_mlp(self, mlp: nn.Module) -> SparseMLP:
        return SparseMLP(
            self.projection(mlp.gate), self.adapters.experts(mlp.experts), self.config.num_experts_per_tok, self.config.norm_topk_prob
        )

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        residual_TC = self.embed(tokens_T)
        x_TC, _ = rms_norm(residual_TC, self.layers[0].input_norm, self.eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms)):
            x_TC = attend(index, layer.qkv(x_TC), layer.q_norm, layer.k_norm, self.rope, self.eps)
            if attend.prefill and index == len(self.layers) - 1:
                return None  # the last keys and values are stored, and nothing else is wanted of a prefill
            x_TC, residual_TC = layer.o.add_norm(x_TC, residual_TC, layer.mlp_norm, self.eps)
            x_TC, residual_TC = layer.mlp.add_norm(x_TC, residual_TC, next_norm, self.eps)
        return self.lm_head(x_TC)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser(__doc__, DEFAULT_MODEL, cpu_model=TINY_MODEL)
    return run_script(parser, FlexMoEInference, argv)


if __name__ == "__main__":
    sys.exit(main())
