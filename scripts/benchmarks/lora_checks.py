"""What a rollout does to a trainer's weights and probabilities: nothing may drift, and what rounding costs is measured.

`verify_no_drift` is --verify_no_drift. `merge_rounding_report` says how much of an adapter a merge into 16-bit weights keeps, and
how far each LoRA mode's log-probabilities lie from the trainer's own forward.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

from flex_engine import EngineConfig, FlexEngine, SamplingParams
from flex_lora import LORA_MODES, Delta, active_tensors, can_merge, is_lora, target_of, unwrap
from flex_nf4 import float_weight
from lora_adapters import fresh_adapter

HASH_CHUNK = 1 << 24  # elements hashed at a time, so that temporaries stay small beside the weights


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, shapes and bits, computed where the tensors are: each bit pattern times an odd number of its own, summed
    modulo 2^64."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        bits = tensor.detach().contiguous().flatten()
        bits = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
        total = 0
        for first in range(0, bits.numel(), HASH_CHUNK):
            chunk = bits[first : first + HASH_CHUNK].long()
            place = torch.arange(first, first + chunk.numel(), device=bits.device)
            total += int(((place * 0x1E3779B97F4A7C15) ^ (place >> 7)).bitwise_or_(1).mul_(chunk).sum())
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total % 2**64};".encode())
    return digest.hexdigest()[:32]


# ---------------------------------------------------------------------------------------------------------------------- drift


@dataclass
class DriftReport:
    """Of `cycles` times: noise on the adapter, refresh. Then the adapter as it was, and a refresh."""

    lora_mode: str
    cycles: int
    noise: float
    base_bit_identical: bool
    """The trainer's base weights have the bits that they had before the first cycle."""
    inference_deterministic: bool
    """With the adapter restored, what `refresh` writes has the same bits, and greedy decoding the same tokens and log-probs."""
    perturbation_seen: bool
    """Each cycle changed what `refresh` writes: without that, the rest would prove nothing."""
    refresh_idempotent: bool
    """A second refresh of an unchanged adapter writes the same bits."""
    refresh_seconds: float
    """Median of one refresh."""
    base_hash: str

    @property
    def passed(self) -> bool:
        return self.base_bit_identical and self.inference_deterministic and self.perturbation_seen and self.refresh_idempotent

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


@torch.no_grad()
def verify_no_drift(
    engine: FlexEngine,
    cycles: int = 10,
    noise: float = 0.01,
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 16,
    seed: int = 0,
) -> DriftReport:
    """Whether refreshing leaves a trace. The engine's walker must be a written one; a model without adapter gets a fresh one."""
    if not hasattr(engine.walker, "adapters"):
        raise ValueError(f"{type(engine.walker).__name__} runs PEFT's own layers: there are no weights of the engine's to drift")
    model = engine.walker.model
    if not any(True for _ in active_tensors(model)):
        fresh_adapter(model, seed=seed)
    engine.refresh_lora()
    generator = torch.Generator(engine.device).manual_seed(seed)
    if prompts is None:
        shape = (min(4, engine.config.max_batch_size), max(1, min(24, engine.config.max_seq_len - max_tokens)))
        drawn = torch.randint(engine.walker.vocab_size, shape, generator=generator, device=engine.device)
        prompts = drawn.tolist()
    adapter = {name: parameter for name, parameter, _ in active_tensors(model)}
    saved = {name: parameter.data.clone() for name, parameter in adapter.items()}
    own = {id(parameter) for parameter in adapter.values()}
    base = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in own]
    base += model.named_buffers()  # 4-bit experts, for one

    def written() -> str:
        return fingerprint((str(index), tensor) for index, tensor in enumerate(engine.walker.adapters.written()))

    def greedy() -> list[tuple[list[int], list[float]]]:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    base_hash, written_hash, answers = fingerprint(base), written(), greedy()
    engine.refresh_lora()
    idempotent = written() == written_hash
    seconds, hashes = [], [written_hash]
    for _ in range(cycles):
        for parameter in adapter.values():
            drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.data += (noise * drawn).to(parameter.dtype)
        started = time.perf_counter()
        engine.refresh_lora()
        seconds.append(time.perf_counter() - started)
        hashes.append(written())
    for name, parameter in adapter.items():
        parameter.data.copy_(saved[name])
    engine.refresh_lora()
    return DriftReport(
        lora_mode=engine.walker.adapters.mode,
        cycles=cycles,
        noise=noise,
        base_bit_identical=fingerprint(base) == base_hash,
        inference_deterministic=written() == written_hash and greedy() == answers,
        perturbation_seen=len(set(hashes)) == cycles + 1,
        refresh_idempotent=idempotent,
        refresh_seconds=statistics.median(seconds),
        base_hash=base_hash,
    )


