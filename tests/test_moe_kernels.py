"""Mixture-of-experts layers: plain form against Hugging Face, kernels against the plain form, and what they compile to."""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

import flex_kernels
import flex_moe
import flex_moe_kernels as kernels
from conftest import SCRIPTS
from flex_linear import add_norm_triton
from flex_moe import ActiveExperts, Experts, MoEOptions, route_reference
from flex_moe_kernels import GroupedOptions, plan_experts_triton, route_triton
from test_kernels import HALF_TYPES, assert_close, randn

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def set_up(interpreter):
    torch.manual_seed(0)


def moe_block(normalize=True, implementation="eager", dtype=torch.float32) -> Qwen3MoeSparseMoeBlock:
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config).to(dtype).requires_grad_(False)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.15)
    return block.to(DEVICE)


def our_block(block: Qwen3MoeSparseMoeBlock, x_TC: torch.Tensor, bank: Experts | None = None) -> torch.Tensor:
    bank = bank or Experts(block.experts.gate_up_proj, block.experts.down_proj)
    logits_TE = nn.functional.linear(x_TC, block.gate.weight)
    return bank(x_TC, *flex_moe.route(logits_TE, block.gate.top_k, block.gate.norm_topk_prob))


def random_bank(E, C, I, dtype) -> Experts:
    return Experts(randn(E, 2 * I, C, dtype=dtype, scale=C**-0.5), randn(E, C, I, dtype=dtype, scale=I**-0.5))


def with_lora(bank: Experts, rank=16) -> ActiveExperts:
    factors = []
    for weight in (bank.gate_up_EIC, bank.down_ECI):
        E, N, K = weight.shape
        factors += [randn(E, rank, K, dtype=weight.dtype, scale=K**-0.5), randn(E, rank, N, dtype=weight.dtype, scale=0.2)]
    return ActiveExperts(bank, *factors)


def quantized(bank: Experts) -> Experts:
    return Experts(flex_moe.quantize_weight(bank.gate_up_EIC), flex_moe.quantize_weight(bank.down_ECI))


# --- routing and plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("T, E, top_k", [(5, 8, 2), (3, 128, 8), (2, 60, 4), (1, 4, 1), (4, 256, 8)])
def test_route(T, E, top_k, normalize, dtype):
    logits = torch.stack([torch.randperm(E) for _ in range(T)]).to(DEVICE, dtype) * 0.0625  # no ties
    weights, experts = route_triton(logits, top_k, normalize)
    expected_weights, expected_experts = route_reference(logits, top_k, normalize)
    assert torch.equal(experts, expected_experts) and weights.dtype == dtype and experts.dtype == torch.int32
    assert_close(weights, expected_weights)


def test_route_with_ties_takes_the_lowest_ids_and_with_nan_an_expert_that_exists():
    logits = torch.zeros(4, 16, device=DEVICE)
    logits[1, 5], logits[2, ::2], logits[3] = 1.0, -torch.inf, torch.nan
    weights, experts = route_triton(logits, 4, True)
    assert experts[:3].tolist() == [[0, 1, 2, 3], [5, 0, 1, 2], [1, 3, 5, 7]]
    assert_close(weights[0], torch.full((4,), 0.25, device=DEVICE))
    assert ((experts[3] >= 0) & (experts[3] < 16)).all()
    for row, reference in zip(weights[:3], route_reference(logits[:3], 4, True)[0]):
        assert_close(row, reference)  # which of the tied experts is chosen may differ, what they weigh can't


def routing(kind: str, T: int, E: int, top_k: int) -> torch.Tensor:
    if kind == "one expert":
        return torch.full((T, top_k), E - 2, dtype=torch.int32, device=DEVICE)
    experts = E - 1 if kind == "one without a token" else E
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(T)]).int().to(DEVICE)


@pytest.mark.parametrize("kind", ["random", "one expert", "one without a token"])
@pytest.mark.parametrize("T, E, top_k, block_m", [(1, 8, 2, 16), (37, 16, 3, 16), (300, 8, 8, 32), (21, 130, 8, 16)])
def test_plan_holds_every_pair_once(T, E, top_k, block_m, kind):
    top_k = min(top_k, E - 1)
    experts_TK = routing(kind, T, E, top_k)
    plan = plan_experts_triton(experts_TK, E, block_m)
    assert len(plan.experts_M) == kernels.max_tiles(experts_TK.numel(), E, block_m)
    used = plan.experts_M >= 0
    assert not used[int(used.sum()) :].any()
    listed = []
    for expert, tile in zip(plan.experts_M[used].tolist(), plan.pairs_MB[used].tolist()):
        pairs = [pair for pair in tile if pair >= 0]
        assert pairs and tile == pairs + [-1] * (block_m - len(pairs))
        listed += [(expert, pair) for pair in pairs]
    ids = experts_TK.flatten().tolist()
    assert listed == sorted((expert, pair) for pair, expert in enumerate(ids))


