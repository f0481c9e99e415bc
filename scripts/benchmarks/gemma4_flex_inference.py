"""Rollouts with Gemma-4's language model: full and sliding attention side by side, keys shared by the upper layers, text only.

    python scripts/benchmarks/gemma4_flex_inference.py           # gemma-4-E2B-it on a GPU, random weights of a tiny one on a CPU
    python scripts/benchmarks/gemma4_flex_inference.py --load_format dummy      # random weights at E2B's shapes, no network

Of a multimodal checkpoint the language model is kept, and vision and audio are dropped. Gemma-4 needs transformers 5.5 or later.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flex_cli import build_parser, run_script
from flex_console import fail
from flex_engine import Attend, AttentionSpec, WrittenWalker
from flex_kernels import gelu_mul, norm_add_norm, soft_cap
from flex_weights import Product

DEFAULT_MODEL, TINY_MODEL = "unsloth/gemma-4-E2B-it", "gemma-4-tiny"


@dataclass
class LayerInput:
    """What a layer does with its own embedding of the token: gated by the hidden state, projected, normed and added."""

    gate: Product
    projection: Product
    norm: Tensor


@dataclass
class Layer:
    input_norm: Tensor
    qkv: Product  # q alone where an earlier layer's keys and values are read; no v where it is k
    q_norm: Tensor
    k_norm: Tensor | None
    layer_type: str
    o: Product
    post_attention_norm: Tensor
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    post_mlp_norm: Tensor
    layer_input: LayerInput | None
    scalar: Tensor


class Gemma4Walker(WrittenWalker):
    """Gemma-4's text model: norms on both sides of each branch, v normed, scores not scaled, GELU gate, an embedding per layer.

    Takes a Gemma4ForCausalLM or a whole Gemma4ForConditionalGeneration, of which it walks the language model.
    """

    model_types = ("gemma4_text", "gemma4")

    def build(self, decoder: nn.Module, lm_head: nn.Module) -> None:
        config = self.config
        refuse_variants(config)
        hold, projection = self.weights.hold, self.projection
        self.eps = config.rms_norm_eps
        self.embed = self.embedding(decoder.embed_tokens)
        self.embed_scale = self.rounded(config.hidden_size**0.5)
        self.input_size = config.hidden_size_per_layer_input or 0
        if self.input_size:
            self.embed_inputs = self.embedding(decoder.embed_tokens_per_layer)
            self.input_scale = self.rounded(self.input_size**0.5)
            self.project_inputs = projection(decoder.per_layer_model_projection)
            self.input_norm = hold(decoder.per_layer_projection_norm.weight)
        last_of_type: dict[str, int] = {}
        for index, layer in enumerate(decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            layer_type, stores = config.layer_types[index], not attention.is_kv_shared_layer
            if stores:
                last_of_type[layer_type] = self.last_storing = index
                linears = [attention.q_proj, attention.k_proj, attention.v_proj]
            else:
                linears = [attention.q_proj]
            self.specs.append(
                AttentionSpec(
                    config.num_attention_heads, config.num_attention_heads // attention.num_key_value_groups, attention.head_dim,
                    attention.scaling, window=attention.sliding_window, store_layer=None if stores else last_of_type[layer_type],
                )  # fmt: skip
            )
            self.layers.append(
                Layer(
                    input_norm=hold(layer.input_layernorm.weight),
                    qkv=projection(*(linear for linear in linears if linear is not None)),
                    q_norm=hold(attention.q_norm.weight),
                    k_norm=hold(attention.k_norm.weight) if stores else None,
                    layer_type=layer_type,
                    o=projection(attention.o_proj),
                    post_attention_norm=hold(layer.post_attention_layernorm.weight),
                    mlp_norm=hold(layer.pre_feedforward_layernorm.weight),
                    gate_up=projection(mlp.gate_proj, mlp.up_proj),
                    down=projection(mlp.down_proj),
                    post_mlp_norm=hold(layer.post_feedforward_layernorm.weight),
                    layer_input=self.layer_input(layer) if self.input_size else None,
                    scalar=hold(layer.layer_scalar),
                )
            )
        self.final_norm = hold(decoder.norm.weight)
        self.lm_head = projection(lm_head)

    def layer_input(self, layer: nn.Module) -> LayerInput:
        return LayerInput(
            self.projection(layer.per_layer_input_gate),
            self.projection(layer.per_layer_projection),
            self.weights.hold(layer.post_per_layer_input_norm.weight),
        )

    def rounded(self, scale: float) -> float:
        """Gemma's embeddings are scaled in their own dtype: in bfloat16 by 39.25 where the square root is 39.19."""
        return torch.tensor(scale).to(self.dtype).item()

    def prepare(self, max_seq_len: int) -> None:
        rotary = self.decoder.rotary_emb
        self.ropes = {kind: self.rope_table(rotary, max_seq_len, kind) for kind in set(self.config.layer_types)}

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        eps = self.eps
        residual_TC = self.embed(tokens_T) * self.embed_scale
        inputs_TLP = self.layer_inputs(tokens_T, residual_TC) if self.input_size else None
        x_TC = F.rms_norm(residual_TC, residual_TC.shape[1:], self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms)):
            rope = self.ropes[layer.layer_type]
            x_TE = attend(index, layer.qkv(x_TC), layer.q_norm, layer.k_norm, rope, eps, norm_v=True)
            if attend.prefill and index == self.last_storing:
                return None  # the layers above store nothing, and nothing else is wanted of a prefill
            x_TC, residual_TC = layer.o.norm_add_norm(x_TE, layer.post_attention_norm, eps, residual_TC, layer.mlp_norm)
            x_TI = layer.gate_up.gelu_gated(x_TC)
            own = layer.layer_input
            if own is None:
                x_TC, residual_TC = layer.down.norm_add_norm(
                    x_TI, layer.post_mlp_norm, eps, residual_TC, next_norm, layer.scalar
                )
                continue
            _, residual_TC = layer.down.norm_add_norm(x_TI, layer.post_mlp_norm, eps, residual_TC)
            x_TP = gelu_mul(own.gate(residual_TC), inputs_TLP[:, index])
            x_TC, residual_TC = own.projection.norm_add_norm(x_TP, own.norm, eps, residual_TC, next_norm, layer.scalar)
        logits_TV = self.lm_head(x_TC)
        cap = self.config.final_logit_softcapping
        return logits_TV if cap is None else soft_cap(logits_TV, cap)

    def layer_inputs(self, tokens_T: Tensor, x_TC: Tensor) -> Tensor:
        """Each layer's own embedding of the tokens, mixed with a projection of the common one: `[T, layers, P]`."""
        config = self.config
        if config.vocab_size_per_layer_input < config.vocab_size:
            # Ids beyond have no embedding here: padding's serves, as Hugging Face does for images.
            tokens_T = tokens_T.where(tokens_T < config.vocab_size_per_layer_input, config.pad_token_id)
        own = (self.embed_inputs(tokens_T) * self.input_scale).view(-1, self.input_size)
        common = self.project_inputs(x_TC).view(-1, self.input_size)
        # The projection is scaled by hidden ** -0.5 before its norm, which leaves of it a larger epsilon.
        _, mixed = norm_add_norm(common, self.input_norm, self.eps * config.hidden_size, own, scale=2**-0.5)
        return mixed.view(len(tokens_T), -1, self.input_size)


