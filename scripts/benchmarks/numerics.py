"""Engine against plain Hugging Face: references, gates and the report of every verify_*_numerics.py.

What is asked depends on the dtype:

* float32: greedy tokens are those of `model.generate`, token for token.
* bfloat16, float16: identity can't be asked, because Hugging Face differs from itself at another batch size. Hugging Face's
  own rounding error is the yardstick: its forward in that dtype against its forward in fp32, on the tokens the engine chose.
  A greedy token's fp32 logit lies within twice that error of the largest (if no logit is off by more than e, two may change
  places that lie 2e apart), and the log-probabilities of sampled tokens are off by at most 1.25 times as much. Sampled, because
  greedy prefers the tokens whose rounding went up.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from flex_engine import Attend, DecodeBatch, FlexEngine, HFWalker, PrefillBatch, SamplingParams, Walker

TOKEN_GATE = 2.0  # times Hugging Face's own error at that position
LOGPROB_GATE = 1.25  # times Hugging Face's own mean error
FP32_LOGPROB_TOLERANCE = 1e-3  # summation order gives about 1e-5; a wrong scale, mask or position far more than this
MIN_DISTINCT_TOKENS = 16  # fewer, and agreement says little: a model that repeats itself hides what attention does


# ------------------------------------------------------------------------------------------------------------ the reference


@dataclass
class Reference:
    """Plain Hugging Face models that share no storage with the engine's: `exact` in fp32, `plain` in the dtype under test (None
    where that is fp32). Make it before the walker, which moves the model's weights into slots of its own."""

    exact: PreTrainedModel
    plain: PreTrainedModel | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Reference:
        plain = None if model.dtype == torch.float32 else copy.deepcopy(model).eval()
        return cls(copy.deepcopy(model).float().eval(), plain)

    def assert_unshared(self, model: torch.nn.Module) -> None:
        taken = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for own in filter(None, (self.exact, self.plain)):
            assert not any(p.untyped_storage().data_ptr() in taken for p in own.parameters()), "reference shares weights"


