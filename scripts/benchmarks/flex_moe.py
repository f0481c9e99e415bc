"""Mixture-of-experts layers: routing, and the bank of one layer's experts with what follows it.

    weights_TK, experts_TK = route(router(x_TC), top_k, normalize)
    normed_TC, total_TC = Experts(gate_up_EIC, down_ECI).add_norm(x_TC, weights_TK, experts_TK, residual_TC, norm_C, eps)

An expert is `down(silu(gate(x)) * up(x))`; a token's result is the sum over its K experts, each times its routing weight. All is
safe inside a CUDA graph: shapes and grids depend on the number of tokens alone, and who is routed where is read on the GPU, where
only the weights of experts that were hit are read. A bank may be NF4 (transformers quantizes no stacked experts, so the layout is
this project's own: NF4Weight) and may have LoRA beside it. flex_moe_kernels.py has the kernels.

Shape suffixes besides: E experts, K experts of a token (or input features of a weight), I intermediate features (of a stacked
gate_up: both halves), P = T * K pairs of a token and an expert, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flex_kernels import rms_norm, silu_mul_reference
from flex_linear import add_norm_triton, dense
from flex_moe_kernels import (
    GroupedOptions, LowRank, NF4Weight, Weight, experts_down_triton, experts_gate_up_triton, plan_experts_triton, route_triton,
)  # fmt: skip
from flex_nf4 import BLOCK as NF4_BLOCK
from flex_nf4 import NF4_VALUES
from flex_triton import cuda_capability, use_triton


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
class MoEOptions:
    """Tiles of a layer: pairs of one expert in a tile, and those of its two products."""

    block_m: int = 16
    gate_up: GroupedOptions = GroupedOptions()
    down: GroupedOptions = GroupedOptions()


def moe_options(pairs: int, bank: Experts) -> MoEOptions:
    """By the mean number of an expert's pairs: a tile should hold all of most experts, whose weights are then read once.

    Tiles as measured on an H200 at Qwen3-30B-A3B's shapes (kernel_bench.py).
    """
    mean, nf4 = pairs / bank.num_experts, isinstance(bank.gate_up_EIC, NF4Weight)
    block_m = 16 if mean <= (4 if nf4 else 8) else 32 if mean <= 16 else 64 if mean <= 48 else 128
    if nf4 and block_m == 128:
        return MoEOptions(block_m, GroupedOptions(64, NF4_BLOCK, 8, 3), GroupedOptions(128, NF4_BLOCK, 4, 3))
    if nf4:
        return MoEOptions(block_m, GroupedOptions(32, NF4_BLOCK, 4, 4), GroupedOptions(128 if block_m < 64 else 64, NF4_BLOCK, 4, 4))
    if bank.gate_up_EIC.dtype == torch.float32:  # no tensor cores: small tiles in registers
        return MoEOptions(min(block_m, 32), *[GroupedOptions(32, 32, 4, 2)] * 2)
    if block_m < 64:
        return MoEOptions(block_m, GroupedOptions(32, 128, 4, 3), GroupedOptions(64, 128, 4, 3))
    if block_m == 64:
        return MoEOptions(block_m, GroupedOptions(64, 64, 8, 3), GroupedOptions(128, 64, 8, 3))
    tma = cuda_capability() >= 90 and not any(weight.shape[2] % 64 for weight in (bank.gate_up_EIC, bank.down_ECI))
    return MoEOptions(block_m, GroupedOptions(128, 64, 8, 4, tma), GroupedOptions(256, 64, 8, 4, tma))


class Experts:
    """The experts of one layer as Hugging Face stacks them, `gate_up_EIC [E, 2 I, C]` and `down_ECI [E, C, I]`, by reference.

    `options` are tiles for the kernels; None asks `moe_options`.
    """

    gate_up_low_rank: LowRank | None = None
    down_low_rank: LowRank | None = None

    def __init__(self, gate_up_EIC: Weight, down_ECI: Weight, options: MoEOptions | None = None):
        self.gate_up_EIC, self.down_ECI, self.options = gate_up_EIC, down_ECI, options

    @property
    def num_experts(self) -> int:
        return len(self.gate_up_EIC)

    @property
    def bytes_per_expert(self) -> int:
        return (self.gate_up_EIC.nbytes + self.down_ECI.nbytes) // self.num_experts

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
        if _reads is not None:
            _reads.append(expert_bytes_read(self, experts_TK))
        return (experts_triton if use_triton(x_TC) else experts_reference)(self, x_TC, weights_TK, experts_TK)


class ActiveExperts(Experts):
    """A bank with LoRA beside it, in the engine's dtype at fixed addresses; a pair that is None adds nothing.

    `gate_up_a_ERC [E, R, C]`, `gate_up_b_ERI [E, R, 2 I]`, `down_a_ERI [E, R, I]`, `down_b_ERC [E, R, C]`: expert e adds
    `(x a_eᵀ) b_e` to its products, the adapter's scaling in b. R is a power of two of at least 16, as `padded_rank` gives it; the
    rows that pad it are zero.
    """

    def __init__(
        self, base: Experts, gate_up_a_ERC: Tensor | None = None, gate_up_b_ERI: Tensor | None = None,
        down_a_ERI: Tensor | None = None, down_b_ERC: Tensor | None = None,
    ):  # fmt: skip
        super().__init__(base.gate_up_EIC, base.down_ECI, base.options)
        self.gate_up_low_rank = None if gate_up_a_ERC is None else LowRank(gate_up_a_ERC, gate_up_b_ERI)
        self.down_low_rank = None if down_a_ERI is None else LowRank(down_a_ERI, down_b_ERC)

    @property
    def bytes_per_expert(self) -> int:
        low_ranks = filter(None, (self.gate_up_low_rank, self.down_low_rank))
        return super().bytes_per_expert + sum(low.a_ERK[0].nbytes + low.b_ERN[0].nbytes for low in low_ranks)


def experts_triton(bank: Experts, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    options = bank.options or moe_options(experts_TK.numel(), bank)
    plan = plan_experts_triton(experts_TK, bank.num_experts, options.block_m)
    hidden_PI = experts_gate_up_triton(x_TC, bank.gate_up_EIC, plan, options.gate_up, bank.gate_up_low_rank)
    return experts_down_triton(hidden_PI, bank.down_ECI, weights_TK, plan, options.down, bank.down_low_rank)


def experts_reference(bank: Experts, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """One expert after the other, of those that were hit; differentiable in x and the routing weights."""
    order_P = experts_TK.flatten().argsort(stable=True)
    counts = experts_TK.flatten().bincount(minlength=bank.num_experts).tolist()
    rows_PC = x_TC.new_empty((experts_TK.numel(), x_TC.shape[1]))
    for expert, pairs in enumerate(order_P.split(counts)):
        if len(pairs):
            x = x_TC[pairs // experts_TK.shape[1]]
            hidden = silu_mul_reference(_product(x, bank.gate_up_EIC, expert, bank.gate_up_low_rank))
            y = _product(hidden, bank.down_ECI, expert, bank.down_low_rank)
            rows_PC[pairs] = (y * weights_TK.flatten()[pairs, None]).to(rows_PC.dtype)
    return rows_PC.unflatten(0, experts_TK.shape).transpose(0, 1)


def _product(x: Tensor, weight_ENK: Weight, expert: int, low_rank: LowRank | None) -> Tensor:
    nf4 = isinstance(weight_ENK, NF4Weight)
    y = _NF4Product.apply(x, weight_ENK, expert) if nf4 else dense(x, weight_ENK[expert])
    return y if low_rank is None else y + low_rank(x, expert)


def expert_bytes_read(bank: Experts, experts_TK: Tensor) -> int:
    """Bytes of the weights of the experts that were hit: what one layer has to read at least. Waits for the GPU."""
    return len(experts_TK.unique()) * bank.bytes_per_expert


_reads: list[int] | None = None


@contextmanager
def record_expert_reads() -> Iterator[list[int]]:
    """Collects `expert_bytes_read` of every call of a bank meanwhile. Each waits for the GPU, so not while a graph is captured."""
    global _reads
    _reads = reads = []
    try:
        yield reads
    finally:
        _reads = None


# ------------------------------------------------------------------------------------------------------ 4-bit experts


class _NF4Product(torch.autograd.Function):
    """x Wᵀ, with W dequantized once more in backward instead of kept until then."""

    @staticmethod
    def forward(ctx, x_TK: Tensor, weight_ENK: NF4Weight, expert: int) -> Tensor:
        ctx.weight_ENK, ctx.expert = weight_ENK, expert
        return F.linear(x_TK, weight_ENK[expert].to(x_TK.dtype))

    @staticmethod
    def backward(ctx, grad_TN: Tensor) -> tuple[Tensor, None, None]:
        return grad_TN @ ctx.weight_ENK[ctx.expert].to(grad_TN.dtype), None, None


def quantize_weight(weight_ENK: Tensor) -> NF4Weight:
    """The nearest NF4 codes; raises ValueError where a row is no whole number of blocks of 64."""
    E, N, K = weight_ENK.shape
    if K % NF4_BLOCK:
        raise ValueError(f"experts of {K} input features: NF4 takes a multiple of {NF4_BLOCK}")
    G, device = K // NF4_BLOCK, weight_ENK.device
    values = torch.tensor(NF4_VALUES, device=device)
    middles = (values[1:] + values[:-1]) / 2
    codes_EGNW = torch.empty((E, G, N, NF4_BLOCK // 8), dtype=torch.int32, device=device)
    scales_EGN = torch.empty((E, G, N), dtype=torch.float32, device=device)
    for weight_NK, codes_GNW, scales_GN in zip(weight_ENK, codes_EGNW, scales_EGN):
        blocks_GNB = weight_NK.detach().float().unflatten(1, (G, NF4_BLOCK)).transpose(0, 1).contiguous()
        scales_GN.copy_(blocks_GNB.abs().amax(-1))
        unit_GNB = blocks_GNB / scales_GN.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        codes_GNB = torch.bucketize(unit_GNB, middles, out_int32=True).to(torch.uint8)
        codes_GNW.copy_((codes_GNB[..., ::2] << 4 | codes_GNB[..., 1::2]).contiguous().view(torch.int32))
    return NF4Weight(codes_EGNW, scales_EGN, weight_ENK.dtype)


class NF4Experts(nn.Module):
    """Stands in for Hugging Face's stacked experts, in 4 bits: its forward dequantizes the experts that were hit, one by one, and
    lets gradients through to x and the routing weights. `bank()` is the engine's view of the same codes; its kernels compute in 16
    bits.
    """

    def __init__(self, gate_up_EIC: NF4Weight, down_ECI: NF4Weight):
        super().__init__()
        self.dtype = gate_up_EIC.dtype
        for name, weight in (("gate_up", gate_up_EIC), ("down", down_ECI)):
            self.register_buffer(f"{name}_codes", weight.codes_EGNW)
            self.register_buffer(f"{name}_scales", weight.scales_EGN)

    def bank(self) -> Experts:
        if self.gate_up_scales.dtype != torch.float32:
            raise ValueError(f"NF4 experts: scales have been cast to {self.gate_up_scales.dtype}; they stay in float32")
        return Experts(
            NF4Weight(self.gate_up_codes, self.gate_up_scales, self.dtype), NF4Weight(self.down_codes, self.down_scales, self.dtype)
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y_KTC = experts_reference(self.bank(), hidden_states, top_k_weights, top_k_index)
        return y_KTC.sum(0, dtype=torch.float32).to(hidden_states.dtype)


def quantize_experts(module: nn.Module) -> NF4Experts:
    """Hugging Face's stacked experts (`gate_up_proj [E, 2 I, C]`, `down_proj [E, C, I]`, SiLU) in 4 bits, on their device."""
    from transformers.activations import ACT2CLS

    if not isinstance(module.act_fn, (ACT2CLS["silu"], ACT2CLS["swish"])):
        raise ValueError(f"{type(module).__name__}: the activation {module.act_fn} is not SiLU")
    return NF4Experts(quantize_weight(module.gate_up_proj), quantize_weight(module.down_proj))
