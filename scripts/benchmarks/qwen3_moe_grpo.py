"""GRPO with a mixture of experts: Qwen3-MoE's rollouts from this engine, or from `model.generate` as the yardstick.

    python scripts/benchmarks/qwen3_moe_grpo.py              # Qwen3-30B-A3B-Instruct-2507 on a GPU, a tiny random one on a CPU
    python scripts/benchmarks/qwen3_moe_grpo.py --load_format dummy --max_steps 5                   # random weights at its shapes
    python scripts/benchmarks/qwen3_moe_grpo.py --load_format dummy --max_steps 5 --load_in_4bit --compile_walker walker_fullgraph
    python scripts/benchmarks/qwen3_moe_grpo.py --backend naive --load_format dummy --max_steps 5

Everything but the rollout is the same as in the dense drivers. The experts stay frozen by default: PEFT's adapter of stacked experts
makes the changed stack anew in each forward of the training step.
"""

from __future__ import annotations

import sys

from flex_console import fail
from lora_adapters import TARGETS
from qwen3_grpo_flex import add_flex_arguments, attach, check_flex_arguments
from qwen3_moe_flex import DEFAULT_MODEL, TINY_MODEL
from unsloth_grpo_common import build_grpo_parser, run_grpo


def main(argv: list[str] | None = None) -> int:
    parser = build_grpo_parser(__doc__, DEFAULT_MODEL, TINY_MODEL)
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--backend", choices=("flex", "naive"), default="flex", help="what generates")
    group.add_argument(
        "--lora_targets", choices=TARGETS, default="attention", help="what is trained; experts in 4 bits stay as they are"
    )
    for_both = vars(parser.parse_args([]))
    add_flex_arguments(parser)
    args = parser.parse_args(argv)
    check_flex_arguments(args)
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    if args.lora_rank == 0 and "lora_targets" in given:
        fail(f"--lora_targets {args.lora_targets} is of an adapter, and --lora_rank 0 trains every weight")
    if args.backend == "naive":
        if engine_flags := [f"--{name}" for name in given if name not in for_both]:
            fail(f"--backend naive has no engine for {', '.join(engine_flags)}")
        return run_grpo("naive", args)
    return run_grpo(
        "flex", args, lambda trainer: attach(trainer, args), vllm_importance_sampling_correction=args.importance_sampling
    )


if __name__ == "__main__":
    sys.exit(main())
