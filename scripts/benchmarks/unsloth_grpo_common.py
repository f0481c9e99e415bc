"""What the GRPO drivers share, so that they differ in the rollout only: flags, task, trainer, timing, and the stats JSON.

    def main(argv=None) -> int:
        parser = build_grpo_parser(__doc__)
        args = parser.parse_args(argv)
        return run_grpo("naive", args)

`run_grpo` builds one GRPOTrainer from the flags, lets the driver change how it generates, trains, and writes `GRPOStats`. Tasks need
no hub: sums and word problems are built in, and reasoning-gym's generators are used where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import os
import random
import re
import resource
import statistics
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from cb_vs_vllm_generation import find_card
from flex_cli import (
    HelpFormatter,
    add_model_arguments,
    check_writable,
    device_name,
    flags_of,
    integer,
    library_versions,
    number,
    save_text,
    top_k,
)
from flex_console import fail, note, terminated_as_interrupted
from flex_memory import peak_memory_gb, reset_peak_memory
from flex_models import EMBEDDED, default_device, hub_reachable, load_model
from flex_weights import unwrapped
from lora_adapters import lora_config
from prompts import (
    GRPO_CHAT_TEMPLATE,
    REASONING_END,
    SOLUTION_END,
    SOLUTION_START,
    WORD_PROBLEMS,
    choose_template,
    is_right,
    known_answer,
    parse_answer,
    read_prompts_file,
)
from written_walkers import text_model

if TYPE_CHECKING:
    from trl import GRPOTrainer

GENERATED_TASKS = ("gsm_symbolic", "chain_sum")
TASKS = ("sums", "word_problems", *GENERATED_TASKS, "dapo_math")
DAPO_MATH = ("open-r1/DAPO-Math-17k-Processed", "en")
MAX_GRAD_NORM = 1.0
SUM_TOKENS = 4  # a blank, two digits, and the end
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


# ---------------------------------------------------------------------------------------------------------------------- flags


def build_grpo_parser(
    description: str | None, default_model: str = "unsloth/Qwen3-4B-Base", cpu_model: str = EMBEDDED
) -> argparse.ArgumentParser:
    """The flags that every GRPO driver has; defaults that depend on the machine are those of this one."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    add_model_arguments(parser, default_model, cpu_model, with_walker=False)
    parser.set_defaults(lora_targets="all")

    group = parser.add_argument_group("task")
    group.add_argument(
        "--task", choices=TASKS, help=f"sums and word_problems are built in; {' and '.join(GENERATED_TASKS)} are reasoning-gym's, "
        f"dapo_math is {DAPO_MATH[0]} from the hub (default: word_problems; sums with the model of a CPU)",
    )  # fmt: skip
    group.add_argument(
        "--prompts_file", metavar="FILE", help='problems of your own instead, one per line: {"prompt": ..., "answer": 42}'
    )
    group.add_argument(
        "--chat_template", choices=("auto", "grpo", "native", "plain"), default="auto",
        help="grpo: reasoning and solution tags for base models; native: the tokenizer's; plain: none; auto: plain for sums, grpo for "
        "Qwen3 base models, else native",
    )  # fmt: skip
    group.add_argument(
        "--max_prompt_length", metavar="N", type=integer(1), help="tokens; longer prompts are left out (default: the longest)"
    )

    group = parser.add_argument_group("sampling")
    group.add_argument("--max_completion_length", metavar="N", type=integer(1), help=f"tokens (default: 512; sums {SUM_TOKENS})")
    group.add_argument("--temperature", metavar="X", type=number(0, math.inf, open_low=True), default=1.0, help="above 0")
    group.add_argument("--top_k", metavar="X", type=top_k, default=0, help="0, -1 and None are off")
    group.add_argument("--top_p", metavar="X", type=number(0, 1, open_low=True), default=1.0, help="1 is off")
    group.add_argument("--min_p", metavar="X", type=number(0, 1), default=0.0, help="0 is off")

    group = parser.add_argument_group("training")
    group.add_argument("--max_steps", metavar="N", type=integer(1), default=20, help="optimizer steps")
    group.add_argument("--n_prompts", metavar="N", type=integer(1), default=8 if on_gpu else 4, help="of each step and rank")
    group.add_argument("--num_generations", metavar="N", type=integer(2), default=8, help="completions of a prompt")
    group.add_argument(
        "--per_device_train_batch_size", metavar="N", type=integer(1),
        help="completions in one forward and backward; gradients are accumulated over the step (default: at most 8)",
    )  # fmt: skip
    group.add_argument(
        "--learning_rate", metavar="X", type=number(0, math.inf, open_low=True), default=1e-5 if on_gpu else 2e-4, help="constant"
    )
    group.add_argument("--beta", metavar="X", type=number(0, math.inf), default=0.001, help="of the KL term; 0 drops the reference forward")
    group.add_argument("--lora_rank", metavar="R", type=integer(0), default=32, help="of the adapter; 0 trains every weight")
    group.add_argument("--load_in_4bit", action="store_true", help="bitsandbytes NF4 base weights, with LoRA")
    group.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=on_gpu, help="autocast, whatever the parameters' --dtype"
    )
    group.add_argument("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=on_gpu, help="recompute activations")
    group.add_argument("--seed", metavar="N", type=integer(0), default=0, help="of the task, the adapter and the sampling")

    group = parser.add_argument_group("run")
    group.add_argument(
        "--stats_path", default=f"outputs/{parser.prog.removesuffix('.py')}_stats.json", metavar="FILE", help="where the stats JSON goes"
    )
    group.add_argument("--save_path", metavar="FOLDER", help="where the trained model or adapter goes (default: nowhere)")
    return parser


def add_correction_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--importance_sampling", action=argparse.BooleanOptionalAction, default=True,
        help="correct for the sampler's log-probabilities and log how far they are off",
    )  # fmt: skip


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("torch.compile of the training step")
    group.add_argument("--compile_mode", choices=COMPILE_MODES, help="compiles policy and reference model (default: not compiled)")
    group.add_argument("--compile_dynamic", action="store_true", help="one graph for all lengths")


