"""GRPO rollouts for TRL: the trainer's completions come from an engine in its own process, with its own weights.

    trainer = GRPOTrainer(model, reward_funcs, GRPOConfig(...), train_dataset, peft_config=LoraConfig(...))
    attach_flex_rollouts(trainer)
    trainer.train()

TRL reaches vLLM through one object with two methods, `sync_weights` and `generate`; `FlexGeneration` is another such object. So
TRL itself asks for one sync per optimizer step, corrects for the sampler's log-probabilities and logs how far they are off.

    optimizer step ──► sync_weights ──► generate ──► rewards, old log-probs, loss ──► optimizer step
                       refresh_lora     KV pool mapped, and given back before the training step
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import trl
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from flex_engine import EngineConfig, FlexEngine, HFWalker, InvalidPromptError, SamplingParams, Walker
from flex_nf4 import compute_dtype
from flex_weights import unwrapped
from written_walkers import WALKERS

KNOWN_TRL = ("1.16",)
MAX_DEFAULT_BATCH = 256
PROMPTS_PER_TOKENIZATION = 256
GENERATION_KWARGS = {field.name for field in dataclasses.fields(SamplingParams)} - {"n"}


def attach_flex_rollouts(
    trainer: GRPOTrainer,
    *,
    lora_mode: str | None = "active",
    walker_class: type[Walker] | None = None,
    max_prompt_length: int | None = None,
    correct_truncation: bool = False,
    sleep: bool = True,
    compile_walker: bool | str | None = None,
    **engine_options,
) -> FlexGeneration:
    """Makes `trainer`, built with `use_vllm=False`, generate with a FlexEngine. Returns the adapter; its `engine` has the stats.

    lora_mode: "active" computes the function that is trained, "merged" is faster and rounds it (flex_lora); full fine-tuning
    has no use for it. walker_class: by default the written walker of the model's type, else HFWalker.
    max_prompt_length: tokens of the longest prompt; measured on the trainer's datasets where it can be.
    correct_truncation: which log-probabilities TRL's importance sampling gets while top_k, top_p or min_p is on. By default those
    without filters, log_softmax(logits / temperature), the trainer's own: the ratio is then about 1 and corrects what the
    sampler computes differently. With True those of the truncated distribution, as vLLM gives: the ratio is each token's kept
    mass, unbiased for that sampler, but over a long completion the product vanishes and, with TRL's sequence-level modes, so
    does its gradient. Without filters both are the same.
    sleep: gives the KV pool's memory to the training step. compile_walker: decodes through torch.compile (flex_compile).
    engine_options: fields of EngineConfig.

    Raises ValueError naming what can't be done: a TRL that was not tried, FSDP or DeepSpeed, options without meaning here.
    """
    refuse_unsupported(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    walker = make_walker(model, walker_class, lora_mode, training_dtype(trainer, model), compile_walker)
    engine_options.setdefault("max_batch_size", min(MAX_DEFAULT_BATCH, rollout_batch_size(trainer)))
    if "max_seq_len" not in engine_options:
        engine_options["max_seq_len"] = (max_prompt_length or longest_prompt(trainer)) + trainer.max_completion_length
    engine = FlexEngine(walker, trainer._tokenizer, EngineConfig(**engine_options))
    engine.eos_ids = sorted(trainer.eos_token_ids)  # what TRL counts as an end, and masks by, is what ends a completion
    return attach_engine(trainer, engine, correct_truncation, sleep)


def attach_engine(trainer: GRPOTrainer, engine: FlexEngine, correct_truncation: bool, sleep: bool) -> FlexGeneration:
    """Puts an engine, or what behaves like one, where `trainer` generates."""
    generation = FlexGeneration(trainer, engine, correct_truncation, sleep)
    trainer.vllm_generation, trainer.use_vllm, trainer.vllm_mode = generation, True, "colocate"
    trainer.add_callback(SyncFirst(trainer))
    if trainer.vllm_importance_sampling_correction and trains_once_on_each_rollout(trainer):
        CorrectionInLoss(trainer)
    return generation


class FlexGeneration:
    """What TRL knows as `vllm_generation`. No method talks to another process: each rank has its own engine."""

    def __init__(self, trainer: GRPOTrainer, engine: FlexEngine, correct_truncation: bool, sleep: bool):
        self.trainer, self.engine = trainer, engine
        self.correct_truncation, self.sleep = correct_truncation, sleep
        options = dict(trainer.args.generation_kwargs or {})
        self.seed = options.pop("seed", trainer.args.seed)
        self.sampling = {
            "max_tokens": trainer.max_completion_length,
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": trainer.top_k,
            "min_p": trainer.min_p or 0.0,
            **options,
        }
        # TRL's tool loop asks vLLM how long a conversation may get.
        model_config = SimpleNamespace(max_model_len=engine.config.max_seq_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))
        self.drawn: tuple[int, str, int] = (-1, "", 0)
        if sleep:
            engine.sleep()

    def sync_weights(self) -> None:
        """TRL calls it before the first rollout after an optimizer step."""
        self.engine.refresh_lora()

    def generate(self, prompts: list[list[int]], images: list | None, num_generations: int, profiler=None) -> tuple:
        """One completion of each prompt; TRL sends a prompt as often as it wants completions, and equal ones are computed once.

        Returns (prompt ids, completion ids, log-probabilities `[B][T][1]`, their token ids `[B][T][1]`).
        """
        if images is not None:
            raise ValueError("the dataset has images, and the rollout engine generates from text only")
        started = time.perf_counter()
        seed = self._next_seed()
        params = [SamplingParams(**self.sampling | {"max_tokens": self._room(prompt), "seed": seed}) for prompt in prompts]
        try:
            with profiler or contextlib.nullcontext():
                outputs = self.engine.generate(prompts, params)
        except InvalidPromptError as error:
            error.add_note("attach_flex_rollouts(trainer, max_prompt_length=...) makes room for longer prompts")
            raise
        finally:
            if self.sleep:
                self.engine.sleep()
        completions = [output.outputs[0] for output in outputs]
        tokens = sum(len(completion.token_ids) for completion in completions)
        mode = "train" if self.trainer.model.training else "eval"
        self.trainer._metrics[mode]["rollout/tokens_per_second"].append(tokens / (time.perf_counter() - started))
        logprobs = [c.logprobs if self.correct_truncation else c.full_logprobs for c in completions]
        return (
            [output.prompt_token_ids for output in outputs],
            [completion.token_ids for completion in completions],
            [[[logprob] for logprob in sequence] for sequence in logprobs],
            [[[token] for token in completion.token_ids] for completion in completions],
        )

    def _room(self, prompt: Sequence[int]) -> int:
        """A later turn of a conversation with tools may use what the earlier ones have left."""
        limit = self.sampling["max_tokens"]
        return min(limit, max(1, self.engine.config.max_seq_len - len(prompt))) if self.trainer.tools else limit

    def _next_seed(self) -> int:
        """Another for each call and rank, and the same again in a run that is repeated or resumed."""
        trainer = self.trainer
        step, mode = trainer.state.global_step, "train" if trainer.model.training else "eval"
        last_step, last_mode, calls = self.drawn
        self.drawn = (step, mode, calls + 1 if (step, mode) == (last_step, last_mode) else 0)
        return random.Random(f"{self.seed} {trainer.accelerator.process_index} {self.drawn}").getrandbits(62)


class SyncFirst(TrainerCallback):
    """TRL syncs when `global_step` differs from the last rollout's, so a second `train()` or weights loaded in between could go
    unseen."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.forget()

    def forget(self) -> None:
        self.trainer._last_loaded_step = -1

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.forget()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.forget()


