"""Rollout backends against each other: one prompt set, one sampling, forced lengths, one protocol, a process each.

    python scripts/benchmarks/cb_vs_vllm_generation.py --backend flex,hf_naive,tpaged           # embedded model on a CPU
    python scripts/benchmarks/cb_vs_vllm_generation.py --backend flex,vllm --load_format dummy --model_name qwen3-4b-base \\
        --prompt_tokens 128 --batch_sizes 8,32,64,128,256 --groups 32x8x512 --mixed 512
    python scripts/benchmarks/cb_vs_vllm_generation.py --compare flex.json vllm.json            # table and plot from earlier runs

Every completion has a length fixed beforehand, the same for every backend: --max_new_tokens, or with --mixed one drawn for each
request. A round is a whole generate call from token ids to token ids, prefill included, after a warm-up that is not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from embedded_model import EmbeddedModelError, embedded_model_path
from flex_cli import (
    MAX_DEFAULT_BATCH,
    HelpFormatter,
    RoundStats,
    RunStats,
    SampleCompletion,
    add_bandwidth,
    add_engine_arguments,
    add_engine_stats,
    add_model_arguments,
    add_peak_memory,
    add_prompt_arguments,
    add_run_arguments,
    add_sampling_arguments,
    check_writable,
    device_name,
    flags_of,
    integer,
    library_versions,
    load_prompts,
    names_of,
    number,
    save_text,
    template_prompts,
)
from flex_console import fail, note
from flex_models import EMBEDDED, default_device, dummy_tokenizer, find_config, resolve_model_name
from lora_adapters import add_lora_arguments, check_lora_arguments
from peer_backends import PEERS, Generated, Peer, Workload
from prompts import Prompt, is_right

SAMPLES_KEPT = 4
MIXED_SIGMA, MIXED_SHORTEST = 0.7, 16  # of the log-normal lengths; its median is half of --max_new_tokens, its limit the whole


@dataclass
class PeerStats(RunStats):
    """One backend on one workload: the stats of every inference script, and what a comparison needs besides.

    `card_gb` is what the GPU held more than before the process started, whoever allocated it: a peer's reservation.
    `coherent` is None where the weights are random.
    """

    workload: str = ""
    fingerprint: str = ""
    num_sequences: int = 0
    startup_seconds: float = 0.0
    warmup_seconds: float = 0.0
    card_gb: float | None = None
    coherent: bool | None = None


# ------------------------------------------------------------------------------------------------------------------- flags


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_model_arguments(parser, default_model="unsloth/Qwen3-4B-Base")
    add_lora_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add_run_arguments(parser)
    group = parser.add_argument_group("backends")
    group.add_argument("--backend", metavar="NAMES", type=names_of("backend", PEERS), default=["flex"], help=f"comma separated, of {', '.join(PEERS)}")
    group.add_argument(
        "--attn_impl", metavar="NAME", default=os.environ.get("HF_ATTN_IMPL"),
        help="attention of the transformers backends, as from_pretrained takes it (default: HF_ATTN_IMPL, else transformers' choice)",
    )  # fmt: skip
    group.add_argument("--persistent_cb", action="store_true", help="tpaged: keep manager, cache and graphs from call to call")
    group.add_argument("--enforce_eager", action="store_true", help="vllm: no compiling, no CUDA graphs")
    group.add_argument("--prefix_caching", action=argparse.BooleanOptionalAction, default=True, help="vllm: emptied before each round")
    group.add_argument(
        "--gpu_memory_utilization", metavar="X", type=number(0, 1, open_low=True),
        help="vllm: share of the GPU it takes (default: its own)",
    )  # fmt: skip
    group.add_argument("--vllm_python", metavar="FILE", help="vllm: interpreter of the environment that vLLM is installed in")

    group = parser.add_argument_group("workloads, all in one process per backend")
    group.add_argument(
        "--batch_sizes", metavar="N,N", type=integers, help="one prompt per sequence, --max_new_tokens each (default: --n_prompts)"
    )
    group.add_argument("--groups", metavar="PxN[xT]", type=group_shape, help="GRPO: P prompts (of T tokens), N completions of each")
    group.add_argument(
        "--mixed", metavar="N[xMEDIANxLONGEST]", type=mixed_shape,
        help="N requests with log-normal lengths (default: half of --max_new_tokens, at most --max_new_tokens)",
    )  # fmt: skip
    group.add_argument("--prompt_tokens", metavar="T", type=integer(2), help="prompts of T random tokens instead of text")

    group = parser.add_argument_group("comparison")
    group.add_argument("--compare", metavar="JSON", nargs="+", help="join the stats of earlier runs; nothing is run")
    group.add_argument("--compare_path", metavar="PATH", default="outputs/peers", help="where PATH.md and PATH.png go")
    parser.set_defaults(stats_path="outputs/peers.json")
    return parser.parse_args(argv)


def check_measured_lora(args: argparse.Namespace) -> None:
    """Ends a script that measures if the flags of adapters and 4-bit weights don't go together, or ask for a check."""
    if args.verify_no_drift:
        fail("--verify_no_drift is a check of the inference scripts; this one measures")
    try:
        check_lora_arguments(args)
    except ValueError as error:
        fail(str(error))


