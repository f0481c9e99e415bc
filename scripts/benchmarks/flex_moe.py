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
from flex_linear import dense


def route(logits_TE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token -> (weights_TK in the logits' dtype, experts_TK int32), the largest weight first.

    Weights are the softmax over all experts in fp32, divided by the sum of the chosen ones if `normalize` (a config's
    `norm_topk_prob`), as Hugging Face's routers compute them. Of equal probabilities the reference keeps those that torch.topk
    keeps, the kernel those of the lowest ids.
    """
    return route_reference(logits_TE, top_k, normalize)


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


class Experts:
    """The experts of one layer as Hugging Face stacks them, `gate_up_EIC [E, 2 I, C]` and `down_ECI [E, C, I]`, by reference."""

    def __init__(self, gate_up_EIC: Tensor, down_ECI: Tensor):
        self.gate_up_EIC, self.down_ECI = gate_up_EIC, down_ECI

    def __call__(self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """sum_k weight_k * expert_k(x) -> `[T, C]`."""
        return self._rows(x_TC, weights_TK, experts_TK).float().sum(1).to(x_TC.dtype)

    def add_norm(
        self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TC: Tensor, norm_C: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The layer's result and the norm behind it -> (normed_TC, total_TC), total = residual + self(x)."""
        return rms_norm(self(x_TC, weights_TK, experts_TK), norm_C, eps, residual_TC)

    def _rows(
        self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: LowRank | None = None, down: LowRank | None = None
    ) -> Tensor:
        """Each pair's weighted result, `[T, K, C]`, with `gate_up` and `down` added to the weights."""
        order_P = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self.gate_up_EIC)).tolist()
        rows_PC = torch.empty((experts_TK.numel(), x_TC.shape[1]), dtype=x_TC.dtype, device=x_TC.device)
        for expert, pairs in enumerate(order_P.split(counts)):
            if len(pairs):
                x = x_TC[pairs // experts_TK.shape[1]]
                gate_up_I = dense(x, self.gate_up_EIC[expert])
                hidden = silu_mul_reference(gate_up_I if gate_up is None else gate_up_I + gate_up(x, expert))
                y = F.linear(hidden, self.down_ECI[expert])
                y = y if down is None else y + down(hidden, expert)
                rows_PC[pairs] = y * weights_TK.flatten()[pairs, None]
        return rows_PC.unflatten(0, experts_TK.shape)


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
        return self.base._rows(x_TC, weights_TK, experts_TK, self.gate_up, self.down).float().sum(1).to(x_TC.dtype)

    def add_norm(
        self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TC: Tensor, norm_C: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return rms_norm(self(x_TC, weights_TK, experts_TK), norm_C, eps, residual_TC)
