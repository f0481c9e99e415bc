"""Is Qwen3-MoE in the engine the model that plain transformers runs? Greedy tokens of a few prompts; exit status 1 if a gate fails.

    python tests/flex_moe_parity.py --load_format dummy                      # all layers at 30B-A3B's shapes, random weights
    FLEX_MOE_COMPILE_WALKER=1 python tests/flex_moe_parity.py --load_format dummy --load_in_4bit
    python tests/flex_moe_parity.py                                          # random weights of a tiny model without GPU or hub

transformers runs on the very weights that the engine reads, in 16 bits and, module by module, in fp32; 4-bit weights as the values
that they stand for. Each greedy token of the engine must lie within twice transformers' own rounding error of the largest fp32 logit,
so that a tie may fall either way and nothing else (numerics.py); in float32 the tokens must be generate's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "benchmarks"))

from flex_cli import engine_config, make_walker, template_prompts
from flex_console import fail, note
from flex_engine import FlexEngine
from flex_models import resolve_model_name
from lora_adapters import check_lora_arguments
from numerics import Reference, build_parser, load_layers, load_untied, verify
from prompts import WORD_PROBLEMS, RawPrompt
from qwen3_moe_flex import DEFAULT_MODEL, TINY_MODEL, FlexMoEInference

COMPILE_VARIABLE = "FLEX_MOE_COMPILE_WALKER"


def main(argv: list[str] | None = None) -> int:
    parser = build_parser(__doc__, DEFAULT_MODEL, TINY_MODEL)
    parser.set_defaults(n_prompts=3, max_new_tokens=32)
    args = parser.parse_args(argv)
    if os.environ.get(COMPILE_VARIABLE, "0") not in ("0", ""):
        args.compile_mode = args.compile_mode or "walker_fullgraph"
    try:
        check_lora_arguments(args)
        if args.lora_adapter or args.verify_no_drift:
            raise ValueError("adapters are verified by verify_qwen3_moe_numerics.py; this script compares the base model")
    except ValueError as error:
        fail(str(error))
    resolve_model_name(args, small_without_hub=True)
    torch.set_float32_matmul_precision("highest")  # no TF32 in the reference
    model, tokenizer = load_untied(args) if args.load_format == "dummy" else load_layers(args)
    raw = [RawPrompt("built-in", *WORD_PROBLEMS[index % len(WORD_PROBLEMS)]) for index in range(args.n_prompts)]
    prompts = template_prompts(args, raw, model.config, tokenizer)
    try:
        walker = make_walker(model, FlexMoEInference, args)
        engine = FlexEngine(walker, tokenizer, engine_config(args, prompts, model.config))
        report = verify(engine, Reference.in_place(model), [prompt.token_ids for prompt in prompts], args.max_new_tokens, args.seed)
    except ValueError as error:
        fail(str(error))
    kind = "4-bit" if args.load_in_4bit else str(model.dtype).removeprefix("torch.")
    note(f"{args.model_name}, {model.config.num_hidden_layers} layers, {kind}, compiled walker: {walker.compile_mode}")
    print(report)
    if args.json:
        Path(args.json).write_text(report.to_json() + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
