"""Engine against plain Hugging Face: references, gates and the report of every verify_*_numerics.py.

What is asked depends on the dtype:

* float32: greedy tokens are those of `model.generate`, token for token.
* bfloat16, float16: identity can't be asked, because Hugging Face differs from itself at another batch size. Hugging Face's
  own rounding error is the yardstick: its forward in that dtype against its forward in fp32, on the tokens the engine chose.
  A greedy token's fp32 logit lies within twice that error of the largest (if no logit is off by more than e, two may change
  places that lie 2e apart), and the log-probabilities of sampled tokens are off by at most 1.25 times as much. Sampled, because
  greedy prefers the tokens whose rounding went up. Where a router chooses experts, rounding now and then chooses others, which moves
  logits by ten times as much, in each implementation at positions of its own: there the yardstick of every token is Hugging Face's
  largest error on all completions, sampled ones included, instead of the one at its position.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from flex_cli import (
    HelpFormatter,
    add_engine_arguments,
    add_model_arguments,
    add_prompt_arguments,
    check_writable,
    device_name,
    engine_config,
    integer,
    library_versions,
    load_prompts,
    template_prompts,
    make_walker,
)
from flex_console import fail, note
from flex_engine import FlexEngine, SamplingParams, Walker
from flex_lora import EXPERT_PARAMETERS
from flex_models import (
    EMBEDDED,
    default_device,
    dummy_model,
    dummy_tokenizer,
    find_config,
    load_model,
    resolve_dtype,
    resolve_model_name,
)
from flex_moe import NF4Experts
from flex_nf4 import float_weight, is_4bit
from flex_profile import engine_last_logits, holds_experts
from flex_weights import unwrapped
from lora_adapters import add_lora_arguments, attach_adapter, check_lora_arguments

TOKEN_GATE = 2.0  # times Hugging Face's own error at that position
LOGPROB_GATE = 1.25  # times Hugging Face's own mean error
LOGPROB_SAMPLES = 2048  # with 768 the ratio of an engine that computes as Hugging Face does came out between 1.0 and 1.2
FP32_LOGPROB_TOLERANCE = 1e-3  # summation order gives about 1e-5; a wrong scale, mask or position far more than this
TextModel = Callable[[PreTrainedModel], PreTrainedModel]  # the part of a loaded model that generates text
MIN_DISTINCT_TOKENS = 16  # fewer, and agreement says little: a model that repeats itself hides what attention does


# ------------------------------------------------------------------------------------------------------------ the reference


def dequantized(model: torch.nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `dtype`, its 4-bit weights as the floating point values they stand for; PEFT's layers stay inside."""
    base = unwrapped(model)
    restore_experts(base)
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            if is_4bit(child):
                linear = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                linear.weight = torch.nn.Parameter(float_weight(child), requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)
    return base.to(dtype).eval()


def restore_experts(model: PreTrainedModel) -> None:
    """Puts Hugging Face's own stacked experts back in the place of 4-bit ones, with the values that these stand for."""
    for name, stack in expert_shells(model).items():
        fill_experts(stack, model.get_submodule(name))
        model.set_submodule(name, stack)


