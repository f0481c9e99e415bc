"""Finds decode kernel options on this GPU, by whole decode steps, and writes what --decode_kernel_options takes.

    python flex_autotune_replay.py --load_format dummy --batch_size 64 --context 384 --options_path triton.json
    python flex_autotune_replay.py --load_format dummy --attention_backend flex --options_path flex.json
    python qwen3_flex_inference.py --attention_backend flex --decode_kernel_options @flex.json

A model with several head sizes is searched size by size, and the options are written by head size.

The fastest kernel alone is not the fastest in the stack, so every candidate is timed in the captured decode step of the model.

* flex: Inductor autotunes the decode kernel and logs each tile's time (TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE). The log
  is replayed: of its decode entries, those with one query are ranked, and the fastest tiles go into the step. --log replays
  a log that is at hand. torch 2.11 logs prefill alone (2.13 decode too): there a list of tiles goes into the step.
* triton: the tiles of the project's own kernel, then how finely the keys are split at the best tile; with --n, groups
  that share a prompt, and how many of their queries read it together.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import flex_paged_attention
from flex_cli import HelpFormatter, add_model_arguments, check_writable, integer
from flex_console import fail, note
from flex_decode_attention import DecodeOptions, default_decode_options
from flex_engine import EngineConfig, FlexEngine, HFWalker
from flex_models import load_model
from flex_profile import time_decode_step
from flex_triton import triton
from written_walkers import text_model, walker_class_of

LOG_VARIABLE = "TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE"
TILE_KEYS = ("BLOCK_N", "num_warps", "num_stages")  # of the log, and of flex_attention's kernel_options
WORTHWHILE = 0.995  # of the default's time: less than half a percent is noise
STEPS = 20  # timed back to back


# ------------------------------------------------------------------------------------------------------ Inductor's log


@dataclass(frozen=True)
class LogEntry:
    """One flex_attention call that Inductor autotuned. A dimension is an int, or the text of a symbolic expression."""

    kernel_type: str  # "decode", "forward" or "backward"
    query_shape: tuple[int | str, ...]
    choices: tuple[tuple[dict[str, int], float], ...]  # (tile, milliseconds)

    @property
    def query_length(self) -> int | str:
        """Decode queries are [B, KV heads, group, length, D], and the log's own `seq_len_q` of them is the group."""
        return self.query_shape[-2]


def parse_shape(text: str) -> tuple[int | str, ...]:
    """`"[64, 8, 4, 1, 128]"`, where torch before 2.13 may write expressions: `"[s0, 8, 4, Max(1, s1), 128]"`."""
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"no shape: {text!r}")
    dims, depth = [""], 0
    for character in text[1:-1]:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            dims.append("")
        else:
            dims[-1] += character
    return tuple(int(dim) if dim.isdigit() else dim for dim in (dim.strip() for dim in dims))


