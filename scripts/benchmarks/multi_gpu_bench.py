"""What a second GPU brings: rollouts and GRPO steps on one GPU, on accelerate's ranks, and in a Ray pool, by one protocol.

    python scripts/benchmarks/multi_gpu_bench.py                                       # embedded model on two CPU processes
    python scripts/benchmarks/multi_gpu_bench.py --load_format dummy --model_name qwen3-4b-base       # all GPUs of this machine
    python scripts/benchmarks/multi_gpu_bench.py --parts one,ray --gpus 1 --num_actors 2 --kv_memory_gb 30     # two actors share one

| part | |
|---|---|
| one | one engine in one process: the yardstick |
| ranks | an engine per rank under `accelerate launch`, the work split beforehand; a rank with twice the work |
| ray | a pool of actors that are handed the work; the same uneven work, adapter broadcasts, an actor killed half way |
| grpo | steps of qwen3_grpo_flex.py, on one rank and on all |

Every sequence is --max_new_tokens long. A round of N GPUs has N times the sequences, prefill included, after a warm-up that is not
counted. The stats file is written after every round; parts that are run again replace their rows in it, and the others stay.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from cb_vs_vllm_generation import integers, random_prompts
from flex_cli import (
    HelpFormatter,
    add_model_arguments,
    check_writable,
    device_name,
    flags_of,
    integer,
    library_versions,
    names_of,
    number,
    save_text,
)
from flex_console import fail, note
from flex_engine import EngineConfig, FlexEngine, SamplingParams
from flex_lora import LORA_MODES
from flex_models import load_model, resolve_model_name
from flex_ray import ActorsLostError, Broadcast, Loss, RolloutPool, adapter_weights, require_ray, start_ray
from flex_ray_rollouts import killed_half_way, run_round
from lora_adapters import fresh_adapter
from make_lora_adapter import read_config
from unsloth_grpo_common import GRPOStats
from written_walkers import text_model, walker_class_of

PARTS = ("one", "ranks", "ray", "grpo")
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal when the parent is gone
SETTLED = 3  # GRPO steps left out of medians: compiling, capturing, first allocations


@dataclass
class Rounds:
    """One workload in one part. `tokens` of a round, its wall clock, and each engine's own time where it is known."""

    part: str
    workload: str
    engines: int
    sequences: int
    tokens: int
    seconds: list[float] = field(default_factory=list)
    engine_seconds: list[list[float]] = field(default_factory=list)

    @property
    def tps(self) -> float:
        return self.tokens / statistics.median(self.seconds)


@dataclass
class Steps:
    """GRPO steps; seconds are medians without the first three."""

    ranks: int
    completions: int
    step_seconds: float
    rollout_seconds: float
    peak_memory_gb: float | None
    finished: bool


@dataclass
class MultiGPUStats:
    """The stats JSON. Seconds are wall clock."""

    model_name: str
    device: str
    versions: dict[str, str]
    config: dict[str, object]
    rounds: list[Rounds] = field(default_factory=list)
    broadcasts: list[Broadcast] = field(default_factory=list)
    killed: Rounds | None = None
    lost: list[Loss] = field(default_factory=list)
    grpo: list[Steps] = field(default_factory=list)

    def save(self, path: str) -> None:
        save_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", path)

    @classmethod
    def load(cls, path: str) -> MultiGPUStats:
        """Ends the script where the file holds something else."""
        try:
            stats = cls(**json.loads(Path(path).read_text()))
            stats.rounds = [Rounds(**rounds) for rounds in stats.rounds]
            stats.broadcasts = [Broadcast(**broadcast) for broadcast in stats.broadcasts]
            stats.killed = Rounds(**stats.killed) if stats.killed else None
            stats.lost = [Loss(**loss) for loss in stats.lost]
            stats.grpo = [Steps(**steps) for steps in stats.grpo]
        except (TypeError, ValueError) as error:
            fail(f"--stats_path {path} holds something else ({error!r}); move it away")
        return stats

    def put(self, part: str, measured: list[Rounds]) -> None:
        """In the place of the part's rows from before."""
        self.rounds = [rounds for rounds in self.rounds if rounds.part != part] + measured


