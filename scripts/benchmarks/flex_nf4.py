"""4-bit weights: bitsandbytes' NF4 layers, read as they are stored and shared with a QLoRA trainer.

bitsandbytes keeps a weight `[N, K]` as one run of N * K 4-bit codes, two in a byte, the first in the high half, and one scale
(`absmax`) for each block of 64 codes of that run; the scales are themselves quantized where `bnb_4bit_use_double_quant` is set.
A weight is code value * scale in fp32, rounded to the dtype that the model was loaded in. The codes are packed and shared
as other weights are (flex_weights); the scales are expanded to fp32 once, because the base is frozen.

The kernels follow the conventions of flex_triton.py. Shape suffixes besides: G blocks of 64 input features, W words of 8 codes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flex_compile import Opaque
from flex_triton import cdiv, jit, next_power_of_2, pdl_options, tl, triton, use_triton, wait_for_inputs
from flex_weights import Product, SharedWeights

# The 16 values of NF4 (QLoRA, https://arxiv.org/abs/2305.14314, appendix E), as bitsandbytes rounds them.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # codes that share a scale
MAX_TILES = 8192  # of one product's split sums
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


def block_scales(state) -> Tensor:
    """The scale of each block of 64 codes, fp32 `[N, G]`, of a bitsandbytes QuantState whose blocks do not cross rows."""
    absmax = state.absmax.flatten()
    if state.nested:
        inner = state.state2
        scales = inner.absmax.float().repeat_interleave(inner.blocksize)[: absmax.numel()]
        absmax = inner.code.float()[absmax.long()] * scales + state.offset.float()
    return absmax.float().repeat_interleave(state.blocksize // BLOCK).view(state.shape[0], -1)


def refuse_other_formats(name: str, state) -> None:
    columns = state.shape[1]
    if state.quant_type != "nf4" or state.blocksize % BLOCK or columns % state.blocksize:
        raise ValueError(
            f"{name} is {state.quant_type} in blocks of {state.blocksize} over rows of {columns}; the rollout engine takes nf4 "
            "in blocks of a multiple of 64 that divides the row"
        )


def float_weight(module: nn.Module) -> Tensor:
    """The weight `[N, K]` of a linear, dequantized if it is 4-bit."""
    if not is_4bit(module):
        return module.weight.data
    state = module.weight.quant_state
    codes = module.weight.data.view(torch.uint8).view(state.shape[0], -1).view(torch.int32)
    return nf4_dequantize(codes, block_scales(state).T.contiguous(), state.dtype)


def load_4bit(name: str, dtype: torch.dtype, device: torch.device, **options) -> nn.Module:
    """A hub model or local folder in NF4 with double quantization, or as it was quantized before; `options` go to from_pretrained.

    Checkpoints quantized already often come without `lm_head`: it is the embedding where the config ties the two, and an error
    otherwise, as is any other weight that is missing. transformers keeps stacked experts out of its 4-bit loading, so a model with
    experts is loaded on the host in `dtype`, and quantized from there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(name, **options)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if any(getattr(config.get_text_config(), key, None) for key in ("num_experts", "num_local_experts")):
        if is_quantized:
            raise ValueError(f"{name} is quantized already, which transformers can't load into stacked experts; give the 16-bit model")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        return quantize_nf4(model, dtype, device).eval()
    if not is_quantized:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model, info = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, device_map={"": device}, output_loading_info=True, **options
    )
    if model.config.get_text_config().tie_word_embeddings:
        model.tie_weights()
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            raise ValueError(f"{name}: the config ties lm_head to the embedding, and the loaded model does not")
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ValueError(f"{name} lacks {missing}, which its config does not tie to another weight")
    keep_storage_layout(model)
    return model.eval()


