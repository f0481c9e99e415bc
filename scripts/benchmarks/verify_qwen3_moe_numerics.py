"""Is the engine right? Qwen3-MoE in the engine against plain Hugging Face on the same prompts; exit status 1 if a gate fails.

    python scripts/benchmarks/verify_qwen3_moe_numerics.py                   # random weights of a tiny model without GPU or hub
    python scripts/benchmarks/verify_qwen3_moe_numerics.py --load_format dummy --num_layers 4                 # at 30B-A3B's shapes
    python scripts/benchmarks/verify_qwen3_moe_numerics.py --load_format dummy --num_layers 4 --load_in_4bit --json report.json

The fp32 reference of all 48 layers takes 122 GB; --num_layers says how many are verified. tests/flex_moe_parity.py runs them all.
float32 asks for Hugging Face's greedy tokens, bfloat16 for an error like Hugging Face's own; numerics.py says why and how.
"""

from __future__ import annotations

import sys

from numerics import run_verification
from qwen3_moe_flex import DEFAULT_MODEL, TINY_MODEL, FlexMoEInference


def main(argv: list[str] | None = None) -> int:
    return run_verification(__doc__, DEFAULT_MODEL, FlexMoEInference, argv, TINY_MODEL)


if __name__ == "__main__":
    sys.exit(main())
