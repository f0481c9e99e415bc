"""GRPO with vLLM in the trainer's process (TRL's colocate mode), in an environment that has it.

    python scripts/benchmarks/qwen3_grpo_vllm.py --load_format dummy --model_name qwen3-4b-base --max_steps 10
"""

from __future__ import annotations

import importlib.util
import sys

from flex_cli import number
from flex_console import fail
from unsloth_grpo_common import add_correction_argument, build_grpo_parser, run_grpo


def main(argv: list[str] | None = None) -> int:
    parser = build_grpo_parser(__doc__)
    group = parser.add_argument_group("vLLM")
    group.add_argument(
        "--gpu_memory_utilization", metavar="X", type=number(0, 1, open_low=True), default=0.4, help="share of the GPU it takes"
    )
    group.add_argument("--enable_sleep_mode", action="store_true", help="give weights and cache back during the training step")
    add_correction_argument(group)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("vllm") is None:
        fail("this driver needs vLLM: pip install vllm (in an environment of its own, it pins torch)")
    if args.load_in_4bit:
        fail("vLLM reloads the trainer's weights at each sync, which 4-bit weights are not made for: drop --load_in_4bit")
    return run_grpo(
        "vllm",
        args,
        needs_files=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.gpu_memory_utilization,
        vllm_enable_sleep_mode=args.enable_sleep_mode,
        vllm_importance_sampling_correction=args.importance_sampling,
    )


if __name__ == "__main__":
    sys.exit(main())