# ------------------------------------------------------------------------------------------------------------------- rounding


@dataclass
class MergeRounding:
    """How much of an adapter is left after it is merged into weights of the base's dtype."""

    share: float
    """Of the whole delta: <merged - base, delta> / <delta, delta>. 1 is all of it, 0 is nothing."""
    unmoved: float
    """The share of weights with a non-zero delta that the merge leaves as they are."""
    layers: dict[str, float] = field(default_factory=dict)
    """`share` of each layer."""


@torch.no_grad()
def merge_rounding(model: nn.Module) -> MergeRounding:
    """Of the active LoRA layers with plain deltas. An adapter that has learned little lies below the weights' step: at a learning
    rate of 5e-6 a bfloat16 merge carries a few percent of the first update."""
    layers: dict[str, float] = {}
    whole_kept = whole = unmoved = moved_at_all = 0.0
    for name, module in model.named_modules():
        if not is_lora(module):
            continue
        part = unwrap(name, module, target_of(module))
        deltas = [delta for delta in part.deltas if delta.magnitude is None]
        if not deltas:
            continue
        base = float_weight(part.base) if part.parameter == "weight" else part.weight.data
        delta = sum((_dense(delta) for delta in deltas), torch.zeros_like(base, dtype=torch.float32))
        kept = (base.float() + delta).to(base.dtype).float() - base.float()
        square, product = delta.square().sum(dtype=torch.float64).item(), (kept * delta).sum(dtype=torch.float64).item()
        layers[name] = product / square if square else 1.0
        whole, whole_kept = whole + square, whole_kept + product
        moved_at_all += delta.count_nonzero().item()
        unmoved += ((kept == 0) & (delta != 0)).sum().item()
    return MergeRounding(whole_kept / whole if whole else 1.0, unmoved / moved_at_all if moved_at_all else 0.0, layers)


def _dense(delta: Delta) -> Tensor:
    left, right = delta.factors()
    return delta.scaling * (left.float() @ right.float())


@dataclass
class LogprobError:
    """Log-probabilities of sampled tokens against the trainer's own forward on the same tokens."""

    mean_abs: float
    max_abs: float
    kl: float
    """KL(sampler || trainer) per token, estimated from the sampled tokens as mean(r - 1 - log r), r = p_trainer / p_sampler."""
    tokens: int

    @classmethod
    def between(cls, sampler: Tensor, trainer: Tensor) -> LogprobError:
        log_ratio = trainer.double() - sampler.double()
        kl = (log_ratio.exp() - 1 - log_ratio).mean().item()
        return cls(log_ratio.abs().mean().item(), log_ratio.abs().max().item(), kl, log_ratio.numel())


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask `[B, longest]`, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


