"""GRPO runs laid over each other: what the drivers' stats files say, pair by pair, with a table, a plot and a gate.

    python scripts/benchmarks/compare_grpo_runs.py outputs/qwen3_grpo_flex_stats.json outputs/qwen3_grpo_naive_stats.json

The gate fails (exit status 1) where a loss or gradient norm is not finite, a run is not finished, or the KL, as a mean over five
steps, leaves its band.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from flex_cli import HelpFormatter, check_writable, number
from flex_console import fail
from unsloth_grpo_common import GRPOStats

SETTLED = 3  # steps left out of medians: compiling, capturing, first allocations
MUST_AGREE = (
    "model_name", "task", "n_prompts", "learning_rate", "beta", "lora_rank", "load_in_4bit", "temperature", "top_k", "top_p", "min_p",
    "dtype", "bf16", "seed",
)  # fmt: skip
METRICS = {"loss": "losses", "kl": "kl", "reward": "rewards", "grad_norm": "grad_norm", "step time (s)": "step_wall_s"}
PLOTTED = {"reward": "rewards", "KL": "kl", "step time (s)": "step_wall_s", "rollout time (s)": "rollout_wall_s"}
SMOOTHED = 5  # steps of the moving mean, in the plot and of the KL that the gate sees


@dataclass
class Difference:
    """One metric of two runs, step by step; medians from the fourth step on. None where one of them does not log it."""

    max_abs: float | None
    mean_abs: float | None
    medians: tuple[float | None, float | None]

    @classmethod
    def between(cls, first: list[float | None], second: list[float | None]) -> Difference:
        gaps = [abs(a - b) for a, b in zip(first, second) if a is not None and b is not None]
        medians = (settled_median(first), settled_median(second))
        return cls(max(gaps), statistics.mean(gaps), medians) if gaps else cls(None, None, medians)


def settled_median(values: list[float | None]) -> float | None:
    kept = [value for value in (values[SETTLED:] or values) if value is not None]
    return statistics.median(kept) if kept else None


def label(run: GRPOStats, runs: list[GRPOStats]) -> str:
    """The backend, and what tells two runs of the same backend apart."""
    same = [other for other in runs if other.backend == run.backend]
    if len(same) == 1:
        return run.backend
    keys = ("lora_mode", "importance_sampling", "load_in_4bit", "persistent_cb", "compile_mode", "walker")
    telling = [key for key in keys if len({str(other.config.get(key)) for other in same}) > 1]
    marks = [f"{key} {run.config.get(key)}" for key in telling]
    return f"{run.backend} ({', '.join(marks) or f'run {same.index(run) + 1}'})"


def problems(run: GRPOStats, kl_band: float) -> list[str]:
    """Why this run fails the gate."""
    why = f" ({run.error})" if run.error else ""
    found = [] if run.finished else [f"ended after {len(run.losses)} of {run.max_steps} steps{why}"]
    for name in ("losses", "grad_norm"):
        bad = [step for step, value in enumerate(getattr(run, name), 1) if value is None or not math.isfinite(value)]
        found += [f"{name} not finite in step {bad[0]}"] if bad else []
    # A step's KL is estimated from its own tokens, and one unlikely token among them can carry it.
    smooth = moving_mean([kl for kl in run.kl if kl is not None])
    outside = [step for step, kl in enumerate(smooth, 1) if not -1e-6 <= kl <= kl_band]
    return found + ([f"KL {smooth[outside[0] - 1]:.3g} up to step {outside[0]} is outside [0, {kl_band:g}]"] if outside else [])


def unlike(runs: list[GRPOStats]) -> list[str]:
    """Settings in which the runs differ although they should not."""
    names = ("max_steps", "num_generations", "max_prompt_length", "max_completion_length")
    differing = [name for name in names if len({getattr(run, name) for run in runs}) > 1]
    return differing + [name for name in MUST_AGREE if len({str(run.config.get(name)) for run in runs}) > 1]


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def report(runs: list[GRPOStats], names: list[str]) -> str:
    lines = [
        "| run | train wall (s) | step, median (s) | % of vllm's | rollout, median (s) | % of vllm's | peak memory (GB) | GPU taken (GB) "
        "| last 5 rewards | logp difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    yardstick = next((run for run in runs if run.backend == "vllm"), None)
    for name, run in zip(names, runs):
        times = []
        for attribute in ("step_wall_s", "rollout_wall_s"):
            own, vllm = (settled_median(getattr(r, attribute)) if r else None for r in (run, yardstick))
            times += [own, 100 * own / vllm if own and vllm else None]
        cells = [
            run.train_wall_s, *times, run.peak_memory_gb, run.card_gb,
            statistics.mean(run.rewards[-5:]) if run.rewards else None, settled_median(run.logp_difference),
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(map(shown, cells)) + " |")
    compiled = [(name, run) for name, run in zip(names, runs) if run.config.get("compile_mode")]
    if compiled:
        lines += ["", "| torch.compile of the training step | mode | graph breaks | why | failures |", "|---|---|---|---|---|"]
    for name, run in compiled:
        reasons, failures = (run.extras.get(key) or [] for key in ("graph_break_reasons", "compile_failures"))
        why, failed = ("; ".join(text.split("\n")[0].replace("|", "/") for text in texts) or "-" for texts in (reasons, failures))
        lines.append(f"| {name} | {run.config['compile_mode']} | {run.extras.get('graph_breaks', '-')} | {why} | {failed} |")
    lines += ["", "| pair | metric | max abs difference | mean abs difference | medians |", "|---|---|---|---|---|"]
    for (name, run), (other_name, other) in combinations(zip(names, runs), 2):
        for metric, attribute in METRICS.items():
            difference = Difference.between(getattr(run, attribute), getattr(other, attribute))
            medians = " and ".join(map(shown, difference.medians))
            cells = [f"{name}, {other_name}", metric, shown(difference.max_abs), shown(difference.mean_abs), medians]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def moving_mean(values: list[float]) -> list[float]:
    return [statistics.mean(values[max(0, end - SMOOTHED) : end]) for end in range(1, len(values) + 1)]


def plot(runs: list[GRPOStats], names: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (title, attribute) in zip(axes.flat, PLOTTED.items()):
        for index, (name, run) in enumerate(zip(names, runs)):
            values = [value for value in getattr(run, attribute) if value is not None]
            steps, color = range(1, len(values) + 1), f"C{index}"
            axis.plot(steps, values, color=color, alpha=0.3)
            axis.plot(steps, moving_mean(values), color=color, label=name)
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.suptitle(f"{runs[0].model_name}, {runs[0].device}; moving mean of {SMOOTHED} steps")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("stats", metavar="JSON", nargs="+", help="stats files of GRPO drivers")
    parser.add_argument(
        "--kl_band", metavar="X", type=number(0, math.inf, open_low=True), default=0.5, help="largest KL, in nats per token, that passes"
    )
    parser.add_argument("--compare_path", metavar="PATH", default="outputs/grpo", help="where PATH.md and PATH.png go")
    args = parser.parse_args(argv)
    check_writable(args.compare_path + ".md", "--compare_path")
    try:
        runs = [GRPOStats.load(path) for path in args.stats]
    except (OSError, ValueError) as error:
        fail(str(error))
    names = [label(run, runs) for run in runs]
    text = report(runs, names)
    Path(args.compare_path + ".md").write_text(text + "\n")
    plot(runs, names, Path(args.compare_path + ".png"))
    print(text)
    if differing := unlike(runs):
        print(f"\nnote: the runs differ in {', '.join(differing)}")
    failures = [f"{name}: {problem}" for name, run in zip(names, runs) for problem in problems(run, args.kl_band)]
    print("\n" + "\n".join(failures or [f"PASS: finished, finite, KL within [0, {args.kl_band:g}]"]))
    print(f"table: {args.compare_path}.md, plot: {args.compare_path}.png")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