# ----------------------------------------------------------------------------------------------------------------------- task


@dataclass
class Task:
    """Problems with their answers, and what a completion is worth. `rewards` take TRL's arguments and give a list of floats."""

    problems: list[str | list[dict]]
    answers: list[object]
    rewards: list[Callable]


def text_of(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right_answer(completions: list, answer: list, **_) -> list[float]:
    """1 where the completion ends in the right answer."""
    return [float(is_right(text_of(completion), right)) for completion, right in zip(completions, answer)]


def right_first_line(completions: list, answer: list, **_) -> list[float]:
    """1 where the first line is the right number and nothing else."""
    lines = [(text_of(completion).strip().splitlines() or [""])[0].strip() for completion in completions]
    return [float(line == str(right)) for line, right in zip(lines, answer)]


def follows_format(completions: list, **_) -> list[float]:
    """Half a point for the tags of the GRPO template, once each and in order. The prompt has opened the reasoning already."""
    pattern = re.compile(rf"^(?:(?!{REASONING_END}).)*{REASONING_END}\s*{SOLUTION_START}[^<]+{SOLUTION_END}\s*$", re.DOTALL)
    return [0.5 * bool(pattern.match(text_of(completion))) for completion in completions]


def short_sums(count: int, seed: int) -> Task:
    """Sums of two digits after one example: half right, before any training, for a model as small as the embedded one."""
    drawn = random.Random(seed)
    pairs = [(drawn.randint(1, 9), drawn.randint(1, 9)) for _ in range(count)]
    return Task([f"2 + 3 = 5\n{a} + {b} =" for a, b in pairs], [a + b for a, b in pairs], [right_first_line])


def word_problems(count: int, seed: int) -> Task:
    order = random.Random(seed).sample(WORD_PROBLEMS, len(WORD_PROBLEMS))
    problems, answers = zip(*(order[index % len(order)] for index in range(count)))
    return Task(list(problems), list(answers), [right_answer])


def reasoning_gym_task(name: str, count: int, seed: int) -> Task:
    if importlib.util.find_spec("reasoning_gym") is None:
        fail(f"--task {name} needs reasoning-gym: pip install reasoning-gym==0.1.25 (builds pycosat: a C compiler and Python's headers)")
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=count, seed=seed)

    def score(completions: list, answer: list, **_) -> list[float]:
        """reasoning-gym's own scorer on the number that a completion ends in."""
        found = [parse_answer(text_of(completion)) for completion in completions]
        return [dataset.score_answer(None if number is None else str(number), {"answer": right}) for number, right in zip(found, answer)]

    entries = list(dataset)
    return Task([entry["question"] for entry in entries], [entry["answer"] for entry in entries], [score])


