"""4-bit weights: bitsandbytes' NF4 layers, read as they are stored and shared with a QLoRA trainer.

bitsandbytes keeps a weight `[N, K]` as one run of N * K 4-bit codes, two in a byte, the first in the high half, and one scale
(`absmax`) for each block of 64 codes of that run; the scales are themselves quantized where `bnb_4bit_use_double_quant` is set.
A weight is code value * scale in fp32, rounded to the dtype that the model was loaded in. The codes are packed and shared
as other weights are (flex_weights); the scales are expanded to fp32 once, because the base is frozen.

The kernels and their references have the same signatures, as in flex_kernels.py. Shape suffixes: T tokens, K input features,
N output features, G blocks of 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flex_weights import Product, SharedWeights

# The 16 values of NF4 (QLoRA, https://arxiv.org/abs/2305.14314, appendix E), as bitsandbytes rounds them.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MAX_FUSED_ROWS = 256  # more rows are bound by arithmetic: dequantize once, then cuBLAS


# -------------------------------------------------------------------------------------------------------- bitsandbytes layers


def is_4bit(module: nn.Module) -> bool:
    return hasattr(module._parameters.get("weight"), "quant_state")


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """What the model's 4-bit layers compute in, if it is a 16-bit dtype; None without such layers."""
    dtypes = {module.compute_dtype for module in model.modules() if is_4bit(module)}
    return next((dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), None)


def keep_storage_layout(model: nn.Module) -> None:
    """Keeps bitsandbytes from repacking weights in an evaluation forward on CPUs with AVX512-BF16.

    Repacked weights have no backward: later training would silently give LoRA no gradient (bitsandbytes 0.50). What is repacked
    already is put back, with its scales as the repacking has rounded them, to bfloat16.
    """
    for module in model.modules():
        if not is_4bit(module):
            continue
        module.support_avx512bf16_for_cpu = False
        state = module.weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as restore

            state.original_nested = False  # quantizing the scales once more would change them again
            module.weight.data, module.weight.quant_state = restore(module.weight.data, state)
            state.absmax = state.absmax.T.float().flatten()  # the inverse leaves them transposed


def expanded_absmax(state) -> Tensor:
    """The scale of each block, fp32, of a bitsandbytes QuantState."""
    if not state.nested:
        return state.absmax.float().flatten()
    inner = state.state2
    scales = inner.absmax.float().repeat_interleave(inner.blocksize)[: state.absmax.numel()]
    return inner.code.float()[state.absmax.flatten().long()] * scales + state.offset.float()


def float_weight(module: nn.Module) -> Tensor:
    """The weight `[N, K]` of a linear, dequantized if it is 4-bit."""
    if not is_4bit(module):
        return module.weight.data
    state = module.weight.quant_state
    codes = module.weight.data.view(torch.uint8).view(state.shape[0], -1)
    return nf4_dequantize(codes, expanded_absmax(state), state.blocksize, state.dtype)


class NF4Projection(Product):
    """y = x Wᵀ + b over packed NF4 weights: fused for the few rows of a decode step, dequantized for a prefill."""

    def __init__(self, codes: Tensor, absmax: Tensor, blocksize: int, weight_dtype: torch.dtype, bias: Tensor | None):
        self.codes, self.absmax, self.blocksize, self.weight_dtype, self.bias = codes, absmax, blocksize, weight_dtype, bias

    @classmethod
    def of(cls, weights: SharedWeights, linears: Sequence[nn.Module], bias: Tensor | None = None) -> NF4Projection:
        """`bias` is packed already, or the linears' own. Raises ValueError naming the weight that is quantized otherwise."""
        states = [linear.weight.quant_state for linear in linears]
        for linear, state in zip(linears, states):
            rows, columns = state.shape
            if state.quant_type != "nf4" or rows * columns % state.blocksize or state.blocksize != states[0].blocksize:
                raise ValueError(
                    f"{weights.name_of(linear.weight)}: {state.quant_type} in blocks of {state.blocksize} over {rows} x {columns}; "
                    "the rollout engine takes nf4, in whole blocks"
                )
        sizes = [state.shape.numel() // 2 for state in states]
        codes = torch.empty(sum(sizes), dtype=torch.uint8, device=weights.device)
        for linear, room in zip(linears, codes.split(sizes)):
            weights.place(linear.weight, room.view(linear.weight.dtype).view(linear.weight.shape))
        absmax = torch.cat([expanded_absmax(state) for state in states])
        own_bias = weights.pack_bias(linears) if bias is None else bias
        return cls(codes.view(-1, states[0].shape[1] // 2), absmax, states[0].blocksize, states[0].dtype, own_bias)

    def __call__(self, x_TK: Tensor) -> Tensor:
        if x_TK.shape[0] <= MAX_FUSED_ROWS and x_TK.is_cuda:
            return nf4_matmul(x_TK, self.codes, self.absmax, self.blocksize, self.weight_dtype, self.bias)
        weight = nf4_dequantize(self.codes, self.absmax, self.blocksize, self.weight_dtype)
        return F.linear(x_TK, weight.to(x_TK.dtype), self.bias)


# ----------------------------------------------------------------------------------------------------------------- dequantize


def nf4_dequantize(codes: Tensor, absmax: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    """`[N, K / 2]` uint8 and fp32 `[N * K / blocksize]` to `[N, K]`: code value * scale in fp32, rounded to `dtype`."""
    return nf4_dequantize_reference(codes, absmax, blocksize, dtype)


def nf4_dequantize_reference(codes: Tensor, absmax: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    values = torch.tensor(NF4_VALUES, device=codes.device)
    nibbles = torch.stack([codes >> 4, codes & 15], dim=-1).int()
    return (values[nibbles].view(-1, blocksize) * absmax[:, None]).to(dtype).view(codes.shape[0], -1)


def nf4_matmul(
    x_TK: Tensor, codes: Tensor, absmax: Tensor, blocksize: int, weight_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    return nf4_matmul_reference(x_TK, codes, absmax, blocksize, weight_dtype, bias)


def nf4_matmul_reference(
    x_TK: Tensor, codes: Tensor, absmax: Tensor, blocksize: int, weight_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    return F.linear(x_TK, nf4_dequantize_reference(codes, absmax, blocksize, weight_dtype).to(x_TK.dtype), bias)