def expert_shells(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Hugging Face's modules for the experts that are in 4 bits, without weights, by name."""
    names = [name for name, module in model.named_modules() if isinstance(module, NF4Experts)]
    if not names:
        return {}
    with torch.device("meta"):
        shell = type(model)(model.config)
    return {name: shell.get_submodule(name) for name in names}


def fill_experts(stack: torch.nn.Module, experts: NF4Experts) -> None:
    bank = experts.bank()
    for name, weight in zip(EXPERT_PARAMETERS, (bank.gate_up_EIC, bank.down_ECI)):
        values = torch.stack([weight[expert] for expert in range(len(weight))])
        setattr(stack, name, torch.nn.Parameter(values, requires_grad=False))


class CastModel:
    """A model's own Hugging Face forward in another dtype, without a copy of its weights: each module's are cast, and dequantized
    where they are 4-bit, for the time of its call. For models whose fp32 copy has no room beside them."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self.model, self.dtype, self.device = model, dtype, model.device
        self.shells = {model.get_submodule(name): stack for name, stack in expert_shells(model).items()}

    @torch.no_grad()
    def __call__(self, **inputs):
        plain: dict[torch.nn.Module, list[tuple[torch.nn.Parameter, Tensor]]] = {}

        def cast(module: torch.nn.Module, _) -> None:
            plain[module] = [(p, p.data) for p in module._parameters.values() if p is not None]
            for parameter, data in plain[module]:
                parameter.data = data.to(self.dtype)

        def restore(module: torch.nn.Module, *_) -> None:
            for parameter, data in plain.pop(module):
                parameter.data = data

        special = [m for m in self.model.modules() if is_4bit(m) or m in self.shells]
        within = {inner for module in special for inner in module.modules()}
        hooked = [m for m in self.model.modules() if m._parameters and m not in within]
        handles = [h for m in hooked for h in (m.register_forward_pre_hook(cast), m.register_forward_hook(restore))]
        try:
            for module in special:
                module.forward = partial(self._dequantized, module)
            return self.model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
            for module in list(plain):
                restore(module)
            for module in special:
                del module.forward

    def _dequantized(self, module: torch.nn.Module, x: Tensor, *routing: Tensor) -> Tensor:
        if is_4bit(module):
            return F.linear(x, float_weight(module).to(self.dtype), None if module.bias is None else module.bias.to(self.dtype))
        stack = self.shells[module]
        fill_experts(stack, module)
        y = stack.to(self.dtype)(x, *routing)
        stack.to("meta")
        return y


@dataclass
class Reference:
    """Plain Hugging Face models that share no storage with the engine's: `exact` in fp32, `plain` in the dtype under test (None
    where that is fp32). Make it before the walker, which moves the model's weights into slots of its own.

    `whole` is the fp32 model that `exact` was taken out of, such as one that sees images too; None where they are the same.
    """

    exact: PreTrainedModel | CastModel
    plain: PreTrainedModel | CastModel | None
    whole: PreTrainedModel | None = None
    shares_weights: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, text_model: TextModel = lambda model: model) -> Reference:
        plain = None if model.dtype == torch.float32 else text_model(dequantized(copy.deepcopy(model), model.dtype))
        whole = dequantized(copy.deepcopy(model), torch.float32)
        exact = text_model(whole)
        return cls(exact, plain, None if exact is whole else whole)

    @classmethod
    def in_place(cls, model: PreTrainedModel) -> Reference:
        """Of the engine's own weights, which nobody writes to while both run: no copy, and nothing to tell what moved a weight."""
        if model.dtype == torch.float32:
            return cls(model, None, shares_weights=True)
        return cls(CastModel(model, torch.float32), CastModel(model, model.dtype), shares_weights=True)

    def assert_unshared(self, model: torch.nn.Module) -> None:
        if self.shares_weights:
            return
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
    text_against_whole: LogitError | None = None
    engine_against_whole: LogitError | None = None
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
        if self.text_against_whole is not None:
            lines.append(row("HF text - HF whole", self.text_against_whole))
            lines.append(row("engine - HF whole", self.engine_against_whole))
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
    # A mean of few errors is mostly chance: sample enough of them where the mean decides.
    n = 1 if reference.plain is None else -(-LOGPROB_SAMPLES // (len(prompts) * max_new_tokens))
    sampled = engine.generate(prompts, SamplingParams(seed=seed, n=n, **shared))
    size = engine.config.max_batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    last_NV = torch.cat([engine_last_logits(engine, batch) for batch in batches])

    exact_last, plain_last, divergences, gaps, errors = [], [], [], [], []
    for index, (prompt, tokens) in enumerate(zip(prompts, greedy)):
        exact_TV = hf_logits(reference.exact, prompt, tokens)
        exact_last.append(exact_TV[0])
        gap_T = exact_TV.amax(-1) - _pick(exact_TV, tokens)
        if reference.plain is None:
            expected = hf_greedy(reference.exact, prompt, max_new_tokens)
        else:
            expected = exact_TV.argmax(-1).tolist()
            plain_TV = hf_logits(reference.plain, prompt, tokens)
            plain_last.append(plain_TV[0])
            gaps.append(gap_T)
            errors.append((plain_TV - exact_TV).abs().amax(-1).clamp(min=1e-9))
        position = first_difference(tokens, expected)
        if position is not None:
            divergences.append(Divergence(index, position, tokens[position], expected[position], gap_T[position].item()))

    completions = [(output.prompt_token_ids, completion) for output in sampled for completion in output.outputs]
    exact_T, plain_T, sampled_errors = [], [], []
    for prompt, completion in completions:
        exact_TV = hf_logits(reference.exact, prompt, completion.token_ids)
        exact_T.append(_pick(exact_TV.log_softmax(-1), completion.token_ids).cpu())
        if reference.plain is not None:
            plain_TV = hf_logits(reference.plain, prompt, completion.token_ids)
            plain_T.append(_pick(plain_TV.log_softmax(-1), completion.token_ids).cpu())
            sampled_errors.append((plain_TV - exact_TV).abs().max())
    exact_T = torch.cat(exact_T)
    error_T = (torch.tensor([x for _, completion in completions for x in completion.full_logprobs]) - exact_T).abs()
    mean, largest = error_T.mean().item(), error_T.max().item()
    mean_hf = largest_hf = None
    if reference.plain is None:
        token_gate = identity_gate(divergences, len(prompts))
        logprob_gate = Gate(
            "logprobs", largest <= FP32_LOGPROB_TOLERANCE, f"off by {largest:.2g} at most (<= {FP32_LOGPROB_TOLERANCE:g})"
        )
    else:
        own_T = (torch.cat(plain_T) - exact_T).abs()
        mean_hf, largest_hf = own_T.mean().item(), own_T.max().item()
        gap_T, yardstick = torch.cat(gaps), torch.cat(errors)
        if any(map(holds_experts, engine.walker.model.modules())):
            yardstick = torch.stack([yardstick.max(), *sampled_errors]).max()
        excess = (gap_T / yardstick).max().item()
        token_gate = Gate(
            "tokens",
            excess <= TOKEN_GATE,
            f"greedy tokens lie at most {excess:.2f} x Hugging Face's own error below the largest logit (<= {TOKEN_GATE:g})",
        )
        ratio = mean / max(mean_hf, 1e-9)
        logprob_gate = Gate(
            "logprobs",
            ratio <= LOGPROB_GATE,
            f"mean error {mean:.2g} over {len(error_T)} sampled tokens, {ratio:.2f} x Hugging Face's own (<= {LOGPROB_GATE:g})",
        )
    distinct = len({token for tokens in greedy for token in tokens})
    exact_NV = torch.stack(exact_last)
    whole_NV = None
    if reference.whole is not None:
        whole_NV = torch.stack([hf_logits(reference.whole, prompt, [0])[0] for prompt in prompts])
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
        logprob_error_mean_hf=mean_hf,
        logprob_error_max_hf=largest_hf,
        divergences=divergences,
        gates=[token_gate, logprob_gate, variety_gate(distinct, max_new_tokens * len(prompts))],
        text_against_whole=None if whole_NV is None else LogitError.between(exact_NV, whole_NV),
        engine_against_whole=None if whole_NV is None else LogitError.between(last_NV, whole_NV),
    )