@torch.no_grad()
def hf_logits(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """The logits that predict each token of `completion`, in one forward: fp32 `[len(completion), vocab]`."""
    ids = torch.tensor([[*prompt, *completion[:-1]]], device=model.device)
    keep = torch.arange(len(prompt) - 1, ids.shape[1], device=model.device)
    return model(input_ids=ids, logits_to_keep=keep).logits[0].float()


@torch.no_grad()
def hf_greedy(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What `model.generate` answers greedily, of this very length."""
    own = model.generation_config
    model.generation_config = GenerationConfig()  # its end-of-sequence ids and penalties would come in otherwise
    try:
        ids = torch.tensor([list(prompt)], device=model.device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0)
    finally:
        model.generation_config = own
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def engine_last_logits(engine: FlexEngine, prompts: Sequence[list[int]]) -> Tensor:
    """The engine's logits after each prompt, fp32 `[len(prompts), vocab]`: a packed prefill, then a decode row for the last token,
    through the engine's walker, cache and attention backend. The engine must be idle; at most `max_batch_size` prompts."""
    cache, device = engine.cache, engine.device
    rows = next(bucket for bucket in engine.buckets if bucket >= len(prompts))
    pages = [cache.pages.allocate(cache.pages.pages_for(len(prompt))) for prompt in prompts]
    try:
        for slot, own in enumerate(pages, start=1):
            cache.assign(slot, own)
        cache.upload()
        starts = [prompt[:-1] for prompt in prompts]
        lengths = [len(start) for start in starts]
        padding = [0] * (engine.backend.padded_prefill_length(sum(lengths)) - sum(lengths))
        token_slots = [int(i) for own, length in zip(pages, lengths) for i in cache.token_slots(own, length)]
        tokens_T, positions_T, slots_T = (
            torch.tensor([*values, *padding], device=device, dtype=torch.long)
            for values in (
                [token for start in starts for token in start],
                [position for length in lengths for position in range(length)],
                token_slots,
            )
        )
        padded = [0] * (rows - len(prompts))
        last_B = torch.tensor([*(prompt[-1] for prompt in prompts), *padded], device=device)
        positions_B = torch.tensor([*lengths, *padded], device=device)
        slots_B = torch.tensor([*range(1, len(prompts) + 1), *padded], device=device)
        with engine.walker.session():
            if starts:
                engine.walker.forward(
                    tokens_T, positions_T, Attend(cache, PrefillBatch(positions_T, slots_T, lengths), engine.backend)
                )
            decode = DecodeBatch(positions_B, cache.page_table[slots_B])
            logits_BV = engine.walker.forward(last_B, positions_B, Attend(cache, decode, engine.backend))
        return logits_BV[: len(prompts)].float()
    finally:
        for own in pages:
            cache.pages.release(own)


def shuffle_free_pages(engine: FlexEngine, seed: int = 0) -> None:
    """Page order means nothing, so a check should not run on pages that happen to lie in a row."""
    random.Random(seed).shuffle(engine.cache.pages.free)


# --------------------------------------------------------------------------------------------------------------- the report


@dataclass
class LogitError:
    """Logits against the fp32 reference on the prompts' last positions. `top10_overlap` is a mean of 0 to 10."""

    max_abs: float
    mean_abs: float
    argmax_match: float
    top10_overlap: float

    @classmethod
    def between(cls, actual_NV: Tensor, exact_NV: Tensor) -> LogitError:
        actual_NV = actual_NV.to(exact_NV.device)
        difference = (actual_NV - exact_NV).abs()
        match = actual_NV.argmax(-1) == exact_NV.argmax(-1)
        top_actual, top_exact = (x.topk(10).indices for x in (actual_NV, exact_NV))
        overlap = (top_actual[:, :, None] == top_exact[:, None]).any(-1).sum(-1).float()
        return cls(difference.max().item(), difference.mean().item(), match.float().mean().item(), overlap.mean().item())


@dataclass
class Divergence:
    """The first token of a prompt's greedy completion that is not the reference's. `gap` is how far its fp32 logit lies
    below the largest."""

    prompt: int
    position: int
    token: int
    reference_token: int
    gap: float


@dataclass
class Gate:
    name: str
    passed: bool
    detail: str


@dataclass
class NumericsReport:
    """The JSON of --json. `*_hf` is Hugging Face's own error in the same dtype; None in fp32, where Hugging Face is the reference."""

    dtype: str
    walker: str
    attention_backend: str
    prompts: int
    tokens: int
    distinct_tokens: int
    logits: LogitError
    logits_hf: LogitError | None
    logprob_error_mean: float
    logprob_error_max: float
    logprob_error_mean_hf: float | None
    logprob_error_max_hf: float | None
    divergences: list[Divergence]
    gates: list[Gate]
    context: dict[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> str:
        return json.dumps({"passed": self.passed, **dataclasses.asdict(self)}, indent=2)

    def __str__(self) -> str:
        def row(name: str, error: LogitError) -> str:
            return (
                f"  {name:<24} {error.max_abs:>10.3g} {error.mean_abs:>10.3g} {error.argmax_match:>9.1%}"
                f" {error.top10_overlap:>8.1f}/10"
            )

        lines = [
            f"{self.walker}, {self.dtype}, attention {self.attention_backend}: {self.prompts} prompts, {self.tokens} greedy tokens, "
            f"{self.distinct_tokens} distinct",
            f"  {'last position':<24} {'max |d|':>10} {'mean |d|':>10} {'argmax':>9} {'top-10':>11}",
            row("engine - HF float32", self.logits),
        ]
        if self.logits_hf is not None:
            lines.append(row(f"HF {self.dtype} - HF float32", self.logits_hf))
        for divergence in self.divergences[:1]:
            lines.append(
                f"first divergence: prompt {divergence.prompt}, position {divergence.position}: token {divergence.token}, reference "
                f"{divergence.reference_token}, {divergence.gap:.3g} below the largest fp32 logit"
                f" ({len(self.divergences)} of {self.prompts} prompts diverge)"
            )
        lines += [f"{'PASS' if gate.passed else 'FAIL'}  {gate.name}: {gate.detail}" for gate in self.gates]
        return "\n".join(lines)


def verify(
    engine: FlexEngine, reference: Reference, prompts: Sequence[list[int]], max_new_tokens: int, seed: int = 0
) -> NumericsReport:
    """Runs every check; `prompts` are token ids. The engine's weights must be those `reference` was made from."""
    reference.assert_unshared(engine.walker.model)
    shuffle_free_pages(engine, seed)
    shared = dict(max_tokens=max_new_tokens, ignore_eos=True)
    greedy = [output.outputs[0].token_ids for output in engine.generate(prompts, SamplingParams(temperature=0, **shared))]
    sampled = [output.outputs[0] for output in engine.generate(prompts, SamplingParams(seed=seed, **shared))]

    size = engine.config.max_batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    last_NV = torch.cat([engine_last_logits(engine, batch) for batch in batches])

    exact_last, plain_last, divergences, excess = [], [], [], []
    errors, errors_hf = [], []
    for index, (prompt, tokens, completion) in enumerate(zip(prompts, greedy, sampled)):
        exact_TV = hf_logits(reference.exact, prompt, tokens)
        exact_last.append(exact_TV[0])
        gap_T = exact_TV.amax(-1) - _pick(exact_TV, tokens)
        if reference.plain is None:
            expected = hf_greedy(reference.exact, prompt, max_new_tokens)
        else:
            expected = exact_TV.argmax(-1).tolist()
            plain_TV = hf_logits(reference.plain, prompt, tokens).to(exact_TV.device)
            plain_last.append(plain_TV[0])
            excess.append(gap_T / (plain_TV - exact_TV).abs().amax(-1).clamp(min=1e-9))
        position = first_difference(tokens, expected)
        if position is not None:
            divergences.append(Divergence(index, position, tokens[position], expected[position], gap_T[position].item()))

        exact_T = _pick(hf_logits(reference.exact, prompt, completion.token_ids).log_softmax(-1), completion.token_ids)
        errors.append((torch.tensor(completion.full_logprobs, device=exact_T.device) - exact_T).abs())
        if reference.plain is not None:
            plain_TV = hf_logits(reference.plain, prompt, completion.token_ids).log_softmax(-1)
            errors_hf.append((_pick(plain_TV, completion.token_ids).to(exact_T.device) - exact_T).abs())

    error_T, exact_NV = torch.cat(errors), torch.stack(exact_last)
    error_hf_T = torch.cat(errors_hf) if errors_hf else None
    mean, largest = error_T.mean().item(), error_T.max().item()
    if error_hf_T is None:
        where = "" if not divergences else f"; prompts {', '.join(str(d.prompt) for d in divergences[:8])} diverge"
        same = len(prompts) - len(divergences)
        gates = [
            Gate("tokens", not divergences, f"{same} of {len(prompts)} greedy completions equal generate's{where}"),
            Gate("logprobs", largest <= FP32_LOGPROB_TOLERANCE, f"off by {largest:.2g} at most (<= {FP32_LOGPROB_TOLERANCE:g})"),
        ]
    else:
        worst = torch.cat(excess).max().item()
        ratio = mean / max(error_hf_T.mean().item(), 1e-9)
        gates = [
            Gate(
                "tokens",
                worst <= TOKEN_GATE,
                f"greedy tokens lie at most {worst:.2f} x Hugging Face's own error below the largest logit (<= {TOKEN_GATE:g})",
            ),
            Gate(
                "logprobs", ratio <= LOGPROB_GATE, f"mean error {mean:.2g}, {ratio:.2f} x Hugging Face's own (<= {LOGPROB_GATE:g})"
            ),
        ]
    distinct = len({token for tokens in greedy for token in tokens})
    gates.append(
        Gate(
            "variety",
            distinct >= min(MIN_DISTINCT_TOKENS, max_new_tokens * len(prompts)),
            f"{distinct} distinct greedy tokens (>= {MIN_DISTINCT_TOKENS}: a model that repeats itself proves nothing)",
        )
    )
    return NumericsReport(
        dtype=str(engine.walker.dtype).removeprefix("torch."),
        walker=type(engine.walker).__name__,
        attention_backend=engine.backend.name,
        prompts=len(prompts),
        tokens=sum(map(len, greedy)),
        distinct_tokens=distinct,
        logits=LogitError.between(last_NV, exact_NV),
        logits_hf=LogitError.between(torch.stack(plain_last), exact_NV) if plain_last else None,
        logprob_error_mean=mean,
        logprob_error_max=largest,
        logprob_error_mean_hf=None if error_hf_T is None else error_hf_T.mean().item(),
        logprob_error_max_hf=None if error_hf_T is None else error_hf_T.max().item(),
        divergences=divergences,
        gates=gates,
    )


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    return next((position for position, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)


def _pick(rows_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    return rows_TV.gather(1, torch.tensor(tokens, device=rows_TV.device)[:, None])[:, 0]