def refuse_variants(config) -> None:
    """Raises ValueError naming the config field of a variant that the walker does not compute."""
    if config.enable_moe_block:
        raise ValueError("enable_moe_block: Gemma-4's expert layers have no written walker; use --walker hf")
    if config.use_bidirectional_attention == "all":  # "vision" concerns images alone
        raise ValueError("use_bidirectional_attention 'all' attends to later tokens too, which a rollout can't")
    if config.hidden_activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation {config.hidden_activation!r} is not gelu_pytorch_tanh; use --walker hf")


def require_gemma4() -> None:
    """Ends the script in one line where transformers does not know Gemma-4."""
    if importlib.util.find_spec("transformers.models.gemma4") is None:
        fail("this transformers has no Gemma-4; pip install -U 'transformers>=5.5'")


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The language model of a Gemma4ForConditionalGeneration as a Gemma4ForCausalLM of the same modules; a text model as it is."""
    if model.config.model_type != "gemma4":
        return model
    from transformers import Gemma4ForCausalLM

    with torch.device("meta"):
        shell = Gemma4ForCausalLM(model.config.get_text_config())
    shell.model, shell.lm_head = model.get_decoder(), model.lm_head
    shell.generation_config = model.generation_config
    if getattr(model, "is_loaded_in_4bit", False):  # what PEFT looks at
        shell.is_loaded_in_4bit = True
    return shell.train(model.training)


def main(argv: list[str] | None = None) -> int:
    require_gemma4()
    parser = build_parser(__doc__, DEFAULT_MODEL, cpu_model=TINY_MODEL)
    return run_script(parser, Gemma4Walker, argv, text_model)


if __name__ == "__main__":
    sys.exit(main())