@torch.no_grad()
def trainer_logprobs(model: nn.Module, prompts: Sequence[Sequence[int]], completions_BT: Tensor) -> Tensor:
    """log p of each completion token by the model's own forward, as a trainer computes it: all sequences in one batch, in evaluation
    mode. fp32 `[B, T]`."""
    ids, mask = padded(prompts, completions_BT.device)
    first = ids.shape[1]
    ids, mask = torch.cat((ids, completions_BT), dim=1), torch.cat((mask, torch.ones_like(completions_BT)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits_BTV = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, first - 1 : -1].float()
    return logits_BTV.log_softmax(-1).gather(2, completions_BT[..., None])[..., 0]


@dataclass
class MergeRoundingReport:
    """What merging costs beside the exact mode."""

    rounding: MergeRounding
    errors: dict[str, LogprobError]
    """Of each LoRA mode, and under "hf_generate" of Hugging Face's generate: the yardstick."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        share, unmoved = self.rounding.share, self.rounding.unmoved
        lines = [f"a merge keeps {share:.1%} of the delta and leaves {unmoved:.1%} of its weights unmoved"]
        lines += [
            f"{name:<12} log-probabilities off by {error.mean_abs:.2g} (mean), {error.max_abs:.2g} (max), KL {error.kl:.2g}"
            for name, error in self.errors.items()
        ]
        return "\n".join(lines)


def merge_rounding_report(
    walker_class, model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int = 64, config: EngineConfig | None = None,
    seed: int = 0,
) -> MergeRoundingReport:  # fmt: skip
    """Both parts for the active adapters of `model`. See `mode_errors` about other engines on the same model."""
    return MergeRoundingReport(merge_rounding(model), mode_errors(walker_class, model, prompts, max_tokens, config, seed))


@torch.no_grad()
def mode_errors(
    walker_class, model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int = 64, config: EngineConfig | None = None,
    seed: int = 0,
) -> dict[str, LogprobError]:  # fmt: skip
    """The error of each LoRA mode, and under "hf_generate" that of Hugging Face's generate, its own forward with a cache, on the
    tokens that the active mode has drawn.

    Makes an engine of its own for each mode, one after another. An engine that was there before takes the weights back at its
    next `refresh_lora()`.
    """
    was_training = model.training
    model.eval()
    errors = {}
    config = config or EngineConfig(
        max_batch_size=len(prompts), max_seq_len=max(map(len, prompts)) + max_tokens, capture_cudagraph=False
    )
    for mode in LORA_MODES:
        if mode == "merged" and not can_merge(model, model.get_input_embeddings().weight.dtype):
            continue
        engine = FlexEngine(walker_class(model, lora_mode=mode), config=config)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))
        del engine
        completions_BT = torch.tensor([output.outputs[0].token_ids for output in outputs], device=model.device)
        own_BT = torch.tensor([output.outputs[0].full_logprobs for output in outputs], device=model.device)
        trainer_BT = trainer_logprobs(model, prompts, completions_BT)
        errors[mode] = LogprobError.between(own_BT, trainer_BT)
        if mode == "active":
            errors["hf_generate"] = LogprobError.between(_hf_generate_logprobs(model, prompts, completions_BT), trainer_BT)
    model.train(was_training)
    return errors


class _ForcedTokens(LogitsProcessor):
    """Lets generate choose nothing but the given tokens `[B, T]`."""

    def __init__(self, tokens_BT: Tensor, prompt_length: int):
        self.tokens_BT, self.prompt_length = tokens_BT, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_length
        return torch.full_like(scores, -torch.inf).scatter_(1, self.tokens_BT[:, step : step + 1], 0.0)


def _hf_generate_logprobs(model: nn.Module, prompts: Sequence[Sequence[int]], completions_BT: Tensor) -> Tensor:
    """log p of each completion token as generate computes it: `[B, T]`."""
    ids, mask = padded(prompts, completions_BT.device)
    no_token = model.get_input_embeddings().num_embeddings
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=completions_BT.shape[1], pad_token_id=0, eos_token_id=no_token, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    forced = _ForcedTokens(completions_BT, ids.shape[1])
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=generation, logits_processor=[forced])
    steps = zip(output.logits, completions_BT.unbind(1))
    return torch.stack([logits.float().log_softmax(-1).gather(1, tokens_B[:, None])[:, 0] for logits, tokens_B in steps], dim=1)