def quantize_nf4(
    model: nn.Module, dtype: torch.dtype, device: torch.device | None = None, prepare: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """Makes every linear but lm_head a bitsandbytes layer, and every stack of experts 4-bit as well (flex_moe), in place: what
    `load_4bit` gives, for weights that no file holds in 4 bits.

    One module is quantized after another on `device` (None: where it is), so that little more than the result ever lies there.
    `prepare` is called with each module before it is looked at.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    from flex_moe import quantize_experts  # which is built on this file

    lm_head = model.get_output_embeddings()

    def quantize_children(parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            if prepare is not None:
                prepare(child)
            if type(child) is nn.Linear and child is not lm_head:
                layer = Linear4bit(child.in_features, child.out_features, compute_dtype=dtype, quant_type="nf4", device="meta")
                weight = Params4bit(child.weight.data, requires_grad=False, quant_type="nf4", module=layer)
                layer.weight, layer.bias = weight.to(device or child.weight.device), child.bias
                setattr(parent, name, layer)
            elif is_expert_stack(child):
                setattr(parent, name, quantize_experts(child.to(device)))
            else:
                quantize_children(child)

    quantize_children(model)
    model.is_loaded_in_4bit = True  # what PEFT looks at to choose its own 4-bit layers
    keep_storage_layout(model)
    return model if device is None else model.to(device)


def is_expert_stack(module: nn.Module) -> bool:
    return all(getattr(module._parameters.get(name), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj"))


class NF4Projection(Product):
    """y = x Wᵀ + b over packed NF4 weights: fused for the few rows of a decode step, dequantized for a prefill."""

    def __init__(self, codes_NW: Tensor, scales_GN: Tensor, weight_dtype: torch.dtype, bias: Tensor | None):
        self.codes_NW, self.scales_GN, self.weight_dtype, self.bias = codes_NW, scales_GN, weight_dtype, bias
        run = partial(_nf4_product, codes_NW, scales_GN, weight_dtype, bias)
        self.product = Opaque(run, lambda x_TK: (x_TK.new_empty(x_TK.shape[0], codes_NW.shape[0]),))

    @classmethod
    def of(cls, weights: SharedWeights, linears: Sequence[nn.Module], bias: Tensor | None = None) -> NF4Projection:
        """`bias` is packed already, or the linears' own. Raises ValueError naming a weight in another 4-bit format."""
        states = [linear.weight.quant_state for linear in linears]
        for linear, state in zip(linears, states):
            refuse_other_formats(weights.name_of(linear.weight), state)
        sizes = [state.shape.numel() // 2 for state in states]
        codes = torch.empty(sum(sizes), dtype=torch.uint8, device=weights.device)
        for linear, room in zip(linears, codes.split(sizes)):
            weights.place(linear.weight, room.view(linear.weight.dtype).view(linear.weight.shape))
        scales_GN = torch.cat([block_scales(state) for state in states]).T.contiguous()
        codes_NW = codes.view(scales_GN.shape[1], -1).view(torch.int32)
        return cls(codes_NW, scales_GN, states[0].dtype, weights.pack_bias(linears) if bias is None else bias)

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self.product(x_TK)[0]


def _nf4_product(
    codes_NW: Tensor, scales_GN: Tensor, weight_dtype: torch.dtype, bias_N: Tensor | None, x_TK: Tensor
) -> tuple[Tensor]:
    if len(x_TK) <= MAX_FUSED_ROWS and use_triton(x_TK) and x_TK.dtype in (torch.bfloat16, torch.float16):
        return (nf4_linear(x_TK, codes_NW, scales_GN, bias_N),)
    weight_NK = nf4_dequantize(codes_NW, scales_GN, weight_dtype)
    return (F.linear(x_TK, weight_NK.to(x_TK.dtype), bias_N),)


# -------------------------------------------------------------------------------------------------------------------- kernels


def nf4_dequantize(codes_NW: Tensor, scales_GN: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 words of 8 codes `[N, K / 8]` and fp32 scales `[K / 64, N]` -> `[N, K]`, value * scale in fp32, rounded to `dtype`."""
    fits = use_triton(codes_NW) and dtype in (torch.bfloat16, torch.float16)
    return (nf4_dequantize_triton if fits else nf4_dequantize_reference)(codes_NW, scales_GN, dtype)


def nf4_dequantize_reference(codes_NW: Tensor, scales_GN: Tensor, dtype: torch.dtype) -> Tensor:
    bytes_ = codes_NW.view(torch.uint8)
    codes_NK = torch.stack([bytes_ >> 4, bytes_ & 15], dim=-1).flatten(1).int()
    values_NGB = torch.tensor(NF4_VALUES, device=codes_NW.device)[codes_NK].unflatten(1, (-1, BLOCK))
    return (values_NGB * scales_GN.T[:, :, None]).to(dtype).flatten(1)


@dataclass(frozen=True)
class NF4Options:
    """Tiles of the fused product."""

    block_n: int = 128  # weight rows per program
    split_k: int = 1  # programs that share the sum over K of one tile
    num_warps: int = 4
    num_stages: int = 4  # code tiles in flight per program


def nf4_options(T: int, N: int, K: int) -> NF4Options:
    """Tiles for T rows: three programs for each of an H200's 132 SMs, whose sums are long enough to fill their pipelines."""
    split_k = max(1, min(cdiv(384, cdiv(N, 64)), K // BLOCK // 6, 6))
    return NF4Options(64, split_k, num_warps=4 if T <= 64 else 8, num_stages=3)


def nf4_linear(
    x_TK: Tensor, codes_NW: Tensor, scales_GN: Tensor, bias_N: Tensor | None = None, options: NF4Options | None = None
) -> Tensor:
    """`x @ W.T (+ bias)` -> `[T, N]` for 16-bit x, with W's values rounded to x's dtype; sums in fp32, rounded once."""
    if use_triton(x_TK):
        return nf4_linear_triton(x_TK, codes_NW, scales_GN, bias_N, options)
    return nf4_linear_reference(x_TK, codes_NW, scales_GN, bias_N)


def nf4_linear_reference(x_TK: Tensor, codes_NW: Tensor, scales_GN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return F.linear(x_TK, nf4_dequantize_reference(codes_NW, scales_GN, x_TK.dtype), bias_N)


# How a code becomes a number costs more than reading it, so it is done without arithmetic. A block of 64 has 16 possible
# weights, value * scale rounded to 16 bits. A thread makes that table once for the part of a block that it holds, as two
# planes of 16 bytes (low and high), and then looks up four codes at a time with PRMT, which picks four bytes out of eight:
# twice for the lower and the upper half of a plane, by the low three bits of each code, and once between them by the fourth.
# That is 2.6 instructions for a weight; comparing and selecting takes about 20.


def _hex(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def table_asm(dtype: str) -> str:
    """PTX from a scale ($8) to the block's 16 weights: low bytes in $0 to $3, high bytes in $4 to $7."""
    lines = [".reg .f32 a, b;", ".reg .b32 p, q;"]
    for word in range(4):
        for pair, first in (("p", 4 * word), ("q", 4 * word + 2)):
            lines += [f"mul.rn.f32 {name}, $8, {_hex(NF4_VALUES[i])};" for name, i in (("a", first), ("b", first + 1))]
            lines.append(f"cvt.rn.{dtype}x2.f32 {pair}, b, a;")
        lines += [f"prmt.b32 ${word}, p, q, 0x6420;", f"prmt.b32 ${4 + word}, p, q, 0x7531;"]
    return "{\n" + "\n".join(lines) + "\n}"


def lookup_asm() -> str:
    """PTX from a word of 8 codes ($4) and a table ($5 to $12) to 8 weights, two in each of $0 to $3, in their order."""
    lines = [
        ".reg .b32 index, upper, low, high, m, n;",
        "and.b32 index, $4, 0x77777777;",
        "shr.b32 upper, $4, 1;",
        "lop3.b32 upper, upper, 0x44444444, 0x32103210, 0xea;",  # (a & b) | c: byte i of the lower half, or of the upper
    ]
    for half in (0, 1):
        if half:
            lines += ["shr.b32 index, index, 16;", "shr.b32 upper, upper, 16;"]
        for plane, first in (("low", 5), ("high", 9)):
            lines += [
                f"prmt.b32 m, ${first}, ${first + 1}, index;",
                f"prmt.b32 n, ${first + 2}, ${first + 3}, index;",
                f"prmt.b32 {plane}, m, n, upper;",
            ]
        # The first code of a byte is its high half.
        lines += [f"prmt.b32 ${2 * half}, low, high, 0x4051;", f"prmt.b32 ${2 * half + 1}, low, high, 0x6273;"]
    return "{\n" + "\n".join(lines) + "\n}"


if triton is not None:
    _TABLE_BF16, _TABLE_FP16 = tl.constexpr(table_asm("bf16")), tl.constexpr(table_asm("f16"))
    _LOOKUP = tl.constexpr(lookup_asm())
    _VALUES = tl.constexpr(NF4_VALUES)
    _EIGHT, _FOUR = tl.constexpr((tl.int32,) * 8), tl.constexpr((tl.int32,) * 4)


@jit
def _lookup(codes, scales, DTYPE: tl.constexpr):
    """Words of 8 codes `[N, W]` and scales `[N]` of one block -> four words of two weights each."""
    if DTYPE == tl.bfloat16:
        table_asm: tl.constexpr = _TABLE_BF16
    else:
        table_asm: tl.constexpr = _TABLE_FP16
    l0, l1, l2, l3, h0, h1, h2, h3 = tl.inline_asm_elementwise(
        table_asm, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,f", [scales[:, None]], dtype=_EIGHT, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        _LOOKUP, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [codes, l0, l1, l2, l3, h0, h1, h2, h3], dtype=_FOUR, is_pure=True, pack=1
    )


@jit
def _bits(codes, scales, DTYPE: tl.constexpr):
    value = tl.full(codes.shape, 0.0, tl.float32)
    for i in tl.static_range(16):
        value = tl.where(codes == i, _VALUES[i], value)
    return (value * scales[:, None]).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@jit
def _lookup_plain(codes, scales, DTYPE: tl.constexpr):
    """What `_lookup` computes, for Triton's interpreter, which runs no PTX."""
    w0 = _bits((codes >> 4) & 15, scales, DTYPE) | (_bits(codes & 15, scales, DTYPE) << 16)
    w1 = _bits((codes >> 12) & 15, scales, DTYPE) | (_bits((codes >> 8) & 15, scales, DTYPE) << 16)
    w2 = _bits((codes >> 20) & 15, scales, DTYPE) | (_bits((codes >> 16) & 15, scales, DTYPE) << 16)
    w3 = _bits((codes >> 28) & 15, scales, DTYPE) | (_bits((codes >> 24) & 15, scales, DTYPE) << 16)
    return w0, w1, w2, w3


@jit
def nf4_weights(codes, scales, DTYPE: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[BLOCK_N, BLOCK_K]` weights of one block of scales. The joins move nothing: each thread's weights are neighbours."""
    if PTX:
        w0, w1, w2, w3 = _lookup(codes, scales, DTYPE)
    else:
        w0, w1, w2, w3 = _lookup_plain(codes, scales, DTYPE)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3)).permute(0, 1, 3, 2).reshape(BLOCK_N, BLOCK_K // 2)
    first, second = words.to(tl.int16).to(DTYPE, bitcast=True), (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(first, second).reshape(BLOCK_N, BLOCK_K)


@jit
def nf4_dot(weights, x, acc, PTX: tl.constexpr):
    """acc + weights x, done before the next step's weights are made.

    On Hopper the tensor core reads the weights from registers while the program goes on, and Triton (3.6 at least, its issue 9433)
    waits for the first quarter of a step only before the next one writes to the same registers: codes were multiplied as weights,
    NaN among them. Sums that something in the loop looks at, here an empty instruction, are waited for.
    """
    acc = tl.dot(weights, x, acc, input_precision="ieee")
    if PTX and not tl.target_info.cuda_capability_geq(10, 0):  # later GPUs keep their sums elsewhere, and copy the weights
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@jit
def _nf4_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr, T, x_stride,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """y^T = W x^T: weight rows lie along the tensor core's 64-row side, the few tokens along its narrow one.

    The last program of a tile to finish adds up its splits, in order, so that the same input gives the same bits.
    """
    wait_for_inputs(PDL)
    BLOCK_K: tl.constexpr = 64
    dtype = x_ptr.dtype.element_ty
    tile_n, split, tile_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    k, w = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 8)
    steps: tl.constexpr = K // BLOCK_K
    x_ptrs = x_ptr + t[None, :] * x_stride + k[:, None]
    codes_ptrs = codes_ptr + n.to(tl.int64)[:, None] * (K // 8) + w[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(split * steps // SPLIT_K, (split + 1) * steps // SPLIT_K, num_stages=NUM_STAGES):
        x = tl.load(x_ptrs + step * BLOCK_K, mask=(t < T)[None, :], other=0.0)
        if N % BLOCK_N == 0:
            codes = tl.load(codes_ptrs + step * (BLOCK_K // 8), eviction_policy="evict_first")
            scales = tl.load(scales_ptr + step * N + n)
        else:
            codes = tl.load(codes_ptrs + step * (BLOCK_K // 8), mask=(n < N)[:, None], other=0, eviction_policy="evict_first")
            scales = tl.load(scales_ptr + step * N + n, mask=n < N, other=0.0)
        acc = nf4_dot(nf4_weights(codes, scales, dtype, PTX, BLOCK_N, BLOCK_K), x, acc, PTX)

    mask = (n < N)[:, None] & (t < T)[None, :]
    y_ptrs = y_ptr + t[None, :].to(tl.int64) * N + n[:, None]
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if SPLIT_K == 1:
        tl.store(y_ptrs, (acc + bias[:, None]).to(dtype), mask=mask)
    else:
        tile = tile_t * tl.num_programs(0) + tile_n
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        partial_ptrs = partial_ptr + tile.to(tl.int64) * (SPLIT_K * BLOCK_N * BLOCK_T) + offsets
        tl.store(partial_ptrs + split * (BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()  # all of the program's partial sums are out before it counts itself
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(arrivals_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for i in tl.range(0, SPLIT_K):
                total += tl.load(partial_ptrs + i * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            tl.store(y_ptrs, (total + bias[:, None]).to(dtype), mask=mask)


@jit
def _nf4_dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, N, K, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n.to(tl.int64)[:, None]
    for block in range(tl.program_id(1) * BLOCKS, tl.minimum((tl.program_id(1) + 1) * BLOCKS, K // 64)):
        codes = tl.load(codes_ptr + rows * (K // 8) + block * 8 + tl.arange(0, 8)[None, :], mask=(n < N)[:, None], other=0)
        scales = tl.load(scales_ptr + block * N + n, mask=n < N, other=0.0)
        weights = nf4_weights(codes, scales, out_ptr.dtype.element_ty, PTX, BLOCK_N, 64)
        tl.store(out_ptr + rows * K + block * 64 + tl.arange(0, 64)[None, :], weights, mask=(n < N)[:, None])


def nf4_dequantize_triton(codes_NW: Tensor, scales_GN: Tensor, dtype: torch.dtype) -> Tensor:
    (G, N), K = scales_GN.shape, codes_NW.shape[1] * 8
    assert codes_NW.is_contiguous() and scales_GN.is_contiguous() and codes_NW.shape[0] == N and K == G * BLOCK
    out_NK = torch.empty((N, K), dtype=dtype, device=codes_NW.device)
    block_n, blocks = 64, 8
    _nf4_dequantize_kernel[cdiv(N, block_n), cdiv(G, blocks)](
        codes_NW, scales_GN, out_NK, N, K, PTX=codes_NW.is_cuda, BLOCK_N=block_n, BLOCKS=blocks, num_warps=4
    )
    return out_NK


_arrivals: dict[torch.device, Tensor] = {}


def _tile_arrivals(device: torch.device) -> Tensor:
    """Counters of finished splits: zero between launches, shared by all products of a device (one stream at a time)."""
    if device not in _arrivals:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("NF4 product: run the step once before capturing it, so that its counters exist")
        _arrivals[device] = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    return _arrivals[device]


def nf4_linear_triton(
    x_TK: Tensor, codes_NW: Tensor, scales_GN: Tensor, bias_N: Tensor | None = None, options: NF4Options | None = None
) -> Tensor:
    (T, K), (G, N) = x_TK.shape, scales_GN.shape
    assert x_TK.stride(1) == 1 and codes_NW.is_contiguous() and scales_GN.is_contiguous()
    assert codes_NW.shape == (N, K // 8) and K == G * BLOCK
    y_TN = torch.empty((T, N), dtype=x_TK.dtype, device=x_TK.device)
    if not T:
        return y_TN
    options = options or nf4_options(T, N, K)
    block_t = min(max(16, next_power_of_2(T)), 128)
    grid = (cdiv(N, options.block_n), options.split_k, cdiv(T, block_t))
    partial = arrivals = None
    if options.split_k > 1:
        assert grid[0] * grid[2] <= MAX_TILES
        size = grid[0] * grid[1] * grid[2] * options.block_n * block_t
        partial, arrivals = torch.empty(size, dtype=torch.float32, device=x_TK.device), _tile_arrivals(x_TK.device)
    _nf4_linear_kernel[grid](
        x_TK, codes_NW, scales_GN, bias_N, y_TN, partial, arrivals, T, x_TK.stride(0),
        N=N, K=K, HAS_BIAS=bias_N is not None, PTX=x_TK.is_cuda, BLOCK_N=options.block_n, BLOCK_T=block_t,
        SPLIT_K=options.split_k, NUM_STAGES=options.num_stages, num_warps=options.num_warps, **pdl_options(T, shares_sm=True),
    )  # fmt: skip
    return y_TN
