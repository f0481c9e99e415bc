"""4-bit weights: bitsandbytes' layers through the engine, shared with a QLoRA trainer; the kernels and their PTX."""

import copy
import re
import struct

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import flex_lora
import flex_nf4 as nf4
import lora_checks as lc
import tiny_models as tm
from flex_engine import EngineConfig, FlexEngine, SamplingParams
from lora_adapters import LINEAR_TARGETS
from numerics import engine_last_logits
from qwen3_flex_inference import Qwen3Walker

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = tm.random_prompts([5, 20, 33])
SIZES = dict(intermediate_size=128)  # rows of whole blocks


def saved(path, model=None) -> str:
    (model or tm.qwen3(**SIZES)).save_pretrained(path)
    return str(path)


def load(path, double_quant=True, dtype=torch.float32):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant, bnb_4bit_compute_dtype=dtype
    )
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=dtype)
    nf4.keep_storage_layout(model)
    return model.eval()


def adapt(model, **options):
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": list(LINEAR_TARGETS), "init_lora_weights": False, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**chosen)).eval()


def engine_of(model, **options) -> FlexEngine:
    config = EngineConfig(max_batch_size=4, max_seq_len=96, page_size=16)
    return FlexEngine(Qwen3Walker(model, **options), config=config)


@torch.no_grad()
def trainer_logits(model) -> torch.Tensor:
    return torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS])


def assert_serves(engine, model, atol=2e-4) -> None:
    torch.testing.assert_close(engine_last_logits(engine, PROMPTS), trainer_logits(model), atol=atol, rtol=1e-4)


