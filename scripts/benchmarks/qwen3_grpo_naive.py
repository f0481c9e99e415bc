"""GRPO with `model.generate`, as TRL does it by itself: exact, light, and the yardstick of the other backends.

    python scripts/benchmarks/qwen3_grpo_naive.py                            # embedded model on a CPU, Qwen3-4B-Base on a GPU
"""

from __future__ import annotations

import sys

from unsloth_grpo_common import add_compile_arguments, build_grpo_parser, compile_training, run_grpo


def main(argv: list[str] | None = None) -> int:
    parser = build_grpo_parser(__doc__)
    add_compile_arguments(parser)
    args = parser.parse_args(argv)
    return run_grpo("naive", args, lambda trainer: compile_training(trainer, args))


if __name__ == "__main__":
    sys.exit(main())