def integers(text: str) -> list[int]:
    return [integer(1)(part) for part in text.split(",")]


def group_shape(text: str) -> tuple[int, int, int | None]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be PROMPTSxCOMPLETIONS or PROMPTSxCOMPLETIONSxTOKENS, not {text}")
    return int(match[1]), int(match[2]), int(match[3]) if match[3] else None


def mixed_shape(text: str) -> tuple[int, int | None, int | None]:
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?", text)
    if match is None or match[2] and int(match[2]) > int(match[3]):
        raise argparse.ArgumentTypeError(f"must be REQUESTS or REQUESTSxMEDIANxLONGEST, not {text}")
    return int(match[1]), int(match[2]) if match[2] else None, int(match[3]) if match[3] else None


# --------------------------------------------------------------------------------------------------------------- workloads


def load_tokenizer(args: argparse.Namespace) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Tokenizer and config alone: what prompts need in a process that leaves the weights to its backend."""
    if args.load_format == "dummy":
        config = find_config(args.model_name)
        return dummy_tokenizer(config), config
    try:
        name = embedded_model_path() if args.model_name == EMBEDDED else args.model_name
        return AutoTokenizer.from_pretrained(name), AutoConfig.from_pretrained(name)
    except (OSError, ValueError, EmbeddedModelError) as error:
        fail(f"can't load the tokenizer of {args.model_name}: {str(error).strip().splitlines()[0]}")


def make_workloads(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> list[Workload]:
    def prompts(count: int, tokens: int | None) -> list[Prompt]:
        if tokens is not None:
            return random_prompts(count, tokens, config.get_text_config().vocab_size, args.seed)
        return [text_prompts[index % len(text_prompts)] for index in range(count)]

    sizes = args.batch_sizes or ([] if args.groups or args.mixed else [args.n_prompts])
    group_prompts, group_n, group_tokens = args.groups or (0, 0, None)
    mixed, median, longest = args.mixed or (0, None, None)
    args.n_prompts = max([*sizes, group_prompts, mixed])
    text_prompts = template_prompts(args, load_prompts(args), config, tokenizer) if args.prompt_tokens is None else []
    invalid = next((prompt for prompt in text_prompts if prompt.error), None)
    if invalid:
        fail(f"{invalid.source}: {invalid.error}")

    workloads = [
        Workload(f"batch {size}", prompts(size, args.prompt_tokens), [args.max_new_tokens] * size) for size in sizes
    ]
    if args.groups:
        name = f"groups {group_prompts}x{group_n}"
        given = prompts(group_prompts, group_tokens or args.prompt_tokens)
        workloads.append(Workload(name, given, [args.max_new_tokens] * group_prompts, group_n))
    if mixed:
        longest = longest or args.max_new_tokens
        lengths = lognormal_lengths(mixed, median or longest / 2, longest, args.seed)
        workloads.append(Workload(f"mixed {mixed}", prompts(mixed, args.prompt_tokens), lengths))
    return workloads


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[Prompt]:
    ids = np.random.default_rng(seed).integers(0, vocab_size, (count, tokens))
    return [Prompt("random", token_ids=row) for row in ids.tolist()]


def lognormal_lengths(count: int, median: float, longest: int, seed: int) -> list[int]:
    """The tail of real rollouts: most completions are short, a few run into the limit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), MIXED_SIGMA, count)
    return drawn.round().astype(int).clip(min(MIXED_SHORTEST, longest), longest).tolist()


# ---------------------------------------------------------------------------------------------------------------- protocol