@contextmanager
def updated(args: argparse.Namespace, device: str) -> Iterator[MultiGPUStats]:
    """The stats file's content, written back afterwards: whoever measures puts it there at once, this process or a rank."""
    if Path(args.stats_path).exists():
        stats = MultiGPUStats.load(args.stats_path)
        stats.model_name, stats.device, stats.versions, stats.config = args.model_name, device, library_versions(), flags_of(args)
    else:
        stats = MultiGPUStats(args.model_name, device, library_versions(), flags_of(args))
    yield stats
    stats.save(args.stats_path)


# ---------------------------------------------------------------------------------------------------------------------- flags


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_model_arguments(parser, default_model="unsloth/Qwen3-4B-Base", with_walker=False)
    group = parser.add_argument_group("workload")
    group.add_argument("--parts", metavar="NAMES", type=names_of("part", PARTS), default=",".join(PARTS), help="comma separated")
    group.add_argument("--gpus", metavar="N", type=integer(1), default=gpus or 2, help="GPUs, or CPU processes where there are none")
    group.add_argument("--num_actors", metavar="N", type=integer(1), help="of the pool; more than GPUs share them (default: --gpus)")
    group.add_argument(
        "--batch_sizes", metavar="N,N", type=integers, default="64,256" if gpus else "2,4", help="sequences for each engine"
    )
    group.add_argument("--prompt_tokens", metavar="N", type=integer(2), default=128 if gpus else 16, help="random ids")
    group.add_argument("--max_new_tokens", metavar="N", type=integer(1), default=512 if gpus else 8, help="of each sequence")
    group.add_argument("--n_rounds", metavar="N", type=integer(1), default=5 if gpus else 2, help="measured, after one to warm up")
    group.add_argument("--lora_rank", metavar="R", type=integer(1), default=32, help="of the adapter")
    group.add_argument("--lora_mode", choices=LORA_MODES, default="merged", help="how the rollout parts compute it; grpo runs active")
    group.add_argument("--kv_memory_gb", metavar="X", type=number(0, 1e6, open_low=True), help="of each engine (default: what it needs)")
    group.add_argument("--seed", metavar="N", type=integer(0), default=0, help="of weights, prompts and sampling")
    group = parser.add_argument_group("GRPO, on each rank")
    group.add_argument("--grpo_steps", metavar="N", type=integer(1), default=8 if gpus else 2, help="optimizer steps")
    group.add_argument("--grpo_prompts", metavar="N", type=integer(1), default=8 if gpus else 1, help="of each step")
    group.add_argument("--grpo_generations", metavar="N", type=integer(2), default=8 if gpus else 2, help="completions of a prompt")
    group = parser.add_argument_group("run")
    group.add_argument("--stats_path", metavar="FILE", default="outputs/multi_gpu.json", help="where the stats JSON goes")
    group.add_argument("--rank_part", help=argparse.SUPPRESS)  # what this process is a rank of
    args = parser.parse_args(argv)
    args.num_actors = args.num_actors or args.gpus
    if gpus and args.gpus > gpus:
        fail(f"--gpus {args.gpus}: there are {gpus}")
    return args


# ------------------------------------------------------------------------------------------------------------------ workloads


@dataclass
class Workload:
    """`shares[r]` are the prompts of engine r where the work is split beforehand."""

    name: str
    shares: list[list[list[int]]]

    @property
    def prompts(self) -> list[list[int]]:
        return [prompt for share in self.shares for prompt in share]


