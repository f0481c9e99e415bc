"""GRPO with the rollouts of this engine, in the trainer's own process and with its own weights.

    python scripts/benchmarks/qwen3_grpo_flex.py                             # embedded model on a CPU, Qwen3-4B-Base on a GPU
    python scripts/benchmarks/qwen3_grpo_flex.py --load_format dummy --model_name qwen3-4b-base --max_steps 10
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable

from flex_cli import add_walker_argument, integer, number
from flex_compile import COMPILE_MODES
from flex_console import fail
from flex_engine import HFWalker
from flex_lora import LORA_MODES
from unsloth_grpo_common import add_correction_argument, build_grpo_parser, run_grpo


def add_flex_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_walker_argument(group)
    group.add_argument(
        "--lora_mode", choices=LORA_MODES, default="active", help="active: the function that is trained; merged: faster, rounds it"
    )
    add_correction_argument(group)
    group.add_argument(
        "--correct_truncation", action="store_true", help="importance sampling against the truncated distribution, as with vLLM"
    )
    group.add_argument(
        "--max_batch_size", metavar="N", type=integer(1), help="sequences decoded at a time (default: a step's, at most 256)"
    )
    group.add_argument(
        "--kv_memory_gb", metavar="X", type=number(0, math.inf, open_low=True), help="of the KV cache (default: what a step needs)"
    )
    group.add_argument(
        "--attention_backend", choices=("auto", "flex", "triton", "sdpa"), default="auto", help="auto: what measured fastest"
    )
    group.add_argument(
        "--capture_cudagraph", action=argparse.BooleanOptionalAction, default=None, help="decode in CUDA graphs (default: on a GPU)"
    )
    group.add_argument(
        "--compile_walker", choices=COMPILE_MODES, default="off", help="the decode through torch.compile before it is captured"
    )
    group.add_argument(
        "--sleep", action=argparse.BooleanOptionalAction, default=True, help="give the KV pool's memory to the training step"
    )


def check_flex_arguments(args: argparse.Namespace) -> None:
    if args.load_in_4bit and args.lora_mode == "merged":
        fail("--lora_mode merged can't write to the 4-bit weights of --load_in_4bit; use --lora_mode active")
    if args.walker == "hf" and args.compile_walker != "off":
        fail("--compile_walker compiles a written walker, and --walker hf runs the model's own forward")


def attach(trainer, args: argparse.Namespace) -> Callable[[], dict[str, object]]:
    from flex_trl import attach_flex_rollouts

    options = {"max_batch_size": args.max_batch_size} if args.max_batch_size else {}
    generation = attach_flex_rollouts(
        trainer,
        lora_mode=args.lora_mode,
        walker_class=HFWalker if args.walker == "hf" else None,
        max_prompt_length=args.max_prompt_length,
        correct_truncation=args.correct_truncation,
        sleep=args.sleep,
        kv_memory_gb=args.kv_memory_gb,
        attention_backend=args.attention_backend,
        capture_cudagraph=args.capture_cudagraph,
        compile_walker=args.compile_walker,
        **options,
    )
    return lambda: dataclasses.asdict(generation.engine.stats())


def main(argv: list[str] | None = None) -> int:
    parser = build_grpo_parser(__doc__)
    add_flex_arguments(parser)
    args = parser.parse_args(argv)
    check_flex_arguments(args)
    return run_grpo(
        "flex", args, lambda trainer: attach(trainer, args), vllm_importance_sampling_correction=args.importance_sampling
    )


if __name__ == "__main__":
    sys.exit(main())