def run_backend(args: argparse.Namespace, name: str) -> None:
    """Every workload on one backend, in this process; the stats file is rewritten after each workload."""
    card = find_card()
    tokenizer, config = load_tokenizer(args)
    workloads = make_workloads(args, tokenizer, config)
    args.max_batch_size = args.max_batch_size or min(MAX_DEFAULT_BATCH, max(w.num_sequences for w in workloads))
    started = time.perf_counter()
    try:
        peer = PEERS[name](args, config, workloads)
    except (ValueError, ImportError) as error:
        fail(f"--backend {name}: {str(error).strip().splitlines()[0]}")
    startup_seconds = time.perf_counter() - started
    note(f"{name}: ready after {startup_seconds:.1f} s")

    finished: list[PeerStats] = []
    for workload in workloads:
        stats = PeerStats(
            backend=name, model_name=args.model_name,
            device=card.name() if card else device_name(default_device()), versions=library_versions(),
            config=run_config(args, workload), workload=workload.name, fingerprint=workload.fingerprint,
            num_sequences=workload.num_sequences, startup_seconds=startup_seconds,
            lora={"adapter": args.lora_adapter, "mode": lora_mode(args, peer)} if args.lora_adapter else None,
        )  # fmt: skip
        completions = measure(stats, peer, workload, args)
        stats.card_gb = card.taken_gb() if card else None
        judge(stats, workload, completions, tokenizer, real_weights=args.load_format != "dummy")
        finished.append(stats)
        save(finished, args.stats_path)
    print(f"stats: {args.stats_path}")


def lora_mode(args: argparse.Namespace, peer: Peer) -> str:
    adapters = getattr(getattr(peer, "walker", None), "adapters", None)
    return "unmerged" if adapters is None else adapters.mode


def run_config(args: argparse.Namespace, workload: Workload) -> dict[str, object]:
    prompt_tokens = [len(prompt.token_ids) for prompt in workload.prompts]
    described = {
        "workload_prompts": len(prompt_tokens),
        "workload_prompt_tokens_mean": statistics.mean(prompt_tokens),
        "workload_max_tokens_mean": statistics.mean(workload.max_tokens),
        "workload_n": workload.n,
    }
    return flags_of(args) | described


