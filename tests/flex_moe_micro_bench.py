"""How fast is Qwen3-MoE in the engine? Loads once, then batch size by batch size: median tok/s, the floor's share, and a sample.

    python tests/flex_moe_micro_bench.py --load_format dummy --batch_sizes 16,32,48,64,128 --prompt_tokens 128
    python tests/flex_moe_micro_bench.py --load_format dummy --compile_mode walker_fullgraph --compile_opts unsloth_O3
    python tests/flex_moe_micro_bench.py                                     # random weights of a tiny model where there is no GPU

Every completion has --max_new_tokens tokens; a round is a whole generate call, prefill included.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "benchmarks"))

from cb_vs_vllm_generation import check_measured_lora, integers, random_prompts, save
from flex_cli import (
    RunStats,
    add_bandwidth,
    add_engine_stats,
    add_peak_memory,
    build_parser,
    check_writable,
    device_name,
    engine_config,
    flags_of,
    integer,
    library_versions,
    load_prompts,
    make_walker,
    mean_context,
    run_round,
    sampling_params,
    template_prompts,
)
from flex_console import fail, note
from flex_engine import FlexEngine
from flex_models import load_model
from lora_adapters import attach_adapter
from peer_backends import release_memory
from qwen3_moe_flex import DEFAULT_MODEL, TINY_MODEL, FlexMoEInference

SAMPLE_CHARACTERS = 160


def run_batch(engine: FlexEngine, prompts: list, args) -> tuple[RunStats, str]:
    """--n_rounds measured rounds after a warm-up, and the end of the first completion's text."""
    mode = getattr(engine.walker, "compile_mode", args.walker)
    stats = RunStats(f"flex, {mode}", args.model_name, device_name(engine.device), library_versions(), flags_of(args))
    stats.config["batch_size"] = len(prompts)
    inputs = [prompt.token_ids for prompt in prompts]
    run_round(engine, inputs, sampling_params(args))
    prepared = engine.stats()
    for round_index in range(args.n_rounds):
        measured, outputs = run_round(engine, inputs, sampling_params(args, round_index + 1))
        stats.rounds.append(measured)
    add_engine_stats(stats, engine.stats(), prepared)
    add_peak_memory(stats)
    if engine.device.type == "cuda":
        halfway = [o.prompt_token_ids + o.outputs[0].token_ids[: args.max_new_tokens // 2] for o in outputs]
        add_bandwidth(stats, engine, mean_context(outputs), halfway)
    return stats, outputs[0].outputs[0].text[:SAMPLE_CHARACTERS]


def row(stats: RunStats) -> str:
    floor = "–" if stats.bandwidth_floor_percent is None else f"{stats.bandwidth_floor_percent:.0f}"
    experts = "–" if not stats.expert_bytes_per_step else f"{stats.expert_bytes_per_step / 1e9:.1f}"
    reserved = "–" if stats.peak_reserved_gb is None else f"{stats.peak_reserved_gb:.1f}"
    step = 1e3 * stats.rounds[-1].decode_seconds / stats.rounds[-1].decode_steps
    return (
        f"| {stats.config['batch_size']} | {stats.tps_median:.0f} | {min(stats.tps_all):.0f} | {stats.tps_best:.0f} | "
        f"{stats.decode_tps_median:.0f} | {step:.2f} | {experts} | {floor} | {reserved} | {stats.compile_seconds:.0f} |"
    )


HEAD = (
    "| batch | tok/s | min | max | decode tok/s | ms/step | experts read, GB/step | % of floor | GB reserved | compile s |\n"
    "|" + " --- |" * 10
)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser(__doc__, DEFAULT_MODEL, cpu_model=TINY_MODEL)
    group = parser.add_argument_group("sweep")
    sizes = "16,32,48,64" if torch.cuda.is_available() else "2,4"
    group.add_argument("--batch_sizes", metavar="N,N", type=integers, default=sizes, help="one prompt per sequence")
    group.add_argument("--prompt_tokens", metavar="T", type=integer(2), help="prompts of T random tokens instead of text")
    length = 256 if torch.cuda.is_available() else 16
    parser.set_defaults(stats_path="outputs/flex_moe_micro_bench.json", max_new_tokens=length, ignore_eos=True)
    args = parser.parse_args(argv)
    check_writable(args.stats_path)
    check_measured_lora(args)
    args.n_prompts = max(args.batch_sizes)
    model, tokenizer = load_model(args)
    if args.prompt_tokens is None:
        prompts = template_prompts(args, load_prompts(args), model.config, tokenizer)
    else:
        prompts = random_prompts(args.n_prompts, args.prompt_tokens, model.config.vocab_size, args.seed)
    prompts = [prompts[index % len(prompts)] for index in range(args.n_prompts)]
    invalid = next((prompt for prompt in prompts if prompt.error), None)
    if invalid:
        fail(f"{invalid.source}: {invalid.error}")
    finished: list[RunStats] = []
    try:
        walker = make_walker(attach_adapter(model, args), FlexMoEInference, args)
        for size in args.batch_sizes:
            release_memory()
            engine = FlexEngine(walker, tokenizer, engine_config(args, prompts[:size], model.config))
            stats, sample = run_batch(engine, prompts[:size], args)
            del engine  # its pool and graphs go before the next are made
            finished.append(stats)
            note(f"batch {size}: {stats.tps_median:.0f} tok/s; a sample: {sample!r}")
            save(finished, args.stats_path)
    except ValueError as error:
        fail(str(error))
    print(HEAD)
    for stats in finished:
        print(row(stats))
    print(f"stats: {args.stats_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