# --- the plain form is Hugging Face's --------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_the_layer_is_hugging_faces(implementation, normalize):
    block, x = moe_block(normalize, implementation), randn(11, 64)
    assert_close(our_block(block, x), block(x[None])[0])


def test_bf16_errs_no_more_than_hugging_face():
    block, x = moe_block(dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16)
    exact = our_block(copy.deepcopy(block).float(), x.float())
    theirs = (block(x[None])[0] - exact).abs().mean()
    assert (our_block(block, x) - exact).abs().mean() <= 1.05 * theirs


def test_add_norm_is_the_layer_then_residual_and_norm():
    bank, x, residual, norm = random_bank(8, 64, 32, torch.float32), randn(5, 64), randn(5, 64), randn(64)
    routed = flex_moe.route(randn(5, 8), 2, True)
    normed, total = bank.add_norm(x, *routed, residual, norm, 1e-6)
    expected = flex_kernels.rms_norm_reference(bank(x, *routed), norm, 1e-6, residual)
    assert_close(normed, expected[0])
    assert_close(total, expected[1])


def test_lora_beside_the_experts_is_lora_in_them():
    bank, x, routed = random_bank(8, 64, 32, torch.float32), randn(9, 64), flex_moe.route(randn(9, 8), 2, True)
    adapted = with_lora(bank)
    merged = [
        weight + torch.einsum("ern,erk->enk", low_rank.b_ERN, low_rank.a_ERK)
        for weight, low_rank in ((bank.gate_up_EIC, adapted.gate_up_low_rank), (bank.down_ECI, adapted.down_low_rank))
    ]
    assert_close(adapted(x, *routed), Experts(*merged)(x, *routed))
    only_down = ActiveExperts(bank, down_a_ERI=adapted.down_low_rank.a_ERK, down_b_ERC=adapted.down_low_rank.b_ERN)
    assert_close(only_down(x, *routed), Experts(bank.gate_up_EIC, merged[1])(x, *routed))


# --- kernels against the plain form ----------------------------------------------------------------------------------

TILES = GroupedOptions(block_n=32, block_k=32, num_stages=2)


def check_kernels(bank: Experts, x_TC, weights_TK, experts_TK) -> None:
    y_KTC = flex_moe.experts_triton(bank, x_TC, weights_TK, experts_TK)
    expected = flex_moe.experts_reference(bank, x_TC, weights_TK, experts_TK)
    assert y_KTC.shape == expected.shape and y_KTC.dtype == x_TC.dtype
    assert_close(y_KTC, expected)
    residual, norm = randn(*x_TC.shape, dtype=x_TC.dtype), randn(x_TC.shape[1], dtype=x_TC.dtype)
    normed, total = add_norm_triton(y_KTC, residual, norm, 1e-6)
    assert_close(total, y_KTC.float().sum(0) + residual.float(), x_TC.dtype)
    assert_close(normed, flex_kernels.rms_norm_reference(total, norm, 1e-6)[0])