def dapo_math(count: int, seed: int) -> Task:
    if not hub_reachable():
        fail("--task dapo_math comes from the model hub, which can't be reached; use another --task or --prompts_file")
    from datasets import load_dataset

    rows = load_dataset(*DAPO_MATH, split="train").shuffle(seed=seed)
    rows = rows.select(index % len(rows) for index in range(count))
    return Task(list(rows["prompt"]), [known_answer(answer) for answer in rows["solution"]], [right_answer])


def task_from_file(path: str, count: int) -> Task:
    try:
        read = read_prompts_file(path)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--prompts_file {path}: {error}")
    bad = next((prompt for prompt in read if prompt.error or prompt.answer is None), None)
    if bad or not read:
        fail(f"{bad.source}: {bad.error or 'has no answer'}" if bad else f"--prompts_file {path} holds no prompt")
    rows = [read[index % len(read)] for index in range(count)]
    return Task([row.content for row in rows], [row.answer for row in rows], [right_answer])


def make_task(args: argparse.Namespace) -> Task:
    """As many problems as the run will ask; settles what the flags left to the task. Ends the script if they can't be had."""
    count = args.n_prompts * args.max_steps
    args.task = None if args.prompts_file else args.task or ("sums" if args.model_name == args.cpu_model else "word_problems")
    args.max_completion_length = args.max_completion_length or (SUM_TOKENS if args.task == "sums" else 512)
    if args.task == "sums" and args.chat_template == "auto":
        args.chat_template = "plain"
    if args.prompts_file:
        return task_from_file(args.prompts_file, count)
    if args.task in GENERATED_TASKS:
        return reasoning_gym_task(args.task, count, args.seed)
    return {"sums": short_sums, "word_problems": word_problems, "dapo_math": dapo_math}[args.task](count, args.seed)


def make_dataset(task: Task, args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
    """TRL's dataset: chat messages, or plain text where the tokenizer has no template. Sets --max_prompt_length."""
    from datasets import Dataset

    try:
        template = choose_template(args.chat_template, model.config, args.model_name, tokenizer)
    except ValueError as error:
        fail(str(error))
    if template == "grpo":
        tokenizer.chat_template = GRPO_CHAT_TEMPLATE
        task.rewards = [*task.rewards, follows_format]

    def tokens(prompt) -> int:
        if template == "plain":
            return len(tokenizer(prompt)["input_ids"])
        return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])

    texts = [p if isinstance(p, str) else "\n".join(m["content"] for m in p) for p in task.problems]
    turns = [p if isinstance(p, list) else [{"role": "user", "content": p}] for p in task.problems]
    prompts = texts if template == "plain" else turns
    lengths = [tokens(prompt) for prompt in prompts]
    args.max_prompt_length = args.max_prompt_length or max(lengths)
    kept = [index for index, length in enumerate(lengths) if length <= args.max_prompt_length]
    if len(kept) < len(prompts):
        note(f"{len(prompts) - len(kept)} of {len(prompts)} prompts are longer than --max_prompt_length {args.max_prompt_length}")
    if len(kept) < args.n_prompts:
        fail(f"{len(kept)} prompts are left, fewer than the {args.n_prompts} of a step")
    return Dataset.from_dict({"prompt": [prompts[i] for i in kept], "answer": [task.answers[i] for i in kept]})


