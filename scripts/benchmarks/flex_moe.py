"""Mixture-of-experts layers: routing, and the bank of one layer's experts with what follows it.

    weights_TK, experts_TK = route(router(x_TC), top_k, normalize)
    normed_TC, total_TC = Experts(gate_up_EIC, down_ECI).add_norm(x_TC, weights_TK, experts_TK, residual_TC, norm_C, eps)

An expert is `down(silu(gate(x)) * up(x))`; a token's result is the sum over its K experts, each times its routing weight. All is
safe inside a CUDA graph: shapes and grids depend on the number of tokens alone, and who is routed where is read on the GPU, where
only the weights of experts that were hit are read. flex_triton.py has the conventions.

Shape suffixes besides: E experts, K experts of a token (or input features of a weight), I intermediate features (of a stacked
gate_up: both halves), P = T * K pairs of a token and an expert, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flex_kernels import rms_norm, silu_mul_reference
from flex_linear import add_norm_triton, dense
from flex_moe_kernels import (
    GroupedOptions, experts_down_triton, experts_gate_up_triton, plan_experts_triton, route_triton,
)  # fmt: skip
from flex_triton import use_triton


def route(logits_TE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token -> (weights_TK in the logits' dtype, experts_TK int32), the largest weight first.

    Weights are the softmax over all experts in fp32, divided by the sum of the chosen ones if `normalize` (a config's
    `norm_topk_prob`), as Hugging Face's routers compute them. Of equal probabilities the reference keeps those that torch.topk
    keeps, the kernel those of the lowest ids.
    """
    return (route_triton if use_triton(logits_TE) else route_reference)(logits_TE, top_k, normalize)


def route_reference(logits_TE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    weights_TK, experts_TK = logits_TE.float().softmax(-1).topk(top_k, dim=-1)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype), experts_TK.int()


@dataclass(frozen=True)
class LowRank:
    """What LoRA adds to a stacked weight: `(x a_eᵀ) b_e` for expert e. The adapter's scaling is folded into b."""

    a_ERK: Tensor
    b_ERN: Tensor

    def __call__(self, x_TK: Tensor, expert: int) -> Tensor:
        return (x_TK @ self.a_ERK[expert].T) @ self.b_ERN[expert]


@dataclass(frozen=True)
class MoEOptions:
    """Tiles of a layer: pairs of one expert in a tile, and those of its two products."""

    block_m: int = 16
    gate_up: GroupedOptions = GroupedOptions()
    down: GroupedOptions = GroupedOptions()


def moe_options(pairs: int, num_experts: int, dtype: torch.dtype) -> MoEOptions:
    """By the mean number of an expert's pairs: a tile should hold all of most experts, whose weights are then read once."""
    mean = pairs / num_experts
    block_m = 16 if mean <= 4 else 32 if mean <= 16 else 64 if mean <= 48 else 128
    if dtype == torch.float32:  # no tensor cores: small tiles in registers
        return MoEOptions(min(block_m, 32), *[GroupedOptions(32, 32, 4, 2)] * 2)
    if block_m < 64:
        return MoEOptions(block_m, GroupedOptions(64, 64, 4, 4), GroupedOptions(64, 64, 4, 6))
    num_warps = block_m // 16
    return MoEOptions(block_m, GroupedOptions(64, 64, num_warps, 3), GroupedOptions(128, 64, num_warps, 3))


