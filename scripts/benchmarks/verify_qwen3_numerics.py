"""Is the engine right? Qwen3 or Llama in the engine against plain Hugging Face on the same prompts; exit status 1 if a gate fails.

    python scripts/benchmarks/verify_qwen3_numerics.py                       # embedded model on a CPU, Qwen3-4B-Base on a GPU
    python scripts/benchmarks/verify_qwen3_numerics.py --load_format dummy --model_name qwen3-0.6b --dtype float32
    python scripts/benchmarks/verify_qwen3_numerics.py --walker hf --attention_backend flex --json report.json

float32 asks for Hugging Face's greedy tokens, bfloat16 for an error like Hugging Face's own; numerics.py says why and how.
"""

from __future__ import annotations

import sys

from numerics import run_verification
from qwen3_flex_inference import Qwen3Walker


def main(argv: list[str] | None = None) -> int:
    return run_verification(__doc__, "unsloth/Qwen3-4B-Base", Qwen3Walker, argv)


if __name__ == "__main__":
    sys.exit(main())