# ---------------------------------------------------------------------------------------------------------------------- stats


@dataclass
class GRPOStats:
    """The stats JSON of every GRPO driver. Lists have one entry per optimizer step; seconds are wall clock, memory 10^9 bytes.

    `rollout_wall_s` is the part of a step from prompts to completions, weight sync included. `logp_difference` is the mean
    absolute difference between the sampler's and the trainer's log-probabilities, where the backend reports its own.
    """

    backend: str
    model_name: str
    device: str
    versions: dict[str, str]
    config: dict[str, object]
    max_steps: int
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    train_wall_s: float = 0.0
    peak_memory_gb: float | None = None
    peak_reserved_gb: float | None = None
    card_gb: float | None = None
    step_wall_s: list[float] = field(default_factory=list)
    rollout_wall_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    kl: list[float | None] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    logp_difference: list[float | None] = field(default_factory=list)
    logp_difference_max: list[float | None] = field(default_factory=list)
    completion_lengths: list[float | None] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    extras: dict[str, object] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        save_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", path)

    @classmethod
    def load(cls, path: str | Path) -> GRPOStats:
        """Raises OSError, or ValueError when the file is no stats of a GRPO run."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not the stats of a GRPO run: {error}") from error


LOGGED = {
    "losses": "loss",
    "rewards": "reward",
    "kl": "kl",
    "grad_norm": "grad_norm",
    "logp_difference": "sampling/sampling_logp_difference/mean",
    "logp_difference_max": "sampling/sampling_logp_difference/max",
    "completion_lengths": "completions/mean_length",
}


class StepTimer(TrainerCallback):
    """Fills the stats as training goes: the wall clock of each optimizer step and of its rollout, and what TRL logs."""

    def __init__(self, stats: GRPOStats, card):
        self.stats, self.card = stats, card
        self.started = self.rollout = 0.0

    def watch(self, trainer: GRPOTrainer) -> None:
        """Times TRL's one way to any backend; a step with tools goes there several times."""
        generate = trainer._generate_single_turn

        def timed(*args, **kwargs):
            started = self.clock()
            try:
                return generate(*args, **kwargs)
            finally:
                self.rollout += self.clock() - started

        trainer._generate_single_turn = timed

    @staticmethod
    def clock() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.started, self.rollout = self.clock(), 0.0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.stats.step_wall_s.append(self.clock() - self.started)
        self.stats.rollout_wall_s.append(self.rollout)
        if self.card is not None:
            self.stats.card_gb = max(self.stats.card_gb or 0.0, self.card.taken_gb())

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs is None or "loss" not in logs:
            return
        for name, key in LOGGED.items():
            value = logs.get(key)
            getattr(self.stats, name).append(None if value is None else float(value))
        if not state.is_world_process_zero:
            return
        done, wall = len(self.stats.losses), self.stats.step_wall_s
        seconds = f", {wall[-1]:.2f} s, of which rollout {self.stats.rollout_wall_s[-1]:.2f}" if wall else ""
        note(f"step {done} of {self.stats.max_steps}: reward {self.stats.rewards[-1]:.3f}, loss {self.stats.losses[-1]:.4f}{seconds}")


# -------------------------------------------------------------------------------------------------------------------- trainer


