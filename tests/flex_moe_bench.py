"""Qwen3-MoE in the engine against plain transformers: the same prompts, sampling and lengths, a backend a process.

    python tests/flex_moe_bench.py --backend flex --batch_sizes 16,32,48,64
    HF_ATTN_IMPL=sdpa python tests/flex_moe_bench.py --backend hf_naive --batch_sizes 16,32,48,64
    python tests/flex_moe_bench.py --backend hf_naive --load_in_4bit --n_rounds 1

hf_naive is `generate` of transformers, and imports nothing else (torch beneath it); HF_ATTN_IMPL is its attention: eager, sdpa,
flash_attention_2, 3 or 4. In 4 bits it quantizes attention alone, since transformers keeps stacked experts in 16. Weights are random
at real shapes unless --model_name is a local folder. What fails is quoted, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts" / "benchmarks"
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and a seed -> completions


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def integers(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if min(values) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, not {min(values)}")
        return values

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    preset = "qwen3-30b-a3b-instruct-2507" if ON_GPU else "qwen3-moe-tiny"
    add("--backend", choices=("flex", "hf_naive"), default="flex", help="(default: %(default)s)")
    add("--model_name", default=preset, help="a name under model_configs/, or a local model folder (default: %(default)s)")
    add("--load_in_4bit", action="store_true", help="bitsandbytes NF4")
    add("--batch_sizes", type=integers, default="16,32,48,64" if ON_GPU else "2,4", help="(default: %(default)s)")
    add("--prompt_tokens", type=int, default=128 if ON_GPU else 8, help="random token ids (default: %(default)s)")
    add("--max_new_tokens", type=int, default=256 if ON_GPU else 8, help="of every completion (default: %(default)s)")
    add("--n_rounds", type=int, default=5 if ON_GPU else 2, help="measured, after one to warm up (default: %(default)s)")
    add("--compile_mode", choices=("off", "walker", "walker_fullgraph"), default="off", help="flex alone (default: %(default)s)")
    add("--compile_opts", choices=("stock", "unsloth_O3", "inference_freeze"), default="stock", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    add("--json", metavar="FILE", help="where the figures go")
    args = parser.parse_args(argv)
    if args.backend == "hf_naive" and args.compile_mode != "off":
        parser.error("--compile_mode is the engine's; --backend hf_naive has none")
    return args


# --------------------------------------------------------------------------------------------------------------- transformers


def load_hf(args: argparse.Namespace, attention: str | None) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    options = {"attn_implementation": attention} if attention else {}
    if Path(args.model_name).is_dir():
        if args.load_in_4bit:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=DTYPE
            )
        return AutoModelForCausalLM.from_pretrained(args.model_name, dtype=DTYPE, device_map={"": DEVICE}, **options).eval()
    values = json.loads((SCRIPTS / "model_configs" / f"{args.model_name.lower()}.json").read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(args.seed)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, **options).eval()
    return quantize_linears(model) if args.load_in_4bit else model


def quantize_linears(model: torch.nn.Module) -> torch.nn.Module:
    """What from_pretrained does with a BitsAndBytesConfig, for weights that are in no file."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE)
    model = replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    for name, linear in linears.items():
        layer = model.get_submodule(name)
        if layer is not linear:
            weight = type(layer.weight)(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", module=layer)
            layer.weight, layer.bias = weight.to(DEVICE), linear.bias
    return model


def hf_naive(args: argparse.Namespace) -> Generate:
    from transformers import GenerationConfig

    attention = os.environ.get("HF_ATTN_IMPL")
    if attention not in (None, *ATTENTION):
        raise SystemExit(f"error: HF_ATTN_IMPL must be one of {', '.join(ATTENTION)}, not {attention!r}")
    model = load_hf(args, attention)
    print(f"hf_naive, attention {model.config._attn_implementation}, experts {model.config._experts_implementation}")
    length = args.max_new_tokens
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length, min_new_tokens=length, pad_token_id=0)
    model.generation_config = GenerationConfig()

    def generate(prompts: list[list[int]], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        ids = torch.tensor(prompts, device=DEVICE)
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return output[:, ids.shape[1] :].tolist()

    return generate


# --------------------------------------------------------------------------------------------------------------------- engine


def flex(args: argparse.Namespace) -> Generate:
    sys.path.insert(0, str(SCRIPTS))
    from flex_cli import build_parser
    from flex_engine import EngineConfig, FlexEngine, SamplingParams
    from flex_models import load_model
    from qwen3_moe_flex import FlexMoEInference

    flags = ["--model_name", args.model_name, "--seed", str(args.seed)]
    flags += [] if Path(args.model_name).is_dir() else ["--load_format", "dummy"]
    flags += ["--load_in_4bit"] if args.load_in_4bit else []
    model, _ = load_model(build_parser(None, args.model_name).parse_args(flags))
    walker = FlexMoEInference(model, compile_walker=args.compile_mode, compile_opts=args.compile_opts)
    engine = None

    def generate(prompts: list[list[int]], seed: int) -> list[list[int]]:
        nonlocal engine
        if engine is None or engine.config.max_batch_size != len(prompts):
            engine = None  # its pool and graphs go before the next are made
            config = EngineConfig(max_batch_size=len(prompts), max_seq_len=args.prompt_tokens + args.max_new_tokens)
            engine = FlexEngine(walker, config=config)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=args.max_new_tokens, seed=seed, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    return generate


# ------------------------------------------------------------------------------------------------------------------- protocol


def measure(generate: Generate, batch_size: int, vocab_size: int, args: argparse.Namespace) -> list[float]:
    """Tok/s of each round: a whole call, prefill included."""
    generator = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(vocab_size, (batch_size, args.prompt_tokens), generator=generator).tolist()
    rates = []
    for round_index in range(args.n_rounds + 1):
        started = time.perf_counter()
        completions = generate(prompts, args.seed + round_index)
        seconds = time.perf_counter() - started
        assert [len(completion) for completion in completions] == [args.max_new_tokens] * batch_size
        rates.append(batch_size * args.max_new_tokens / seconds)
    return rates[1:]


def reserved_gb(backend: str) -> float:
    """Most memory reserved since the start, loading included; the engine's KV pool lies outside of PyTorch's allocator."""
    if backend == "flex":
        from flex_memory import peak_memory_gb

        return peak_memory_gb()[1]
    return torch.cuda.max_memory_reserved() / 1e9


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    name = args.backend if args.compile_mode == "off" else f"{args.backend}, {args.compile_mode}, {args.compile_opts}"
    name += ", 4-bit" if args.load_in_4bit else ""
    folder = Path(args.model_name)
    path = folder / "config.json" if folder.is_dir() else SCRIPTS / "model_configs" / f"{args.model_name.lower()}.json"
    if not path.is_file():
        raise SystemExit(f"error: --model_name {args.model_name} is neither a folder with a config.json nor a name under model_configs/")
    vocab_size = json.loads(path.read_text())["vocab_size"]
    rows, failed = [], False
    try:
        generate = {"flex": flex, "hf_naive": hf_naive}[args.backend](args)
    except Exception as error:  # whatever a library says is what is to be known
        print(f"{name}: {type(error).__name__}: {error}")
        return 1
    print("| backend | batch | tok/s | min | max | GB reserved |\n" + "|" + " --- |" * 6, flush=True)
    for size in args.batch_sizes:
        try:
            rates = measure(generate, size, vocab_size, args)
        except Exception as error:
            print(f"{name}, batch {size}: {type(error).__name__}: {error}")
            failed = True
            continue
        reserved = reserved_gb(args.backend) if ON_GPU else None
        rows.append({"backend": name, "batch": size, "tok_per_s": rates, "reserved_gb": reserved})
        shown = "–" if reserved is None else f"{reserved:.1f}"
        print(f"| {name} | {size} | {statistics.median(rates):.0f} | {min(rates):.0f} | {max(rates):.0f} | {shown} |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
