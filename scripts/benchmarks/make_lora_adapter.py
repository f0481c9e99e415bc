"""Writes a LoRA adapter in PEFT's format that is not a no-op: rank 32 on attention and MLP or stacked experts, B random, not zero.

    python scripts/benchmarks/make_lora_adapter.py --model_name qwen3-4b-base
    python scripts/benchmarks/qwen3_flex_inference.py --load_format dummy --model_name qwen3-4b-base \\
        --lora_adapter outputs/lora_rank32_fresh

Only the model's config is read, and only the adapter is allocated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from embedded_model import EmbeddedModelError, embedded_model_path
from flex_cli import integer
from flex_console import fail
from flex_models import EMBEDDED, MODEL_CONFIGS, find_config, hub_reachable, is_cached
from lora_adapters import TARGETS, save_fresh_adapter


def read_config(name: str) -> PreTrainedConfig:
    """Of the embedded model, a preset under model_configs/, a JSON file, a local folder or a hub model."""
    try:
        if name == EMBEDDED:
            return AutoConfig.from_pretrained(embedded_model_path())
        preset = name.rsplit("/", 1)[-1].lower()
        if Path(name).is_file() or any((MODEL_CONFIGS / f"{preset}{suffix}.json").is_file() for suffix in ("", "-text")):
            return find_config(name)
        if not Path(name).is_dir() and not is_cached(name) and not hub_reachable():
            raise OSError("no name under model_configs/, no JSON file, no local folder, and the model hub can't be reached")
        return AutoConfig.from_pretrained(name)
    except (EmbeddedModelError, OSError, ValueError) as error:
        fail(f"--model_name {name}: {str(error).splitlines()[0]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", default="unsloth/Qwen3-4B-Base", help="whose shapes the adapter has (default: %(default)s)")
    parser.add_argument("--lora_rank", type=integer(1), default=32, help="of the adapter (default: %(default)s)")
    parser.add_argument(
        "--targets", choices=TARGETS, default="all", help="experts: PEFT's target_parameters on a MoE's stacks (default: %(default)s)"
    )
    parser.add_argument("--seed", type=integer(0), default=0, help="(default: %(default)s)")
    parser.add_argument("--output", default="outputs/lora_rank32_fresh", help="folder to write (default: %(default)s)")
    args = parser.parse_args(argv)
    config = read_config(args.model_name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.name_or_path = args.model_name
    try:
        save_fresh_adapter(model, args.output, args.lora_rank, args.seed, args.targets)
    except ValueError as error:
        fail(f"--targets {args.targets}: {error}")
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