def local_checkpoint(args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Writes random weights where backends and reference models that load by name find them."""
    if args.load_format == "dummy" and not args.load_in_4bit:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model.config._name_or_path = model.name_or_path = folder


def make_trainer(args: argparse.Namespace, stats_callback: StepTimer, scratch: str, needs_files: bool, **config) -> GRPOTrainer:
    """The trainer of the flags; `config` goes to GRPOConfig. Everything but the rollout is the same for every backend. `scratch` is a
    folder for what nobody wants to keep."""
    from trl import GRPOConfig, GRPOTrainer

    if args.load_in_4bit and args.lora_rank == 0:
        fail("--load_in_4bit trains an adapter only: --lora_rank must be above 0")
    loaded, tokenizer = load_model(args)
    model = text_model(loaded)
    if needs_files or (args.lora_rank == 0 and args.beta > 0):
        local_checkpoint(args, model, tokenizer, os.path.join(scratch, "model"))
    task = make_task(args)
    dataset = make_dataset(task, args, model, tokenizer)
    completions = args.n_prompts * args.num_generations
    micro = args.per_device_train_batch_size or next(size for size in (8, 7, 6, 5, 4, 3, 2, 1) if completions % size == 0)
    if completions % micro:
        fail(f"--per_device_train_batch_size {micro} does not divide {args.n_prompts} prompts x {args.num_generations} generations")
    if config.get("use_vllm"):
        config["vllm_max_model_length"] = args.max_prompt_length + args.max_completion_length
    grpo = GRPOConfig(
        output_dir=args.save_path or scratch,
        max_steps=args.max_steps,
        num_generations=args.num_generations,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or None,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        beta=args.beta,
        bf16=args.bf16,
        gradient_checkpointing=args.gradient_checkpointing,
        seed=args.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        **config,
    )
    try:
        trainer = GRPOTrainer(
            model=model, reward_funcs=task.rewards, args=grpo, train_dataset=dataset, processing_class=tokenizer,
            peft_config=lora_config(model, args.lora_rank, args.lora_targets) if args.lora_rank else None, callbacks=[stats_callback],
        )  # fmt: skip
    except (ValueError, ImportError, OSError) as error:
        if config.get("use_vllm"):
            raise  # it comes from anywhere in vLLM's start, and pydantic's first line does not name the fault
        fail(str(error).strip().splitlines()[0])
    trainer.remove_callback(PrinterCallback)  # the timer's own line says what matters
    return trainer


def run_grpo(
    backend: str,
    args: argparse.Namespace,
    attach: Callable[[GRPOTrainer], Callable[[], dict[str, object]]] = lambda trainer: dict,
    needs_files: bool = False,
    **config,
) -> int:
    """The whole of a driver; returns its exit status. `attach` changes how the trainer generates and returns what tells the
    stats' extras at the end; `config` goes to GRPOConfig, and `needs_files` is a backend that loads the model by name."""
    check_writable(args.stats_path)
    with terminated_as_interrupted(), tempfile.TemporaryDirectory(prefix="grpo-") as scratch:  # it can hold a whole checkpoint
        return train_and_report(backend, args, attach, scratch, needs_files, config)


def train_and_report(
    backend: str, args: argparse.Namespace, attach: Callable[[GRPOTrainer], Callable[[], dict[str, object]]], scratch: str,
    needs_files: bool, config: dict[str, object],
) -> int:  # fmt: skip
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # weights go to this rank's GPU at once
    card = find_card()
    stats = GRPOStats(
        backend, "", device_name(default_device()), library_versions(), {}, args.max_steps, args.num_generations, 0, 0
    )
    timer = StepTimer(stats, card)
    trainer = make_trainer(args, timer, scratch, needs_files, **config)
    try:
        extras = attach(trainer)
    except ValueError as error:
        fail(str(error).strip().splitlines()[0])
    timer.watch(trainer)
    stats.model_name, stats.max_prompt_length, stats.max_completion_length = (
        args.model_name, args.max_prompt_length, args.max_completion_length
    )  # fmt: skip
    stats.config = flags_of(args)
    if torch.cuda.is_available():
        reset_peak_memory()
    started = time.perf_counter()
    try:
        trainer.train()
        stats.finished = True
    except KeyboardInterrupt:
        note(f"interrupted after {len(stats.step_wall_s)} of {args.max_steps} steps")
    except Exception as error:
        stats.error = one_line(error)
        raise
    finally:
        stats.train_wall_s = time.perf_counter() - started
        stats.extras = extras()
        add_peaks(stats)
        if trainer.accelerator.is_main_process:
            stats.save(args.stats_path)
    if stats.finished and args.save_path:
        trainer.save_model(args.save_path)
    if trainer.accelerator.is_main_process:
        print_summary(stats)
        print(f"stats: {args.stats_path}")
    return 0 if stats.finished else 130


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def add_peaks(stats: GRPOStats) -> None:
    """Of training alone on a GPU, of the process on a CPU."""
    if torch.cuda.is_available():
        stats.peak_memory_gb, stats.peak_reserved_gb = peak_memory_gb()
    else:
        stats.peak_memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def print_summary(stats: GRPOStats) -> None:
    if not stats.rewards:
        return
    settled = slice(3 if len(stats.step_wall_s) > 3 else 0, None)
    step, rollout = (statistics.median(values[settled]) for values in (stats.step_wall_s, stats.rollout_wall_s))
    differences = [value for value in stats.logp_difference if value is not None]
    rows = {
        "run": f"{stats.backend}, {stats.model_name} ({stats.device})",
        "train": f"{stats.train_wall_s:.1f} s for {len(stats.step_wall_s)} steps",
        "step": f"{step:.2f} s median, of which rollout {rollout:.2f} s",
        "reward": f"{stats.rewards[0]:.3f} in the first step, {stats.rewards[-1]:.3f} in the last",
        "peak memory": f"{stats.peak_memory_gb:.2f} GB",
    }
    if differences:
        rows["logp difference"] = f"{statistics.mean(differences):.2g} mean, sampler against trainer"
    print()
    for name, value in rows.items():
        print(f"{name:<18}{value}")


# -------------------------------------------------------------------------------------------------------------- torch.compile


@dataclass
class CompiledForwards:
    """The forwards of policy and reference model, compiled for training and eager while generating. One that the compiler fails on
    stays eager; the stats say why."""

    mode: str
    dynamic: bool | None
    generating: bool = False
    failures: list[str] = field(default_factory=list)

    def install(self, model: PreTrainedModel) -> None:
        eager = model.forward
        compiled = torch.compile(eager, mode=self.mode, dynamic=self.dynamic)

        @functools.wraps(eager.__func__)  # `generate` checks its arguments against the signature
        def forward(_, *args, **kwargs):
            if self.generating or self.failures:
                return eager(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # whatever a compiler may raise
                self.failures.append(one_line(error))
                note(f"warning: torch.compile failed, training goes on without: {self.failures[-1]}")
                return eager(*args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def report(self) -> dict[str, object]:
        breaks = torch._dynamo.utils.counters["graph_break"]
        return {"graph_breaks": sum(breaks.values()), "graph_break_reasons": list(breaks), "compile_failures": self.failures}


def compile_training(trainer: GRPOTrainer, args: argparse.Namespace) -> Callable[[], dict[str, object]]:
    """Does what the compile flags ask for; returns what tells the stats' extras."""
    if args.compile_mode is None:
        return dict
    forwards = CompiledForwards(args.compile_mode, True if args.compile_dynamic else None)
    for model in filter(None, (trainer.accelerator.unwrap_model(trainer.model), trainer.ref_model)):
        forwards.install(unwrapped(model))
    generate = trainer._generate_single_turn

    def eagerly(*positional, **named):
        forwards.generating = True
        try:
            return generate(*positional, **named)
        finally:
            forwards.generating = False

    trainer._generate_single_turn = eagerly
    return forwards.report