def identity_gate(divergences: list[Divergence], prompts: int) -> Gate:
    where = "".join(f", prompt {d.prompt} differs from position {d.position} on" for d in divergences[:4])
    return Gate("tokens", not divergences, f"{prompts - len(divergences)} of {prompts} greedy completions equal generate's{where}")


def variety_gate(distinct: int, tokens: int) -> Gate:
    needed = min(MIN_DISTINCT_TOKENS, tokens)
    return Gate(
        "variety",
        distinct >= needed,
        f"{distinct} distinct greedy tokens (>= {needed}: a model that repeats itself proves nothing)",
    )


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    return next((position for position, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)


def _pick(rows_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    return rows_TV.gather(1, torch.tensor(tokens, device=rows_TV.device)[:, None])[:, 0]


# --------------------------------------------------------------------------------------------------------------- the script


def run_verification(
    description: str | None,
    default_model: str,
    walker_class: Callable[[PreTrainedModel], Walker],
    argv: list[str] | None = None,
    cpu_model: str = EMBEDDED,
    text_model: TextModel = lambda model: model,
) -> int:
    """The whole of a verify script. Exit status 1 when a gate fails."""
    args = build_parser(description, default_model, cpu_model).parse_args(argv)
    try:
        check_lora_arguments(args)
    except ValueError as error:
        fail(str(error))
    resolve_model_name(args, small_without_hub=True)
    if args.json:
        check_writable(args.json, "--json")
    torch.set_float32_matmul_precision("highest")  # no TF32 in the reference
    raw = load_prompts(args)
    model, tokenizer = load_untied(args) if args.load_format == "dummy" else load_layers(args)
    try:
        model = attach_adapter(model, args)
    except ValueError as error:
        fail(str(error))
    require_room(model)
    reference = Reference.of(model, text_model)
    model = text_model(model)
    prompts = template_prompts(args, raw, model.config, tokenizer)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        try:
            walker = make_walker(model, walker_class, args)
            engine = FlexEngine(walker, tokenizer, engine_config(args, prompts, model.config))
            report = verify(engine, reference, [prompt.token_ids for prompt in prompts], args.max_new_tokens, args.seed)
        except ValueError as error:  # a prompt or a flag that can't be
            fail(str(error))
    report.context = {
        "model_name": args.model_name,
        "load_format": args.load_format,
        "device": device_name(engine.device),
        "cuda_graphs": engine.use_graphs,
        "versions": library_versions(),
        "page_size": args.page_size,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "num_layers": model.config.get_text_config().num_hidden_layers,
    }
    weights = "loaded"
    if args.load_format == "dummy":
        std = model.config.get_text_config().initializer_range
        report.context["initializer_range"] = std
        weights = f"random, untied, standard deviation {std:g}"
    print(f"{args.model_name} on {report.context['device']}; weights {weights}; CUDA graphs {'on' if engine.use_graphs else 'off'}")
    print(report)
    if args.json:
        Path(args.json).write_text(report.to_json() + "\n")
    return 0 if report.passed else 1


def build_parser(description: str | None, default_model: str, cpu_model: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    add_model_arguments(parser, default_model, cpu_model)
    add_prompt_arguments(parser)
    add_engine_arguments(parser)
    add_lora_arguments(parser)
    group = parser.add_argument_group("verification")
    group.add_argument(
        "--max_new_tokens", metavar="N", type=integer(1), default=64, help="greedy, and as many sampled ones, of each prompt"
    )
    group.add_argument("--seed", metavar="N", type=integer(0), default=0, help="of sampling, page order and dummy weights")
    group.add_argument("--json", metavar="FILE", help="where the report goes as JSON")
    group.add_argument(
        "--num_layers",
        metavar="N",
        type=integer(1),
        help="verify the model's first N layers alone: the references in fp32 and in --dtype lie on the device beside the engine",
    )
    parser.set_defaults(n_prompts=8, n=1)
    return parser


def keep_layers(config: PreTrainedConfig, num_layers: int) -> None:
    if num_layers > config.num_hidden_layers:
        fail(f"--num_layers {num_layers}: the model has {config.num_hidden_layers}")
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def load_layers(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of --model_name, of which --num_layers may keep the first layers."""
    model, tokenizer = load_model(args)
    if args.num_layers is not None:
        keep_layers(model.config.get_text_config(), args.num_layers)
        del model.get_decoder().layers[args.num_layers :]
    return model, tokenizer


def require_room(model: PreTrainedModel) -> None:
    """Ends the script before the references run out of device memory."""
    if model.device.type != "cuda":
        return
    copies = 4 + (0 if model.dtype == torch.float32 else model.dtype.itemsize)
    needed = copies * sum(number_of_weights(module) for module in model.modules())
    free = torch.cuda.mem_get_info(model.device)[0]
    if needed > free:
        fail(f"the references take {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free: verify fewer layers, with --num_layers N")


def number_of_weights(module: torch.nn.Module) -> int:
    """A module's own, those of 4-bit ones as they are dequantized."""
    if is_4bit(module):
        return module.in_features * module.out_features
    if isinstance(module, NF4Experts):
        bank = module.bank()
        return math.prod(bank.gate_up_EIC.shape) + math.prod(bank.down_ECI.shape)
    return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def load_untied(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Random weights with an output matrix of their own: tied random weights mostly repeat the last token."""
    config, device = find_config(args.model_name), default_device()
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    if args.num_layers is not None:
        keep_layers(config.get_text_config(), args.num_layers)
    model = dummy_model(config, resolve_dtype(args.dtype, device), device, args.seed, args.load_in_4bit)
    balance_branches(model.get_decoder().layers)
    return model, dummy_tokenizer(config)


def balance_branches(layers: Sequence[torch.nn.Module]) -> None:
    """Norm weights with which random layers neither blow up a rounding nor forget which token they are at.

    - Norms behind attention and feed-forward, where layers have those: 0.1 in 35 layers. At 1, as they are initialized, each branch
      weighs as much as all before it: 35 random layers of Gemma-4-E2B turn one ulp of the fp32 embedding into 9e-3 of the logits, and
      eager attention then differs from sdpa by 3e-3. At 0.1 it is 3e-5 for both.
    - The norm in front of routed experts: 2. At 1 random experts give a tenth of what a dense feed-forward gives, and attention averages
      all positions into one: greedy decoding of 24 layers knew 2 to 6 tokens. At 2 a model of 24 smaller layers knew 76, at 1 it knew 5.
    """
    for layer in layers:
        if hasattr(layer, "post_feedforward_layernorm"):
            for name, module in layer.named_children():
                if name.startswith("post_"):
                    module.weight.data.fill_(min(1.0, 3.5 / len(layers)))
        elif hasattr(getattr(layer, "mlp", None), "experts"):
            layer.post_attention_layernorm.weight.data.fill_(2.0)
