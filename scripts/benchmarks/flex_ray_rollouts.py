"""Measures a pool of engines in Ray actors, on several GPUs or machines: start-up, rollouts, adapter broadcasts, an actor killed.

    python scripts/benchmarks/flex_ray_rollouts.py --num_actors 2                  # embedded model on a CPU, Qwen3-4B-Base on GPUs
    python scripts/benchmarks/flex_ray_rollouts.py --num_actors 2 --lora_adapter outputs/lora_rank32_fresh --kill_one

The pool itself is `flex_ray.py`. The stats file is written after every round.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cb_vs_vllm_generation import load_tokenizer, random_prompts
from flex_cli import (
    HelpFormatter,
    RoundStats,
    RunStats,
    add_common_arguments,
    check_writable,
    engine_config,
    flags_of,
    integer,
    library_versions,
    load_prompts,
    make_walker,
    number,
    sampling_params,
    template_prompts,
)
from flex_console import fail, note
from flex_engine import FlexEngine, SamplingParams
from flex_models import load_model, resolve_model_name
from flex_ray import (
    ActorsLostError,
    PoolStats,
    RolloutPool,
    cause_of,
    require_ray,
    start_ray,
)
from lora_adapters import attach_adapter, check_lora_arguments
from prompts import Prompt
from written_walkers import text_model, walker_class_of


@dataclass
class PoolRunStats(RunStats):
    """The stats of every inference script, and what a pool adds. `killed` is the round in which an actor was killed half way."""

    num_actors: int = 0
    gpus_per_actor: float = 0.0
    startup_seconds: float = 0.0
    warmup_seconds: float = 0.0
    killed: RoundStats | None = None
    pool: PoolStats | None = None
    engines: list[dict[str, object]] = field(default_factory=list)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_common_arguments(parser, default_model="unsloth/Qwen3-4B-Base")
    group = parser.add_argument_group("actors")
    group.add_argument("--num_actors", metavar="N", type=integer(1), default=gpus or 2, help="engines, each in a process of its own")
    group.add_argument(
        "--gpus_per_actor", metavar="X", type=number(0, 1), default=float(gpus > 0), help="a fraction shares a GPU between actors"
    )
    group.add_argument("--cpus_per_actor", metavar="X", type=number(0, 1024), default=1.0, help="as Ray counts them")
    group.add_argument("--ray_address", metavar="ADDRESS", help="of a running cluster (default: one is started on this machine)")
    group.add_argument("--max_restarts", metavar="N", type=integer(0), default=1, help="lost actors that are replaced; others are dropped")
    group.add_argument("--prompt_tokens", metavar="T", type=integer(2), help="prompts of T random tokens instead of text")
    group.add_argument("--kill_one", action="store_true", help="one more round, in which an actor is killed half way")
    return parser.parse_args(argv)


def make_prompts(args: argparse.Namespace) -> list[Prompt]:
    """In the driver, which loads a tokenizer and no weights."""
    tokenizer, config = load_tokenizer(args)
    if args.prompt_tokens is not None:
        return random_prompts(args.n_prompts, args.prompt_tokens, config.get_text_config().vocab_size, args.seed)
    prompts = template_prompts(args, load_prompts(args), config, tokenizer)
    if invalid := next((prompt for prompt in prompts if prompt.error), None):
        fail(f"{invalid.source}: {invalid.error}")
    return prompts


def build_engine(args: argparse.Namespace, prompts: list[Prompt]) -> FlexEngine:
    """An actor's engine, sized for its share of the prompts."""
    model, tokenizer = load_model(args)
    model = text_model(model)
    share = -(-len(prompts) // args.num_actors)
    walker = make_walker(attach_adapter(model, args), walker_class_of(model), args)
    longest = sorted(prompts, key=lambda prompt: -len(prompt.token_ids))[:share]
    return FlexEngine(walker, tokenizer, engine_config(args, longest, model.config))


def adapter_on_disk(path: str) -> dict[str, Tensor]:
    from peft import load_peft_weights

    return load_peft_weights(path, device="cpu")


def run_round(pool: RolloutPool, inputs: list[list[int]], params: SamplingParams) -> RoundStats:
    started = time.perf_counter()
    rollouts = pool.generate(inputs, params)
    seconds = time.perf_counter() - started
    tokens = sum(len(completion.token_ids) for rollout in rollouts for completion in rollout.outputs)
    return RoundStats(sum(map(len, inputs)), tokens, seconds)


@contextmanager
def killed_half_way(pool: RolloutPool, rounds: list[float]) -> Iterator[None]:
    """Kills the first actor half way into the round that is run inside, by what such rounds have taken."""
    timer = threading.Timer(statistics.median(rounds) / 2, pool.kill, [pool.members[0].number])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_writable(args.stats_path)
    if args.profile or args.verify_no_drift:
        fail(f"{'--profile' if args.profile else '--verify_no_drift'} looks into one engine: use qwen3_flex_inference.py")
    try:
        check_lora_arguments(args)
        require_ray()
    except (ValueError, ImportError) as error:
        fail(str(error))
    resolve_model_name(args)
    prompts = make_prompts(args)
    inputs = [prompt.token_ids for prompt in prompts]
    try:
        start_ray(args.ray_address, args.num_actors, args.cpus_per_actor)
        started = time.perf_counter()
        pool = RolloutPool(
            functools.partial(build_engine, args, prompts), args.num_actors, args.gpus_per_actor, args.cpus_per_actor, args.max_restarts
        )
    except ValueError as error:
        fail(str(error))
    stats = PoolRunStats("flex_ray", args.model_name, pool.members[0].info.device, library_versions(), flags_of(args))
    stats.num_actors, stats.gpus_per_actor = args.num_actors, args.gpus_per_actor
    stats.startup_seconds = time.perf_counter() - started
    note(f"{args.num_actors} actors ready after {stats.startup_seconds:.1f} s: {', '.join(m.info.device for m in pool.members)}")
    try:
        measure(pool, stats, inputs, args)
    except ValueError as error:  # prompts that can't be run, an adapter that does not fit
        fail(cause_of(error))
    except ActorsLostError as error:
        fail(f"{error}; " + (f"the rounds before, {len(stats.rounds)}, are in {args.stats_path}" if stats.rounds else "nothing was measured"))
    print_summary(stats)
    print(f"stats: {args.stats_path}")
    pool.shutdown()
    return 0


def measure(pool: RolloutPool, stats: PoolRunStats, inputs: list[list[int]], args: argparse.Namespace) -> None:
    """A warm-up, then --n_rounds rounds, before each of which an adapter is broadcast, and one with --kill_one. What has been measured
    is in the stats file whatever comes next."""

    def save() -> None:
        stats.pool = pool.stats()
        stats.fallbacks = [*args.fallbacks, *(fallback for report in stats.engines for fallback in report["fallbacks"])]
        stats.save(args.stats_path)

    stats.warmup_seconds = run_round(pool, inputs, sampling_params(args)).total_seconds
    adapter = adapter_on_disk(args.lora_adapter) if args.lora_adapter else None
    for round_index in range(args.n_rounds):
        if adapter is not None:
            pool.load_weights(adapter)
        measured = run_round(pool, inputs, sampling_params(args, round_index))
        stats.rounds.append(measured)
        save()
        note(f"round {round_index + 1} of {args.n_rounds}: {measured.generated_tokens} tokens, {measured.tps:.1f} tok/s")
    if args.kill_one:
        with killed_half_way(pool, [measured.total_seconds for measured in stats.rounds]):
            stats.killed = run_round(pool, inputs, sampling_params(args, args.n_rounds))
        save()
    stats.engines = pool.reports()
    save()


def print_summary(stats: PoolRunStats) -> None:
    rows = {
        "model": f"{stats.model_name} ({stats.device})",
        "actors": f"{stats.num_actors} of {stats.gpus_per_actor:g} GPU, ready after {stats.startup_seconds:.1f} s",
        "generate": f"{stats.tps_median:.1f} tok/s median, {stats.tps_best:.1f} best",
        "tokens by actor": ", ".join(map(str, stats.pool.tokens)),
    }
    if broadcasts := stats.pool.broadcasts:
        seconds = statistics.median(broadcast.seconds for broadcast in broadcasts)
        rows["broadcast"] = f"{1e3 * seconds:.0f} ms median for {broadcasts[0].gigabytes:.3f} GB"
    if stats.killed is not None:
        usual = statistics.median(measured.total_seconds for measured in stats.rounds)
        rows["an actor killed"] = f"{stats.killed.total_seconds:.2f} s instead of {usual:.2f}"
    for loss in stats.pool.lost:
        rows[f"lost actor {loss.actor}"] = (
            f"{loss.cause}; {loss.prompts_run_again} prompts run again, {'restarted' if loss.restarted else 'dropped'}"
        )
    print()
    for name, value in rows.items():
        print(f"{name:<18}{value}")


if __name__ == "__main__":
    sys.exit(main())