class CorrectionInLoss:
    """TRL's importance-sampling correction without a forward of its own.

    TRL computes the trainer's log-probabilities of a rollout before its first update, for the ratio p_trainer / p_sampler. Where the
    rollout is used up before the weights change, the loss's own forward computes the same ones, so the ratio is taken there, and
    TRL is told at the rollout that there is nothing to correct. Ratio, clipping and metrics are as in TRL.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.inputs: dict | None = None  # of the loss that is being computed
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # (|difference|, ratio) of each micro-batch of this update
        self.score, self.loss = trainer._generate_and_score_completions, trainer._compute_loss
        self.logprobs = trainer._get_per_token_logps_and_entropies
        trainer._generate_and_score_completions, trainer._compute_loss = self.score_uncorrected, self.corrected_loss
        trainer._get_per_token_logps_and_entropies = self.logprobs_and_ratio

    def score_uncorrected(self, inputs):
        self.trainer.vllm_importance_sampling_correction = False
        try:
            return self.score(inputs)
        finally:
            self.trainer.vllm_importance_sampling_correction = True

    def corrected_loss(self, model, inputs):
        self.inputs = dict(inputs)
        try:
            return self.loss(model, self.inputs)
        finally:
            self.inputs = None

    def logprobs_and_ratio(self, *args, **kwargs):
        result = self.logprobs(*args, **kwargs)
        if self.inputs is not None:
            self.inputs["importance_sampling_ratio"] = self.ratio(result[0].detach(), self.inputs)
        return result

    def ratio(self, logprobs_BT: torch.Tensor, inputs: dict) -> torch.Tensor:
        """`[B, T]`, or `[B, 1]` in TRL's sequence modes."""
        trainer, mask_BT = self.trainer, inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask_BT = mask_BT * inputs["tool_mask"]
        difference_BT = (logprobs_BT - inputs["sampling_per_token_logps"]) * mask_BT
        level, _, limit = trainer.vllm_importance_sampling_mode.partition("_")
        ratio = (difference_BT.sum(-1, keepdim=True) if level == "sequence" else difference_BT).exp()
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        ratio = ratio.clamp(low, high) if limit == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        self.seen.append((difference_BT.abs()[mask_BT.bool()], ratio.flatten() if level == "sequence" else ratio[mask_BT.bool()]))
        if trainer.accelerator.sync_gradients:
            self.log()
        return ratio

    def log(self) -> None:
        """What TRL logs of a rollout, over all micro-batches and ranks."""
        trainer, (difference, ratio) = self.trainer, map(torch.cat, zip(*self.seen))
        self.seen = []
        if difference.numel() == 0:  # every completion was masked as truncated
            difference = difference.new_zeros(1)
            ratio = ratio if ratio.numel() else ratio.new_zeros(1)
        own = torch.stack([difference.mean(), difference.max(), ratio.min(), ratio.mean(), ratio.max()])
        means, maxima, least, ratios, largest = trainer.accelerator.gather(own[None]).float().unbind(1)
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in {
            "sampling_logp_difference/mean": means.mean(), "sampling_logp_difference/max": maxima.max(),
            "importance_sampling_ratio/min": least.min(), "importance_sampling_ratio/mean": ratios.mean(),
            "importance_sampling_ratio/max": largest.max(),
        }.items():  # fmt: skip
            metrics[f"sampling/{name}"].append(value.item())