class Experts:
    """The experts of one layer as Hugging Face stacks them, `gate_up_EIC [E, 2 I, C]` and `down_ECI [E, C, I]`, by reference.

    `options` are tiles for the kernels; None asks `moe_options`.
    """

    def __init__(self, gate_up_EIC: Tensor, down_ECI: Tensor, options: MoEOptions | None = None):
        self.gate_up_EIC, self.down_ECI, self.options = gate_up_EIC, down_ECI, options

    def __call__(self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """sum_k weight_k * expert_k(x) -> `[T, C]`, summed in fp32."""
        return self._weighted(x_TC, weights_TK, experts_TK).sum(0, dtype=torch.float32).to(x_TC.dtype)

    def add_norm(
        self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TC: Tensor, norm_C: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The layer's result and the norm behind it -> (normed_TC, total_TC), total = residual + self(x)."""
        if use_triton(x_TC):
            return add_norm_triton(self._weighted(x_TC, weights_TK, experts_TK), residual_TC, norm_C, eps)
        return rms_norm(self(x_TC, weights_TK, experts_TK), norm_C, eps, residual_TC)

    def _weighted(self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Each pair's result times its routing weight, `[K, T, C]`."""
        run = experts_triton if use_triton(x_TC) else experts_reference
        return run(self, x_TC, weights_TK, experts_TK)


def experts_triton(bank: Experts, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    E = len(bank.gate_up_EIC)
    options = bank.options or moe_options(experts_TK.numel(), E, x_TC.dtype)
    plan = plan_experts_triton(experts_TK, E, options.block_m)
    hidden_PI = experts_gate_up_triton(x_TC, bank.gate_up_EIC, plan, options.gate_up)
    return experts_down_triton(hidden_PI, bank.down_ECI, weights_TK, plan, options.down)


def experts_reference(
    bank: Experts, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: LowRank | None = None, down: LowRank | None = None
) -> Tensor:
    order_P = experts_TK.flatten().argsort(stable=True)
    counts = experts_TK.flatten().bincount(minlength=len(bank.gate_up_EIC)).tolist()
    rows_PC = x_TC.new_empty((experts_TK.numel(), x_TC.shape[1]))
    for expert, pairs in enumerate(order_P.split(counts)):
        if len(pairs):
            x = x_TC[pairs // experts_TK.shape[1]]
            gate_up_I = dense(x, bank.gate_up_EIC[expert])
            hidden = silu_mul_reference(gate_up_I if gate_up is None else gate_up_I + gate_up(x, expert))
            y = F.linear(hidden, bank.down_ECI[expert])
            y = y if down is None else y + down(hidden, expert)
            rows_PC[pairs] = y * weights_TK.flatten()[pairs, None]
    return rows_PC.unflatten(0, experts_TK.shape).transpose(0, 1)


def expert_bytes_read(bank: Experts, experts_TK: Tensor) -> int:
    """Bytes of the weights of the experts that were hit: what one layer has to read at least. Waits for the GPU."""
    weights = (bank.gate_up_EIC, bank.down_ECI)
    return len(experts_TK.unique()) * sum(weight[0].nbytes for weight in weights)


class ActiveExperts:
    """Experts (of either kind) with LoRA beside them, in the engine's dtype at fixed addresses; a pair that is None adds nothing.

    `gate_up_a_ERC [E, R, C]`, `gate_up_b_ERI [E, R, 2 I]`, `down_a_ERI [E, R, I]`, `down_b_ERC [E, R, C]`: expert e adds
    `(x a_eᵀ) b_e` to its products, the adapter's scaling in b. R is a power of two of at least 16, as `padded_rank` gives it; the
    rows that pad it are zero.
    """

    def __init__(
        self, base: Experts, gate_up_a_ERC: Tensor | None = None, gate_up_b_ERI: Tensor | None = None,
        down_a_ERI: Tensor | None = None, down_b_ERC: Tensor | None = None,
    ):  # fmt: skip
        self.base = base
        self.gate_up = None if gate_up_a_ERC is None else LowRank(gate_up_a_ERC, gate_up_b_ERI)
        self.down = None if down_a_ERI is None else LowRank(down_a_ERI, down_b_ERC)

    def __call__(self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        y_KTC = experts_reference(self.base, x_TC, weights_TK, experts_TK, self.gate_up, self.down)
        return y_KTC.sum(0, dtype=torch.float32).to(x_TC.dtype)

    def add_norm(
        self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TC: Tensor, norm_C: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return rms_norm(self(x_TC, weights_TK, experts_TK), norm_C, eps, residual_TC)