def train_step(model, lr=0.02) -> None:
    model.train()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)
    ids = torch.tensor([PROMPTS[1]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()


def codes_of(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if isinstance(parameter, Params4bit)]


# --- the engine on bitsandbytes' layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("double_quant", [False, True])
def test_base_and_lora_serve_what_bitsandbytes_and_peft_compute(double_quant, tmp_path):
    model = load(saved(tmp_path), double_quant)
    plain = trainer_logits(model)
    engine = engine_of(model)
    assert_serves(engine, model)
    assert torch.equal(trainer_logits(model), plain), "the trainer's own forward has changed"
    adapted = adapt(model)
    engine.refresh_lora()
    assert engine.walker.adapters.mode == "active"
    assert (trainer_logits(adapted) - plain).abs().max() > 0.1
    assert_serves(engine, adapted)
    for _ in range(2):
        train_step(adapted)
        engine.refresh_lora()
        assert_serves(engine, adapted)


@pytest.mark.parametrize(
    "options",
    [dict(use_dora=True), dict(lora_bias=True), dict(target_modules=["v_proj", "lm_head"]), dict(modules_to_save=["lm_head"])],
    ids=["DoRA", "lora_bias", "lm_head", "modules_to_save"],
)
def test_lora_kinds_over_4bit(options, tmp_path):
    adapted = adapt(load(saved(tmp_path, tm.qwen3(attention_bias=True, **SIZES))), **options)
    assert_serves(engine_of(adapted), adapted, atol=1e-3)


def test_the_codes_are_shared_and_a_qlora_trainer_learns_the_same(tmp_path):
    path = saved(tmp_path)
    adapted, plain = adapt(load(path)), adapt(load(path))
    before = lc.fingerprint(codes_of(adapted))
    engine = engine_of(adapted)
    base = adapted.get_base_model().model.layers[0]
    packed = engine.walker.layers[0].gate_up.base.codes_NW.untyped_storage().data_ptr()
    for linear in (base.mlp.gate_proj, base.mlp.up_proj):
        assert linear.base_layer.weight.untyped_storage().data_ptr() == packed
    for _ in range(3):
        for model in (adapted, plain):
            train_step(model)
        engine.refresh_lora()
        engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    for (name, ours), (_, theirs) in zip(adapted.named_parameters(), plain.named_parameters()):
        assert torch.equal(ours, theirs), name
    assert lc.fingerprint(codes_of(adapted)) == before
    report = lc.verify_no_drift(engine, cycles=2, max_tokens=4)
    assert report.passed and report.lora_mode == "active"


def test_moved_codes_are_taken_back_and_other_weights_refused(tmp_path):
    model = load(saved(tmp_path))
    engine = engine_of(model)
    for _, parameter in codes_of(model):
        parameter.data = parameter.data.clone()
    engine.refresh_lora()
    assert_serves(engine, model)
    linear = model.model.layers[0].mlp.up_proj
    slot = next(slot for slot in engine.walker.weights.slots.values() if slot.holds(linear.weight))
    assert linear.weight.data_ptr() == slot.tensor.data_ptr()
    linear.weight.data = torch.zeros(linear.weight.shape)
    with pytest.raises(ValueError, match="layers.0.mlp.up_proj.weight: shape and dtype"):
        engine.refresh_lora()


def test_16_bit_compute_dtype_after_kbit_preparation(tmp_path):
    """`prepare_model_for_kbit_training` casts what is not quantized to fp32; the engine computes in the layers' compute dtype."""
    model = load(saved(tmp_path), dtype=torch.bfloat16)
    adapted = adapt(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
    assert adapted.get_input_embeddings().weight.dtype == torch.float32
    engine = engine_of(adapted)
    assert engine.walker.dtype == torch.bfloat16
    reference = trainer_logits(adapted)
    assert (engine_last_logits(engine, PROMPTS) - reference).abs().mean() < 0.05 * reference.abs().mean()


def test_what_4bit_refuses(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="q_proj is 4-bit, which can't be merged into: use --lora_mode active"):
        Qwen3Walker(adapt(load(path)), lora_mode="merged")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    fp4 = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight is fp4"):
        Qwen3Walker(fp4)
    with pytest.raises(ValueError, match="in blocks of 64 over rows of 96"):
        Qwen3Walker(load(saved(tmp_path / "odd", tm.qwen3(intermediate_size=96))))
    half = tm.qwen3(**SIZES)
    half.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="up_proj is a Linear with a weight of torch.int8"):
        Qwen3Walker(half)


# --- loading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_checkpoint_without_lm_head(tied, tmp_path):
    model = nf4.load_4bit(saved(tmp_path / "16", tm.qwen3(tie_word_embeddings=tied, **SIZES)), torch.float32, torch.device("cpu"))
    assert isinstance(model.model.layers[0].mlp.up_proj, Linear4bit) and model.model.layers[0].mlp.up_proj.weight.quant_state.nested
    expected = trainer_logits(model)
    path = saved(tmp_path / "4", model)
    file = tmp_path / "4" / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}
    save_file(state, file, metadata={"format": "pt"})
    if not tied:
        with pytest.raises(ValueError, match="lacks lm_head.weight"):
            nf4.load_4bit(path, torch.float32, torch.device("cpu"))
        return
    again = nf4.load_4bit(path, torch.float32, torch.device("cpu"))
    engine = engine_of(again)
    torch.testing.assert_close(trainer_logits(again), expected, atol=2e-3, rtol=1e-3)
    assert_serves(engine, again)
    assert engine.walker.lm_head.weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()


def test_random_weights_in_4bit():
    model = nf4.quantize_nf4(tm.qwen3(attention_bias=True, **SIZES), torch.float32)
    assert type(model.lm_head) is nn.Linear
    adapted = adapt(model)
    assert type(adapted.get_base_model().model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert_serves(engine_of(adapted), adapted)


# --- the gradient that goes missing ----------------------------------------------------------------------------------------


def force_repacking(model) -> None:
    """What bitsandbytes does in an evaluation forward where the CPU has AVX512-BF16."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu as repack

    for module in model.modules():
        if nf4.is_4bit(module):
            module.weight.data, module.weight.quant_state = repack(module.weight.data, module.weight.quant_state)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("repacked", [False, True])
def test_lora_keeps_its_gradient_after_an_evaluation_forward(repacked, double_quant, tmp_path):
    model = load(saved(tmp_path), double_quant)
    for module in model.modules():
        if nf4.is_4bit(module):
            module.support_avx512bf16_for_cpu = True  # as it is on such a CPU
    codes = {name: parameter.data.clone() for name, parameter in codes_of(model)}
    expected = trainer_logits(load(tmp_path, double_quant))
    if repacked:
        force_repacking(model)
    adapted = adapt(model)
    engine = engine_of(adapted)
    with torch.no_grad(), adapted.disable_adapter():
        # The codes are as before; the scales were rounded to bfloat16 where they had been repacked.
        tolerance = dict(atol=0.3, rtol=0.1) if repacked else dict(atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(trainer_logits(adapted), expected, **tolerance)
    for name, parameter in codes_of(adapted):
        original = codes[name.removeprefix("base_model.model.").replace("base_layer.", "")]
        assert torch.equal(parameter.data.flatten(), original.flatten())
    adapted.eval()
    trainer_logits(adapted)
    assert_serves(engine, adapted)
    adapted.train()
    ids = torch.tensor([PROMPTS[1]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    for name, parameter, _ in flex_lora.active_tensors(adapted):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


# --- kernels ---------------------------------------------------------------------------------------------------------------


def random_codes(N, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2**31), 2**31 - 1, (N, K // 8), generator=generator).int()
    return codes.to(DEVICE), (torch.rand(K // 64, N, generator=generator) * 0.1).to(DEVICE)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_reads_what_bitsandbytes_stores(dtype, double_quant):
    weight = (torch.randn(96, 192, generator=torch.Generator().manual_seed(0)) * 0.1).to(dtype)
    layer = Linear4bit(192, 96, bias=False, quant_type="nf4", compress_statistics=double_quant)
    quantized = Params4bit(weight, quant_type="nf4", compress_statistics=double_quant, module=layer)
    layer.weight = quantized.to("cpu")
    expected = dequantize_4bit(layer.weight.data, copy.deepcopy(layer.weight.quant_state))
    actual = nf4.float_weight(layer)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-7)
    assert (actual == expected).float().mean() > 0.99
    assert (weight - actual).abs().mean() < 0.02


# The interpreter truncates to bfloat16, and multiplies it as if it were integers.
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("N, K", [(64, 64), (200, 192), (33, 1088)])
def test_dequantize_kernel(interpreter, N, K, dtype):
    codes, scales = random_codes(N, K)
    assert torch.equal(nf4.nf4_dequantize_triton(codes, scales, dtype), nf4.nf4_dequantize_reference(codes, scales, dtype))


@pytest.mark.parametrize(
    "T, N, K, block_n, split_k",
    [(1, 64, 64, 64, 1), (5, 200, 256, 128, 1), (17, 100, 192, 64, 3), (130, 128, 128, 64, 2)],
)  # fmt: skip
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_linear_kernel(interpreter, T, N, K, block_n, split_k, dtype, with_bias):
    codes, scales = random_codes(N, K)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, K + 8, generator=generator).to(DEVICE, dtype)[:, 8:]
    bias = torch.randn(N, generator=generator).to(DEVICE, dtype) if with_bias else None
    options = nf4.NF4Options(block_n=block_n, split_k=split_k)
    actual = nf4.nf4_linear_triton(x, codes, scales, bias, options)
    weight = nf4.nf4_dequantize_reference(codes, scales, dtype)
    expected = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=0.01)
    assert torch.equal(actual, nf4.nf4_linear_triton(x, codes, scales, bias, options)), "the split counters were left dirty"


def test_options_suit_every_shape():
    for T in (1, 64, 256):
        for N, K in ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (576, 1536), (64, 64)):
            options = nf4.nf4_options(T, N, K)
            assert 1 <= options.split_k <= max(1, K // 64) and -(-N // options.block_n) * 2 <= nf4.MAX_TILES


def run_ptx(text: str, registers: dict[str, int]) -> None:
    """The few instructions that the lookups are made of, on 32-bit registers."""

    def value(operand: str) -> int:
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return int(operand, 16) if operand.startswith("0x") else int(operand) if operand.isdigit() else registers[operand]

    def number(operand: str) -> np.float32:
        return np.float32(struct.unpack("<f", struct.pack("<I", value(operand)))[0])

    for line in text.strip("{}\n").splitlines():
        name, _, rest = line.rstrip(";").partition(" ")
        operands = re.split(r",\s*", rest)
        target, *sources = operands
        if name == ".reg":
            continue
        if name == "mul.rn.f32":
            result = struct.unpack("<I", struct.pack("<f", number(sources[0]) * number(sources[1])))[0]
        elif name.startswith("cvt.rn."):
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[name.split(".")[2].removesuffix("x2")]
            upper, lower = (int(torch.tensor(number(s)).to(dtype).view(torch.int16)) & 0xFFFF for s in sources)
            result = upper << 16 | lower
        elif name == "prmt.b32":
            pool = struct.pack("<II", value(sources[0]), value(sources[1]))
            selector = value(sources[2]) & 0xFFFF
            nibbles = [selector >> 4 * i & 15 for i in range(4)]
            assert max(nibbles) < 8, "the eighth bit would copy a sign"
            result = int.from_bytes(bytes(pool[nibble] for nibble in nibbles), "little")
        elif name == "and.b32":
            result = value(sources[0]) & value(sources[1])
        elif name == "shr.b32":
            result = value(sources[0]) >> value(sources[1])
        elif name == "lop3.b32":
            a, b, c = map(value, sources[:3])
            table, result = value(sources[3]), 0
            for bit in range(32):
                result |= (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit
        else:
            raise AssertionError(line)
        registers[target] = result


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_the_ptx_looks_up_what_the_reference_computes(name, dtype):
    rng = np.random.default_rng(0)
    for _ in range(20):
        scale = np.float32(rng.uniform(0, 0.2))
        word = int(rng.integers(0, 2**32))
        registers = {"$8": struct.unpack("<I", struct.pack("<f", scale))[0]}
        run_ptx(nf4.table_asm(name), registers)
        lookup = {"$4": word, **{f"${5 + i}": registers[f"${i}"] for i in range(8)}}
        run_ptx(nf4.lookup_asm(), lookup)
        words = torch.tensor([lookup[f"${i}"] - (1 << 32 if lookup[f"${i}"] >> 31 else 0) for i in range(4)], dtype=torch.int32)
        codes = torch.tensor([[word - (1 << 32 if word >> 31 else 0)] + [0] * 7], dtype=torch.int32)
        expected = nf4.nf4_dequantize_reference(codes, torch.tensor([[float(scale)]]), dtype)[0, :8]
        assert torch.equal(words.view(dtype), expected)