def measure(stats: PeerStats, peer: Peer, workload: Workload, args: argparse.Namespace) -> list[list[int]]:
    """One warm-up, then --n_rounds timed calls, round r with seed + r. Returns the last round's completions."""
    started = time.perf_counter()
    peer.start(workload)
    generated = peer.generate(workload, args.seed)
    stats.warmup_seconds = time.perf_counter() - started
    prepared = generated.engine
    for round_index in range(args.n_rounds):
        peer.forget_prompts()
        started = time.perf_counter()
        generated = peer.generate(workload, args.seed + 1 + round_index)
        seconds = time.perf_counter() - started
        check_lengths(generated.completions, workload)
        stats.rounds.append(round_stats(generated, workload, seconds))
        note(f"{stats.backend}, {workload.name}, round {round_index + 1} of {args.n_rounds}: {stats.rounds[-1].tps:.0f} tok/s")
    stats.attention_backend, stats.fallbacks = peer.attention, list(peer.fallbacks)
    add_peak_memory(stats)
    if (memory := peer.peak_memory()) is not None:
        stats.peak_allocated_gb, stats.peak_reserved_gb = memory
    if generated.engine is not None:
        add_engine_stats(stats, generated.engine, prepared)
        if torch.cuda.is_available():
            prompts = [prompt.token_ids for prompt in workload.prompts for _ in range(workload.n)]
            halfway = [prompt + c[: len(c) // 2] for prompt, c in zip(prompts, generated.completions)]
            add_bandwidth(stats, peer.engine, workload.mean_context, halfway)
    return generated.completions


def check_lengths(completions: list[list[int]], workload: Workload) -> None:
    """A backend that stops early would look fast."""
    wanted = [tokens for tokens in workload.max_tokens for _ in range(workload.n)]
    lengths = [len(completion) for completion in completions]
    if lengths != wanted:
        wrong = [index for index, (length, want) in enumerate(zip(lengths, wanted)) if length != want]
        fail(f"{len(lengths)} completions for {len(wanted)} asked for, wrong lengths at {wrong[:5]}: the figures would not compare")


def round_stats(generated: Generated, workload: Workload, seconds: float) -> RoundStats:
    stats = RoundStats(
        prompt_tokens=sum(len(prompt.token_ids) for prompt in workload.prompts) * workload.n,
        generated_tokens=sum(map(len, generated.completions)),
        total_seconds=seconds,
    )
    if (engine := generated.engine) is not None:
        stats.prefill_seconds, stats.decode_seconds = engine.prefill_seconds, engine.decode_seconds
        stats.decode_steps, stats.preemptions, stats.pages_used = engine.decode_steps, engine.preemptions, engine.peak_pages_used
    return stats


class Card:
    """The first GPU as NVIDIA's management library sees it: all processes together, and no CUDA context in this one for it."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self.pynvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.used_before = self._used()

    def _used(self) -> int:
        return self.pynvml.nvmlDeviceGetMemoryInfo(self.handle).used

    def taken_gb(self) -> float:
        """More than at the start, in 10^9 bytes."""
        return (self._used() - self.used_before) / 1e9

    def name(self) -> str:
        return self.pynvml.nvmlDeviceGetName(self.handle)


def find_card() -> Card | None:
    if not torch.cuda.is_available():
        return None
    if importlib.util.find_spec("pynvml") is None:
        note("what the GPU holds outside of this process is not measured: pip install nvidia-ml-py")
        return None
    return Card()


def judge(
    stats: PeerStats, workload: Workload, completions: list[list[int]], tokenizer: PreTrainedTokenizerBase, real_weights: bool
) -> None:
    """Accuracy, coherence and a few completions to read. A completion counts up to its first end-of-sequence token."""
    texts, correct = [], []
    for index, completion in enumerate(completions):
        prompt = workload.prompts[index // workload.n]
        ended = completion.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in completion else len(completion)
        text = tokenizer.decode(completion[:ended], skip_special_tokens=True)
        right = None if prompt.answer is None else is_right(text, prompt.answer)
        texts.append(text)
        correct.append(right)
        if len(stats.sample_completions) < SAMPLES_KEPT:
            reason = "stop" if ended < len(completion) else "length"
            sample = SampleCompletion(index // workload.n, prompt.text, text, reason, ended, None, right)
            stats.sample_completions.append(sample)
    if real_weights:
        graded = [right for right in correct if right is not None]
        stats.accuracy = statistics.mean(graded) if graded else None
        stats.coherent = statistics.mean(map(is_coherent, texts)) >= 0.5


def is_coherent(text: str) -> bool:
    """Words, not a stuck loop or noise: letters prevail, few odd characters, and at most two thirds of the words repeat."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    odd = sum(not (character.isascii() or character.isalpha()) for character in text)
    return len(words) >= 3 and odd <= 0.05 * len(text) and 3 * len(set(words)) >= len(words)


def save(runs: list[PeerStats], path: str) -> None:
    """One JSON array."""
    save_text("[" + ",\n".join(stats.to_json() for stats in runs) + "]\n", path)


# -------------------------------------------------------------------------------------------------------------- comparison


def read_runs(paths: Sequence[str]) -> list[PeerStats]:
    runs = []
    for path in paths:
        try:
            runs += [PeerStats.from_json(json.dumps(run)) for run in json.loads(Path(path).read_text())]
        except (OSError, ValueError, TypeError) as error:
            fail(f"--compare {path}: {error}")
    return runs


def label(stats: PeerStats) -> str:
    """Backend and the switches that change what it does."""
    config = stats.config
    marks = [name for name in ("persistent_cb", "enforce_eager") if config.get(name)]
    marks += ["no prefix caching"] if stats.backend == "vllm" and not config.get("prefix_caching") else []
    marks += [f"LoRA {stats.lora['mode']}"] if stats.lora else []
    marks += ["4-bit"] if config.get("load_in_4bit") else []
    return " + ".join([stats.backend, *marks])


def percent_of_vllm(stats: PeerStats, runs: Sequence[PeerStats]) -> float | None:
    """Median against the best vLLM median on the same workload, with or without LoRA alike."""
    rivals = [
        run.tps_median
        for run in runs
        if run.backend == "vllm" and run.fingerprint == stats.fingerprint and bool(run.lora) == bool(stats.lora)
    ]
    return 100 * stats.tps_median / max(rivals) if rivals else None


def in_order(runs: Sequence[PeerStats]) -> list[PeerStats]:
    """Batches by size, then groups, then mixed lengths; backends as they were given."""

    def key(run: PeerStats) -> tuple:
        kind, _, size = run.workload.partition(" ")
        return kind, [int(number) for number in size.split("x")], run.fingerprint

    return sorted(runs, key=key)


def comparison_table(runs: Sequence[PeerStats]) -> str:
    """Markdown; one row for each run, workload by workload. Workloads of the same name but other contents stay apart."""
    columns = (
        "workload", "backend", "attention", "tok/s median", "min", "best", "% of vLLM",
        "allocated GB", "reserved GB", "on the card GB", "coherent", "start s", "warm-up s",
    )  # fmt: skip

    def cell(value: object, form: str) -> str:
        return "–" if value is None else format(value, form)

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    contents: dict[str, list[str]] = {}
    for run in in_order(runs):
        variants = contents.setdefault(run.workload, [])
        variants += [run.fingerprint] if run.fingerprint not in variants else []
        variant = variants.index(run.fingerprint)
        cells = (
            run.workload + "'" * variant, label(run), run.attention_backend.replace("|", " "), cell(run.tps_median, ".0f"),
            cell(min(run.tps_all, default=None), ".0f"), cell(run.tps_best, ".0f"),
            cell(percent_of_vllm(run, runs), ".0f"), cell(run.peak_allocated_gb, ".1f"), cell(run.peak_reserved_gb, ".1f"),
            cell(run.card_gb, ".1f"), {True: "yes", False: "no", None: "–"}[run.coherent],
            cell(run.startup_seconds, ".0f"), cell(run.warmup_seconds, ".0f"),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def comparison_plot(runs: Sequence[PeerStats], path: Path) -> None:
    """Tok/s by workload, a group of bars each: the median, with minimum and maximum as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(run.workload for run in in_order(runs)))
    labels = list(dict.fromkeys(label(run) for run in runs))
    width = 0.8 / len(labels)
    figure, axes = pyplot.subplots(figsize=(2 + 1.2 * len(workloads), 4.5), layout="constrained")
    for index, name in enumerate(labels):
        own = [run for run in runs if label(run) == name and run.rounds]
        x = [workloads.index(run.workload) + (index - (len(labels) - 1) / 2) * width for run in own]
        medians = np.array([run.tps_median for run in own])
        whiskers = [medians - [min(run.tps_all) for run in own], [run.tps_best for run in own] - medians]
        axes.bar(x, medians, width, yerr=whiskers, label=name, capsize=2)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("generated tokens per second, whole call")
    axes.set_title(f"{runs[0].model_name}, {runs[0].device}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def compare(paths: Sequence[str], compare_path: str) -> None:
    runs = read_runs(paths)
    table = comparison_table(runs)
    target = Path(compare_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_name(target.name + ".md").write_text(table)
    comparison_plot(runs, target.with_name(target.name + ".png"))
    print(f"\n{table}\ntable and plot: {target}.md, {target}.png")


# -------------------------------------------------------------------------------------------------------------------- main


def run_children(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Each backend in a process of its own; those that can't run say so and the others go on."""
    path, paths, failed = Path(args.stats_path), [], False
    for name in args.backend:
        own_path = str(path.with_name(f"{path.stem}_{name}{path.suffix}"))
        python = args.vllm_python if name == "vllm" and args.vllm_python else sys.executable
        command = [python, __file__, *argv, "--backend", name, "--stats_path", own_path]
        if subprocess.run(command).returncode == 0:
            paths.append(own_path)
        else:
            failed = True
    if paths:
        compare(paths, args.compare_path)
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse_arguments(argv)
    if args.compare:
        compare(args.compare, args.compare_path)
        return 0
    if args.n > 1:
        fail("--n: several completions of a prompt are a workload of their own here, --groups PROMPTSxN")
    if args.stop or args.stop_token_ids:
        fail("--stop and --stop_token_ids don't apply: every completion has its length fixed")
    check_measured_lora(args)
    check_writable(args.stats_path)
    if len(args.backend) > 1:
        return run_children(args, argv)
    resolve_model_name(args)
    name = args.backend[0]
    if args.vllm_python and name == "vllm" and Path(args.vllm_python) != Path(sys.executable):
        return run_children(args, argv)
    if refusal := PEERS[name].refusal(args):
        fail(f"--backend {name}: {refusal}")
    run_backend(args, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