def make_workloads(args: argparse.Namespace, engines: int) -> list[Workload]:
    """Even ones of each batch size, and one of the smallest in which the last engine has twice the work of the others."""
    even = {f"batch {size}": [size] * engines for size in args.batch_sizes}
    size = min(args.batch_sizes)
    uneven = {f"batch {size}, the last twice": [size] * (engines - 1) + [2 * size]} if engines > 1 else {}
    workloads, vocab_size = [], read_config(args.model_name).get_text_config().vocab_size
    for name, sizes in (even | uneven).items():
        prompts = iter(random_prompts(sum(sizes), args.prompt_tokens, vocab_size, args.seed))
        workloads.append(Workload(name, [[next(prompts).token_ids for _ in range(size)] for size in sizes]))
    return workloads


def batches_of(args: argparse.Namespace) -> set[int]:
    """That an engine of this part will run; also the shares of the uneven workload."""
    uneven = min(args.batch_sizes)
    if args.rank_part is None:
        return {*args.batch_sizes, -(-uneven * (args.num_actors + 1) // args.num_actors)}
    return {*args.batch_sizes, *([2 * uneven] if args.rank_part == "ranks" else [])}


def make_engine(args: argparse.Namespace) -> FlexEngine:
    """Of one rank or actor: an adapter, room for the largest batch, and a graph of its own for each batch that its part will run."""
    model, tokenizer = load_model(args)
    model = text_model(model)
    walker = walker_class_of(model)(fresh_adapter(model, args.lora_rank, args.seed), lora_mode=args.lora_mode)
    buckets = sorted({max(2, batch) for batch in batches_of(args)})
    config = EngineConfig(
        max(batches_of(args)), args.prompt_tokens + args.max_new_tokens, kv_memory_gb=args.kv_memory_gb, decode_buckets=buckets
    )
    engine = FlexEngine(walker, tokenizer, config)
    engine.capture()
    return engine


def new_adapter(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """What a trainer would broadcast, on the CPU: the adapter's shapes with random values."""
    with torch.device("meta"):
        model = text_model(AutoModelForCausalLM.from_config(read_config(args.model_name)))
        shapes = adapter_weights(fresh_adapter(model, args.lora_rank))
    generator = torch.Generator().manual_seed(args.seed)
    return {name: 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in shapes.items()}


def params_of(args: argparse.Namespace, round_index: int) -> SamplingParams:
    return SamplingParams(max_tokens=args.max_new_tokens, ignore_eos=True, seed=args.seed + round_index)


def measure(
    rounds: Rounds, args: argparse.Namespace, generate: Callable[[int], list[float] | None], save: Callable[[], None]
) -> None:
    """A warm-up, then --n_rounds timed calls of `generate(round)`, which returns each engine's own seconds where it knows them, with a
    `save` after each."""
    generate(0)
    for index in range(1, args.n_rounds + 1):
        started = time.perf_counter()
        own = generate(index)
        rounds.seconds.append(time.perf_counter() - started)
        rounds.engine_seconds += [own] if own is not None else []
        save()


# ---------------------------------------------------------------------------------------------------------------------- parts


def run_as_rank(args: argparse.Namespace) -> int:
    """One rank: no process talks to another but at the barriers around a round."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if torch.cuda.is_available():
        torch.cuda.set_device(state.local_process_index)
    started = time.perf_counter()
    engine, measured = make_engine(args), []
    if state.is_main_process:
        note(f"{args.rank_part}: engine ready after {time.perf_counter() - started:.1f} s")

    def save() -> None:
        if state.is_main_process:
            with updated(args, device_name(engine.device)) as stats:
                stats.put(args.rank_part, measured)

    for workload in make_workloads(args, state.num_processes):
        share = workload.shares[state.process_index]

        def generate(index: int) -> list[float]:
            state.wait_for_everyone()
            started = time.perf_counter()
            engine.generate(share, params_of(args, index))
            own = time.perf_counter() - started
            return [own] if state.num_processes == 1 else gathered(own)

        tokens = len(workload.prompts) * args.max_new_tokens
        measured.append(Rounds(args.rank_part, workload.name, state.num_processes, len(workload.prompts), tokens))
        measure(measured[-1], args, generate, save)
        if state.is_main_process:
            note(f"{args.rank_part}, {workload.name}: {measured[-1].tps:.0f} tok/s")
    state.destroy_process_group()
    return 0


def gathered(value: float) -> list[float]:
    """Every rank's value; also the barrier at the end of a round."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def launch(ranks: int, script: str, flags: list[str]) -> None:
    """The script on one GPU, or `accelerate launch` on several of this machine; nothing of it outlives this process. Ends the script
    where a rank fails."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["ACCELERATE_USE_CPU"] = "true"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // ranks)))
    if ranks > 1:
        launcher = [
            "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        ]  # fmt: skip
    else:  # of more GPUs than one a trainer would take all
        launcher, environment["CUDA_VISIBLE_DEVICES"] = [], os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    end_with_parent = functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if sys.platform == "linux" else None
    with subprocess.Popen([sys.executable, *launcher, script, *flags], env=environment, preexec_fn=end_with_parent) as process:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # accelerate ends its ranks
            raise
    if status != 0:
        fail(f"{Path(script).name} on {ranks} ranks ended with exit status {status}")


def run_ray(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    try:
        start_ray(None, args.num_actors)
        note(f"ray: a cluster after {time.perf_counter() - started:.1f} s")
        # The whole GPU where there is one for each, else equal shares; as many on each as on any other, or one more.
        each = 1 / math.ceil(args.num_actors / args.gpus) if torch.cuda.is_available() else 0.0
        pool = RolloutPool(functools.partial(make_engine, args), args.num_actors, each)
    except ValueError as error:
        fail(str(error))
    own = max(member.info.startup_seconds for member in pool.members)
    note(f"ray: {args.num_actors} actors ready after {time.perf_counter() - started:.1f} s, {own:.1f} of them an engine's own")
    try:
        measure_pool(pool, args)
    except ActorsLostError as error:
        fail(f"part ray: {error}; what was measured before is in {args.stats_path}")
    finally:  # the next part finds the GPUs empty
        pool.shutdown()
        require_ray().shutdown()


def measure_pool(pool: RolloutPool, args: argparse.Namespace) -> None:
    device, measured, killed = pool.members[0].info.device, [], None

    def save() -> None:
        with updated(args, device) as stats:
            stats.put("ray", measured)
            stats.broadcasts, stats.killed, stats.lost = pool.broadcasts, killed, pool.lost

    for workload in make_workloads(args, args.num_actors):

        def generate(index: int) -> None:
            pool.generate(workload.prompts, params_of(args, index))

        tokens = len(workload.prompts) * args.max_new_tokens
        measured.append(Rounds("ray", workload.name, args.num_actors, len(workload.prompts), tokens))
        measure(measured[-1], args, generate, save)
        note(f"ray, {workload.name}: {measured[-1].tps:.0f} tok/s")
        if workload.name == f"batch {max(args.batch_sizes)}":
            largest, usual = workload, measured[-1].seconds
    adapter = new_adapter(args)
    for _ in range(args.n_rounds):
        pool.load_weights(adapter)
    save()
    note(f"ray: {args.n_rounds} broadcasts, median {statistics.median(broadcast.seconds for broadcast in pool.broadcasts):.2f} s")
    with killed_half_way(pool, usual):
        run = run_round(pool, largest.prompts, params_of(args, 0))
    name = f"{largest.name}, an actor killed half way"
    killed = Rounds("ray", name, args.num_actors, len(largest.prompts), run.generated_tokens, [run.total_seconds])
    save()


def run_grpo(args: argparse.Namespace) -> None:
    measured = []
    for ranks in sorted({1, args.gpus}):
        steps, device = grpo_steps(args, ranks)
        measured.append(steps)
        with updated(args, device) as stats:
            stats.grpo = measured


def grpo_steps(args: argparse.Namespace, ranks: int) -> tuple[Steps, str]:
    """And the device that they ran on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grpo.json"
        flags = {
            "model_name": args.model_name, "load_format": args.load_format, "dtype": args.dtype, "max_steps": args.grpo_steps,
            "n_prompts": args.grpo_prompts, "num_generations": args.grpo_generations, "max_completion_length": args.max_new_tokens,
            "lora_rank": args.lora_rank, "seed": args.seed, "task": "word_problems", "stats_path": path,
        }  # fmt: skip
        script = str(Path(__file__).with_name("qwen3_grpo_flex.py"))
        launch(ranks, script, [text for name, value in flags.items() for text in (f"--{name}", str(value))])
        run = GRPOStats.load(path)
    if not run.step_wall_s:
        fail(f"part grpo: {args.grpo_prompts} prompts x {args.grpo_steps} steps are too few for a step on {ranks} ranks")
    first = SETTLED if len(run.step_wall_s) > SETTLED else 0
    step, rollout = (statistics.median(values[first:]) for values in (run.step_wall_s, run.rollout_wall_s))
    completions = ranks * args.grpo_prompts * args.grpo_generations
    return Steps(ranks, completions, step, rollout, run.peak_memory_gb, run.finished), run.device


# --------------------------------------------------------------------------------------------------------------------- report


def report(stats: MultiGPUStats) -> str:
    one = {rounds.workload: rounds.tps for rounds in stats.rounds if rounds.part == "one"}
    lines = [
        "| part | engines | workload | sequences | tok/s, median | min, max | against one engine | engines' own seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rounds in stats.rounds:
        rates = [rounds.tokens / seconds for seconds in rounds.seconds]
        base = one.get(rounds.workload.split(",")[0])
        own = [f"{statistics.median(seconds):.2f}" for seconds in zip(*rounds.engine_seconds)]
        cells = [
            rounds.part, rounds.engines, rounds.workload, rounds.sequences, f"{rounds.tps:.0f}", f"{min(rates):.0f}, {max(rates):.0f}",
            f"{rounds.tps / base:.2f} x" if base else "-", ", ".join(own) or "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if stats.broadcasts:
        total, store = (statistics.median(getattr(b, name) for b in stats.broadcasts) for name in ("seconds", "store_seconds"))
        lines += ["", f"Adapter broadcast: {stats.broadcasts[0].gigabytes:.3f} GB in {1e3 * total:.0f} ms, {1e3 * store:.0f} of them "
                      f"into the object store (median of {len(stats.broadcasts)})."]  # fmt: skip
    if stats.killed:
        loss = stats.lost[0] if stats.lost else None
        again = f"{loss.prompts_run_again} prompts ran again" if loss else "it ended before that"
        lines += ["", f"{stats.killed.workload}: {stats.killed.seconds[0]:.2f} s, {again}, {stats.killed.tokens} tokens."]
    if stats.grpo:
        lines += ["", "| GRPO on ranks | completions a step | step, median s | of which rollout | completions/s | peak GB a rank |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for steps in stats.grpo:
            peak = "-" if steps.peak_memory_gb is None else f"{steps.peak_memory_gb:.1f}"
            cells = [
                steps.ranks, steps.completions, f"{steps.step_seconds:.2f}", f"{steps.rollout_seconds:.2f}",
                f"{steps.completions / steps.step_seconds:.2f}", peak,
            ]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    resolve_model_name(args)
    if args.rank_part:
        return run_as_rank(args)
    check_writable(args.stats_path)
    read_config(args.model_name)  # a name that is wrong ends here, not in a rank
    if "ray" in args.parts:
        try:
            require_ray()
        except ImportError as error:
            fail(str(error))
    if Path(args.stats_path).exists():
        MultiGPUStats.load(args.stats_path)
    for part in args.parts:
        if part == "ray":
            run_ray(args)
        elif part == "grpo":
            run_grpo(args)
        else:
            launch(1 if part == "one" else args.gpus, __file__, [*argv, "--rank_part", part])
    print(report(MultiGPUStats.load(args.stats_path)))
    print(f"\nstats: {args.stats_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