def trains_once_on_each_rollout(trainer: GRPOTrainer) -> bool:
    """Whether every rollout is used up within one optimizer step: TRL's own condition for leaving old log-probabilities out."""
    return trainer.args.gradient_accumulation_steps % (trainer.args.steps_per_generation * trainer.num_iterations) == 0


# ------------------------------------------------------------------------------------------------------------ what attaches


def refuse_unsupported(trainer: GRPOTrainer) -> None:
    """Raises ValueError naming the version or the option."""
    if trl.__version__.rsplit(".", 1)[0] not in KNOWN_TRL:
        raise ValueError(f"trl {trl.__version__} was not tried with these rollouts; install trl {' or '.join(KNOWN_TRL)}")
    sharders = {
        DistributedType.FSDP: "FSDP",
        DistributedType.DEEPSPEED: "DeepSpeed (ZeRO-3 shards the weights, its other stages keep them in buffers of their own)",
        DistributedType.MEGATRON_LM: "Megatron-LM",
    }
    if kind := sharders.get(trainer.accelerator.distributed_type):
        raise ValueError(f"{kind} is not supported: the rollout engine reads whole weights in place; use DDP, or one GPU")
    args = trainer.args
    refused = {
        "use_vllm=True": trainer.use_vllm,
        "use_transformers_continuous_batching=True": trainer.use_transformers_continuous_batching,
        f"repetition_penalty={trainer.repetition_penalty}": trainer.repetition_penalty != 1.0,
        f"temperature={trainer.temperature}": trainer.temperature <= 0,
        "vllm_structured_outputs_regex": args.vllm_structured_outputs_regex is not None,
        f"loss_type='vespo' with vllm_importance_sampling_mode='{trainer.vllm_importance_sampling_mode}'": (
            trainer.loss_type == "vespo"
            and trainer.vllm_importance_sampling_correction
            and not trainer.vllm_importance_sampling_mode.startswith("token")
        ),
    }
    refused |= {f"generation_kwargs[{name!r}]": name not in GENERATION_KWARGS for name in args.generation_kwargs or {}}
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(f"the rollout engine can't be used with {', '.join(names)}")
    devices = {str(parameter.device) for parameter in trainer.model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"the model lies on {', '.join(sorted(devices))}; the rollout engine needs it on one device")