def read_log(path: str | Path) -> list[LogEntry]:
    """The entries of TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE (torch/_inductor/select_algorithm.py,
    `maybe_log_flex_attention_results`): a JSON list of {kernel_type, query_shape, key_shape, value_shape, choices}, where a
    choice is {type, time in ms, num_warps, num_stages, BLOCK_N, ..., shapes again}, and the time of one that failed is Infinity.

    Raises ValueError where it is something else.
    """
    try:
        return [
            LogEntry(
                entry["kernel_type"],
                parse_shape(entry["query_shape"]),
                tuple(
                    ({key: choice[key] for key in TILE_KEYS}, float(choice["time"]))
                    for choice in entry["choices"]
                    if choice["type"] == "triton" and math.isfinite(choice["time"])
                ),
            )
            for entry in json.loads(Path(path).read_text())
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no flex_attention autotune log: {error!r}") from error


def decode_entries(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """Those of the decode kernel with one query, the last of each shape. Short prefills take that kernel as well, with more
    queries; a symbolic length may be either, so it counts only where no entry says 1. Raises ValueError if there are none.
    """
    decode = [entry for entry in entries if entry.kernel_type == "decode" and entry.choices]
    one_query = [entry for entry in decode if entry.query_length == 1]
    chosen = one_query or [entry for entry in decode if isinstance(entry.query_length, str)]
    if not chosen:
        seen = ", ".join(f"{entry.kernel_type} {list(entry.query_shape)}" for entry in entries) or "nothing"
        raise ValueError(f"the log has no decode entry of query length 1; it has {seen}")
    return list({entry.query_shape: entry for entry in chosen}.values())


def rank_tiles(entries: Sequence[LogEntry]) -> list[dict[str, int]]:
    """The tiles that ran in every entry, fastest first by the sum of their times."""
    tables = [{tuple(tile.items()): time for tile, time in reversed(entry.choices)} for entry in entries]
    common = set.intersection(*(set(table) for table in tables))
    return [dict(tile) for tile in sorted(common, key=lambda tile: (sum(table[tile] for table in tables), tile))]


@contextmanager
def autotuning(log: Path, exhaustive: bool) -> Iterator[None]:
    """flex_attention autotunes inside and logs to `log`; nothing compiled here is left over.

    Inductor reads the log's name once in a process, so a process can write one log only.
    """
    from torch._inductor import config

    before = {name: os.environ.get(name) for name in (LOG_VARIABLE, "FLEX_COMPILE_MODE")}
    os.environ |= {LOG_VARIABLE: str(log), "FLEX_COMPILE_MODE": "max-autotune-no-cudagraphs"}
    space = "EXHAUSTIVE" if exhaustive else "DEFAULT"
    _forget_compiled()
    try:
        # A cached kernel is not timed again, so it would not be in the log.
        with config.patch(force_disable_caches=True, max_autotune_flex_search_space=space):
            yield
    finally:
        for name in before:
            del os.environ[name]
        os.environ |= {name: value for name, value in before.items() if value is not None}
        _forget_compiled()


def _forget_compiled() -> None:
    flex_paged_attention._compiled_flex.cache_clear()
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------------- whole steps


@dataclass(frozen=True)
class Timing:
    options: dict | None  # None: what the engine takes by itself
    milliseconds: float

    def __str__(self) -> str:
        words = "default" if self.options is None else " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.milliseconds:8.3f} ms  {words}"


Measure = Callable[[dict | None], float]  # milliseconds of a decode step with these options


def measure_all(measure: Measure, candidates: Sequence[dict | None]) -> list[Timing]:
    """In order; a candidate that does not fit into the GPU is a result (inf), not the end."""
    timings = []
    for options in candidates:
        try:
            timings.append(Timing(options, measure(options)))
        except (RuntimeError, triton.TritonError) as error:
            if options is None:
                raise
            note(f"{type(error).__name__}: {str(error).splitlines()[0][:150]}")
            timings.append(Timing(options, math.inf))
        note(str(timings[-1]))
    return timings


def choose(timings: Sequence[Timing]) -> Timing:
    """The fastest, if it is faster than the default by more than noise."""
    (default,) = (timing for timing in timings if timing.options is None)
    best = min(timings, key=lambda timing: timing.milliseconds)
    return best if best.milliseconds < WORTHWHILE * default.milliseconds else default


def confirm(measure: Measure, timings: Sequence[Timing]) -> Timing:
    """The fastest of many is in part the luckiest, so it is measured again, beside the default."""
    best = min(timings, key=lambda timing: timing.milliseconds)
    return best if best.options is None else choose(measure_all(measure, [None, best.options]))


def triton_tiles(default: DecodeOptions) -> list[DecodeOptions]:
    tiles = ((64, 4, 2), (64, 4, 3), (64, 8, 3), (32, 4, 2), (32, 4, 3), (32, 4, 4), (128, 4, 2), (128, 8, 2), (16, 4, 4))
    return [replace(default, block_n=n, num_warps=warps, num_stages=stages) for n, warps, stages in tiles]


def tune_triton(measure: Measure, default: DecodeOptions, groups: bool) -> list[Timing]:
    """Tiles first, then at the best tile how the keys are split, and for groups how many queries read a prefix together."""

    def best(timings: Sequence[Timing]) -> DecodeOptions:
        return DecodeOptions(**(min(timings, key=lambda timing: timing.milliseconds).options or asdict(default)))

    timings = measure_all(measure, [None, *(asdict(tile) for tile in triton_tiles(default) if tile != default)])
    stages: list[Callable[[DecodeOptions], list[DecodeOptions]]] = [
        lambda tile: [replace(tile, ctas_per_sm=count) for count in (2, 4, 6, 8, 12)],
        lambda tile: [replace(tile, min_tiles=count) for count in (1, 2, 4)],
    ]
    if groups:
        stages.insert(0, lambda tile: [replace(tile, shared_queries=count) for count in (16, 32, 64)])
    for stage in stages:
        known = [asdict(default), *(timing.options for timing in timings)]
        timings += measure_all(measure, [asdict(o) for o in stage(best(timings)) if asdict(o) not in known])
    return timings


def tune_flex(measure: Measure, entries: Sequence[LogEntry], top: int, head_dim: int | None = None) -> list[Timing]:
    """`head_dim`: of the entries that count; None counts all."""
    chosen = [entry for entry in decode_entries(entries) if head_dim is None or entry.query_shape[-1] == head_dim]
    return measure_all(measure, [None, *rank_tiles(chosen)[:top]])


UNLOGGED_TILES = [
    dict(zip(TILE_KEYS, tile))
    for tile in ((64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 4), (128, 4, 2), (128, 8, 2), (64, 8, 3), (32, 2, 3))
]  # fmt: skip


class StepTimer:
    """Decode steps of one model under changing options."""

    def __init__(self, engine: FlexEngine, args: argparse.Namespace):
        self.engine, self.args = engine, args
        self.head_dims = sorted({spec.head_dim for spec in engine.walker.specs})
        self.searched, self.chosen = self.head_dims[0], {}  # the head size under search, and the options of those before it

    def options(self, options: dict | None) -> dict | None:
        """As --decode_kernel_options takes them: plain where there is one head size."""
        if len(self.head_dims) == 1:
            return options
        return {str(size): own for size, own in {**self.chosen, self.searched: options}.items() if own} or None

    def __call__(self, options: dict | None) -> float:
        return self.time(self.options(options))

    def time(self, options: dict | None) -> float:
        engine, args = self.engine, self.args
        engine.drop_graphs()
        engine.backend = flex_paged_attention.make_backend(args.attention_backend, engine.device, options)
        return time_decode_step(engine, args.batch_size, args.context, args.n, args.prompt_tokens, STEPS)

    def log(self, path: Path, exhaustive: bool) -> bool:
        """Lets Inductor autotune one decode step's attention, and log it; False where this torch logs no decode kernels."""
        neutral = {"PRESCALE_QK": False}  # flex_attention's default; empty options would mean the engine's own tile
        with autotuning(path, exhaustive):
            self.time(neutral)
        return path.exists()


# -------------------------------------------------------------------------------------------------------------- main


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_model_arguments(parser, "unsloth/Qwen3-4B-Base")
    parser.set_defaults(seed=0)
    group = parser.add_argument_group("decode step")
    group.add_argument("--attention_backend", choices=("triton", "flex"), default="triton", help="whose options")
    group.add_argument("--batch_size", metavar="N", type=integer(1), default=64, help="rows")
    group.add_argument("--context", metavar="N", type=integer(STEPS * 3 + 1), default=384, help="keys that a row sees")
    group.add_argument("--page_size", metavar="N", type=integer(1), help="tokens (default: 64 for flex, 32 for triton)")
    group.add_argument("--n", metavar="N", type=integer(1), default=1, help="completions of each prompt")
    group.add_argument(
        "--prompt_tokens", metavar="N", type=integer(0), default=0, help="that the completions of a prompt share, with --n"
    )
    group = parser.add_argument_group("search")
    group.add_argument("--log", metavar="FILE", help=f"flex: an autotune log at hand ({LOG_VARIABLE}) instead of a new one")
    group.add_argument(
        "--search_space", choices=("default", "exhaustive"), default="exhaustive", help="flex: tiles that Inductor autotunes"
    )
    group.add_argument("--top", metavar="N", type=integer(1), default=6, help="flex: tiles of the log to time in the step")
    group.add_argument(
        "--options_path", default="outputs/decode_kernel_options.json", metavar="FILE", help="where the best options go"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if args.prompt_tokens + STEPS * 3 >= args.context:
        parser.error(f"--prompt_tokens must leave {STEPS * 3} of the --context {args.context} to each completion")
    check_writable(args.options_path, "--options_path")
    model = text_model(load_model(args)[0])
    try:
        walker_class = HFWalker if args.walker == "hf" else walker_class_of(model)
    except ValueError as error:
        fail(str(error))
    config = EngineConfig(
        max_batch_size=args.batch_size, max_seq_len=args.context + STEPS * 4, page_size=args.page_size,
        attention_backend=args.attention_backend,
    )  # fmt: skip
    engine = FlexEngine(walker_class(model), None, config)
    timer = StepTimer(engine, args)
    try:
        if args.attention_backend == "flex":
            log = Path(args.log or Path(tempfile.mkdtemp()) / "flex_attention.json")
            is_logged = bool(args.log) or timer.log(log, args.search_space == "exhaustive")
            if not is_logged:
                note(f"torch {torch.__version__} logs no decode kernel; a list of tiles goes into the step instead")
        for head_dim in timer.head_dims:
            timer.searched = head_dim
            if args.attention_backend == "flex" and is_logged:
                timings = tune_flex(timer, read_log(log), args.top, head_dim)
            elif args.attention_backend == "flex":
                timings = measure_all(timer, [None, *UNLOGGED_TILES])
            else:
                default = default_decode_options(head_dim, engine.walker.dtype, args.batch_size)
                timings = tune_triton(timer, default, groups=args.n > 1 and args.prompt_tokens > 0)
            note("once more:")
            timer.chosen[head_dim] = confirm(timer, timings).options
            report(timings, timer.chosen[head_dim], head_dim, args)
    except (OSError, ValueError) as error:
        fail(str(error))
    options = timer.options(timer.chosen[head_dim])
    Path(args.options_path).write_text(json.dumps(options or {}) + "\n")
    print(f"options: {args.options_path}" + ("" if options else " (empty: the default is not beaten)"))
    return 0


def report(timings: Sequence[Timing], chosen: dict | None, head_dim: int, args: argparse.Namespace) -> None:
    shape = f"batch {args.batch_size}, context {args.context}" + (f", {args.n} per prompt" if args.n > 1 else "")
    print(f"\n{args.attention_backend} decode steps, heads of {head_dim}, {shape}, on {torch.cuda.get_device_name()}:")
    for timing in sorted(timings, key=lambda timing: timing.milliseconds):
        print(f"{timing}{'  <- taken' if timing.options == chosen else ''}")


if __name__ == "__main__":
    sys.exit(main())