@pytest.mark.parametrize("kind", ["random", "one expert", "one without a token"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("T, E, top_k, C, I", [(1, 4, 2, 64, 32), (19, 8, 3, 96, 64), (5, 8, 2, 80, 56)])
def test_grouped_products(T, E, top_k, C, I, dtype, kind):
    bank = random_bank(E, C, I, dtype)
    bank.options = MoEOptions(16, TILES, TILES)
    x, weights = randn(2 * T, C, dtype=dtype)[::2], torch.rand(T, top_k, device=DEVICE).to(dtype)
    check_kernels(bank, x, weights, routing(kind, T, E, top_k))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_grouped_products_by_the_copy_engine(dtype):
    bank = random_bank(8, 128, 64, dtype)
    bank.options = MoEOptions(16, GroupedOptions(32, 64, 4, 2, tma=True), GroupedOptions(64, 32, 4, 2, tma=True))
    check_kernels(bank, randn(7, 128, dtype=dtype), torch.rand(7, 3, device=DEVICE).to(dtype), routing("random", 7, 8, 3))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("C, rank", [(64, 16), (1024, 32)])
def test_low_rank_products(C, rank, dtype):
    """The wider one splits the sum of x aᵀ."""
    bank = random_bank(4, C, 48, dtype)
    bank.options = MoEOptions(16, *[GroupedOptions(64, 128, 4, 2)] * 2)
    adapted = with_lora(bank, rank)
    x, weights = randn(9, C, dtype=dtype), torch.rand(9, 2, device=DEVICE).to(dtype)
    experts = routing("one without a token", 9, 4, 2)
    for low_ranks in ((True, True), (True, False), (False, True)):
        gate_up, down = (part if on else None for part, on in zip((adapted.gate_up_low_rank, adapted.down_low_rank), low_ranks))
        some = copy.copy(adapted)
        some.gate_up_low_rank, some.down_low_rank = gate_up, down
        check_kernels(some, x, weights, experts)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("block_n", [16, 64])
def test_nf4_products(block_n, lora, dtype):
    bank = quantized(random_bank(4, 128, 64, dtype))
    bank.options = MoEOptions(16, *[GroupedOptions(block_n, 64, 4, 2)] * 2)
    x, weights = randn(9, 128, dtype=dtype), torch.rand(9, 2, device=DEVICE).to(dtype)
    check_kernels(with_lora(bank) if lora else bank, x, weights, routing("random", 9, 4, 2))


def test_every_batch_has_tiles_that_compute_the_same():
    bank = random_bank(4, 64, 32, HALF_TYPES[0])
    for T in (1, 6, 40, 150):
        weights, experts = torch.rand(T, 1, device=DEVICE).to(HALF_TYPES[0]), routing("random", T, 4, 1)
        check_kernels(bank, randn(T, 64, dtype=HALF_TYPES[0]), weights, experts)


def test_nf4_in_fp32_is_refused_by_the_kernels():
    bank = quantized(random_bank(4, 64, 64, torch.float32))
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        flex_moe.experts_triton(bank, randn(2, 64), torch.rand(2, 1, device=DEVICE), routing("random", 2, 4, 1))


COMPILE_FOR_HOPPER = """
import sys
sys.path.insert(0, sys.argv[1])
import kernel_bench
from flex_moe import MoEOptions
from flex_moe_kernels import GroupedOptions

jobs = [("moe", 64, "layer", MoEOptions()), ("moe", 64, "down", MoEOptions(32, down=GroupedOptions(128, tma=True)))]
jobs += [("moe", 128, "gate_up", MoEOptions(16, GroupedOptions(tma=True))), ("nf4", 64, "layer", MoEOptions())]
problems = [problem for job in jobs if (problem := kernel_bench._compile((90, *job)))]
sys.exit("; ".join(problems) or 0)
"""


def test_the_kernels_compile_for_hopper_without_a_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", COMPILE_FOR_HOPPER, str(SCRIPTS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    from_registers = 0
    for path in tmp_path.glob("*/_grouped_kernel.ttgir"):
        products = re.findall(r"warp_group_dot %.*", code := path.read_text())
        if any("dot_op" in product for product in products):  # nothing may be under way when the registers are written anew
            assert set(re.findall(r"pendings = (\d+)", code)) == {"0"}
            from_registers += 1
    assert from_registers == 2  # the two of NF4; weights that need no arithmetic are read from shared memory


# --- 4-bit experts ---------------------------------------------------------------------------------------------------


def test_nf4_codes_are_bitsandbytes():
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight_ENK = torch.randn(3, 40, 128)
    weight_ENK[1, 3, :64] = 0.0
    ours = flex_moe.quantize_weight(weight_ENK)
    assert ours.shape == weight_ENK.shape and ours.nbytes == weight_ENK.numel() * 9 // 16
    for expert, weight_NK in enumerate(weight_ENK):
        theirs = dequantize_4bit(*quantize_4bit(weight_NK, quant_type="nf4", blocksize=64))
        torch.testing.assert_close(ours[expert], theirs)


def test_nf4_experts_stand_in_for_hugging_faces_and_pass_gradients():
    block = moe_block()
    plain = copy.deepcopy(block)
    block.experts = flex_moe.quantize_experts(block.experts)
    bank = block.experts.bank()
    for name, weight in (("gate_up_proj", bank.gate_up_EIC), ("down_proj", bank.down_ECI)):
        setattr(plain.experts, name, nn.Parameter(torch.stack([weight[e] for e in range(16)]), requires_grad=False))
    x = randn(1, 11, 64).requires_grad_()
    ours, theirs = block(x), plain(x)
    assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    for actual, expected in zip(torch.autograd.grad(ours, x, upstream), torch.autograd.grad(theirs, x, upstream)):
        assert_close(actual, expected)
    assert_close(our_block(block, x[0].detach(), Experts(plain.experts.gate_up_proj, plain.experts.down_proj)), ours[0].detach())
    assert bank.gate_up_EIC.codes_EGNW.data_ptr() == block.experts.gate_up_codes.data_ptr()
    with pytest.raises(ValueError, match="scales have been cast to torch.bfloat16"):
        block.experts.to(torch.bfloat16).bank()


def test_what_nf4_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="experts of 48 input features"):
        flex_moe.quantize_weight(torch.zeros(2, 64, 48))
    block = moe_block()
    block.experts.act_fn = nn.GELU()
    with pytest.raises(ValueError, match="Qwen3MoeExperts: the activation GELU"):
        flex_moe.quantize_experts(block.experts)


def test_bytes_read_are_those_of_the_experts_hit():
    bank = random_bank(8, 64, 32, torch.bfloat16)
    one = 3 * 64 * 32 * 2
    assert flex_moe.expert_bytes_read(bank, routing("one expert", 9, 8, 2)) == one
    assert flex_moe.expert_bytes_read(bank, torch.tensor([[0, 3], [3, 5]])) == 3 * one