def make_walker(
    model: torch.nn.Module, walker_class: type[Walker] | None, lora_mode: str | None, dtype: torch.dtype,
    compile_walker: bool | str | None,
) -> Walker:  # fmt: skip
    base = unwrapped(model)
    if walker_class is None:
        fitting = (walker for walker in WALKERS if base.config.model_type in walker.model_types)
        walker_class = next(fitting, HFWalker)
    if walker_class is HFWalker:
        return HFWalker(base, dtype)
    return walker_class(model, dtype=dtype, lora_mode=lora_mode, compile_walker=compile_walker)


def training_dtype(trainer: GRPOTrainer, model: torch.nn.Module) -> torch.dtype:
    """What the trainer's own forward computes in: autocast's dtype, else that of the layers (an fp32 lm_head, tied or not, says
    nothing about them, nor does an adapter: TRL makes that of a 4-bit base bfloat16)."""
    if trainer.args.bf16 or trainer.args.fp16:
        return torch.bfloat16 if trainer.args.bf16 else torch.float16
    layers = unwrapped(model).get_decoder().layers.named_parameters()
    own = (parameter.dtype for name, parameter in layers if parameter.is_floating_point() and "lora_" not in name)
    return compute_dtype(model) or next(own)


def rollout_batch_size(trainer: GRPOTrainer) -> int:
    """Completions that this process asks for at a time."""
    args = trainer.args
    train = args.per_device_train_batch_size * args.steps_per_generation
    return max(train, args.per_device_eval_batch_size if trainer.eval_dataset is not None else 0)


def longest_prompt(trainer: GRPOTrainer) -> int:
    """Tokens of the longest prompt of the trainer's datasets. Raises ValueError where they can't be read beforehand."""
    evaluation = trainer.eval_dataset
    evaluations = evaluation.values() if isinstance(evaluation, dict) else [] if evaluation is None else [evaluation]
    longest = 1
    for dataset in (trainer.train_dataset, *evaluations):
        if not isinstance(dataset, Dataset) or trainer.environment_factories is not None:
            raise ValueError("the longest prompt is not known beforehand: attach_flex_rollouts(trainer, max_prompt_length=...)")
        for first in range(0, len(dataset), PROMPTS_PER_TOKENIZATION):
            prompts = dataset[first : first + PROMPTS_PER_TOKENIZATION]["prompt"]
            longest = max(longest, *map(len, trainer._tokenize_prompts(prompts)[0]))
    return longest
