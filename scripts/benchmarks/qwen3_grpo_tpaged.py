"""GRPO with transformers' continuous batching over its paged cache.

    python scripts/benchmarks/qwen3_grpo_tpaged.py --persistent_cb           # embedded model on a CPU, Qwen3-4B-Base on a GPU

TRL has a path of its own to continuous batching (`use_transformers_continuous_batching`). It is not taken: with bf16 it casts
the policy, fp32 adapter included, to bfloat16 for good, and it leaves the model in training mode during evaluation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from transformers import ContinuousBatchingConfig

import flash_attn_fa4_shim
from flex_weights import unwrapped
from persistent_cb import PersistentCB, batching_config
from unsloth_grpo_common import add_compile_arguments, build_grpo_parser, compile_training, run_grpo

MAX_MEMORY_PERCENT = 0.5  # of what is free: TRL's own choice, which leaves room for the training step


def attach(trainer, args: argparse.Namespace) -> Callable[[], dict[str, object]]:
    """Puts continuous batching where TRL generates; the policy runs in evaluation mode and is put back as it was."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if args.attn_impl:
        if args.attn_impl == flash_attn_fa4_shim.IMPLEMENTATION:
            flash_attn_fa4_shim.install()
        unwrapped(model).set_attn_implementation(args.attn_impl)
    completions = args.n_prompts * args.num_generations
    batching = PersistentCB(model, trainer.generation_config, sized_config(args, completions), args.persistent_cb)

    def generate(prompt_ids: list[list[int]], *_, **__) -> tuple[list[list[int]], None]:
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return batching.generate(prompt_ids, [args.max_completion_length] * len(prompt_ids)), None
        finally:
            model.train(training)

    trainer._generate_single_turn = generate
    return compile_training(trainer, args)


def sized_config(args: argparse.Namespace, completions: int) -> ContinuousBatchingConfig:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = [[0] * args.max_prompt_length] * completions
    config = batching_config(device, longest, [args.max_completion_length] * completions, use_cuda_graph=args.capture_cudagraph)
    if device.type == "cuda":
        config.max_memory_percent = MAX_MEMORY_PERCENT
    if args.persistent_cb:
        config.allow_block_sharing = False  # a kept cache would answer from keys of weights that are no more
    return config


def main(argv: list[str] | None = None) -> int:
    parser = build_grpo_parser(__doc__)
    group = parser.add_argument_group("continuous batching")
    group.add_argument("--attn_impl", metavar="NAME", help="attention, as from_pretrained takes it (default: transformers' choice)")
    group.add_argument("--persistent_cb", action="store_true", help="keep manager, cache and graphs from step to step")
    group.add_argument(
        "--capture_cudagraph", action=argparse.BooleanOptionalAction, default=None, help="default: where there is a GPU"
    )
    add_compile_arguments(parser)
    args = parser.parse_args(argv)
    return run_grpo("tpaged", args, lambda trainer: attach(trainer, args))


if __name__ == "__main__":
    sys.exit(main())
