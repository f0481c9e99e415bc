"""Adapters on disk and made to measure, through PEFT's own classes; the flags that choose among them.

PEFT is imported where it is used: it takes seconds, and most runs have no adapter.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flex_lora import EXPERT_PARAMETERS, LORA_MODES, MAX_MERGED_EXPERTS_GB, target_of

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
LINEAR_TARGETS = (*ATTENTION_TARGETS, *MLP_TARGETS)
TARGETS = ("all", "attention", "experts")
FRESH_B_STD = 0.02  # of B: a delta of a few percent of the weights, well above bfloat16's step


# ---------------------------------------------------------------------------------------------------------------------- flags


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every inference script that serves adapters; `check_lora_arguments` refuses what does not go together."""
    group = parser.add_argument_group("LoRA and 4-bit weights")
    group.add_argument("--lora_adapter", metavar="PATH", help="a PEFT adapter: local folder or hub id")
    group.add_argument(
        "--lora_mode",
        choices=LORA_MODES,
        help="merged: fastest, a second copy of the adapted weights; active: no copy, and the function that is trained "
        f"(default: merged; active with --load_in_4bit, and where a copy of experts would pass {MAX_MERGED_EXPERTS_GB:g} GB)",
    )
    group.add_argument(
        "--no_merge_lora", action="store_true", help="PEFT's own unmerged layers, in the model's own forward: the reference"
    )
    group.add_argument(
        "--verify_no_drift",
        action="store_true",
        help="perturb and refresh the adapter 10 times, check that base weights and outputs come back bit by bit, exit 1 if not; "
        "makes an adapter if there is no --lora_adapter",
    )
    group.add_argument("--load_in_4bit", action="store_true", help="bitsandbytes NF4 weights with double quantization")
    group.add_argument("--model_name_4bit", metavar="NAME", help="a checkpoint quantized already, loaded instead of --model_name")


def check_lora_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError naming the flags that contradict each other; sets what one flag implies of another."""
    if args.model_name_4bit is not None:
        if args.model_name is not None:
            raise ValueError("--model_name_4bit and --model_name both name the model; give one of them")
        args.model_name, args.load_in_4bit = args.model_name_4bit, True
    if args.load_in_4bit and args.lora_mode == "merged":
        raise ValueError("--lora_mode merged can't write to the 4-bit weights of --load_in_4bit; use --lora_mode active")
    if args.no_merge_lora:
        if args.lora_mode is not None:
            raise ValueError("--no_merge_lora runs PEFT's own layers, so --lora_mode has no meaning there")
        if args.verify_no_drift:
            raise ValueError("--verify_no_drift checks the engine's own LoRA modes, which --no_merge_lora does not run")
        if args.lora_adapter is None:
            raise ValueError("--no_merge_lora needs --lora_adapter")


def attach_adapter(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """The model with the adapter that the flags ask for, or as it is."""
    if args.lora_adapter is not None:
        return load_adapter(model, args.lora_adapter)
    return fresh_adapter(model, seed=args.seed) if args.verify_no_drift else model


# ------------------------------------------------------------------------------------------------------------------- adapters


def lora_config(model: nn.Module, rank: int, targets: str = "all") -> LoraConfig:
    """LoRA on attention and MLP or stacked experts, or on one of the two alone. Experts in 4-bit have no parameter that PEFT could
    adapt, and stay as they are."""
    from peft import LoraConfig

    has_experts = any(name.endswith(EXPERT_PARAMETERS) for name, _ in model.named_parameters())
    if targets == "experts" and not has_experts:
        raise ValueError(f"{type(model).__name__} has no stacked experts for an adapter to target (those in 4 bits hold no parameter)")
    modules = [] if targets == "experts" else [*ATTENTION_TARGETS]
    stacks = [] if targets == "attention" or not has_experts else [*EXPERT_PARAMETERS]
    if targets == "all" and not any(hasattr(module, "num_experts") for module in model.modules()):
        modules += MLP_TARGETS
    return LoraConfig(
        r=rank, lora_alpha=rank, target_modules=modules, target_parameters=stacks or None, task_type="CAUSAL_LM"
    )


def fresh_adapter(
    model: nn.Module, rank: int = 32, seed: int = 0, adapter_name: str = "default", targets: str = "all"
) -> PeftModel:
    """The adapter of `lora_config`, with a B that is not zero, so that it changes the model. On a meta model only shapes are made."""
    from peft import get_peft_model

    config = lora_config(model, rank, targets)
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config, adapter_name)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name and not parameter.is_meta:
                nn.init.normal_(parameter.data, std=FRESH_B_STD)
    return adapted


def save_fresh_adapter(
    meta_model: nn.Module, path: str | Path, rank: int = 32, seed: int = 0, targets: str = "all"
) -> None:
    """Writes a fresh adapter in PEFT's format. Only the adapter is ever allocated: `meta_model` holds no weights."""
    adapted = fresh_adapter(meta_model, rank, seed, targets=targets)
    generator = torch.Generator().manual_seed(seed)

    def filled(name: str, parameter: Tensor) -> Tensor:
        # A as PEFT initializes it: uniform within 1 / sqrt(inputs).
        values = torch.empty(parameter.shape)
        bound = parameter.shape[-1] ** -0.5
        if "lora_A" in name:
            return values.uniform_(-bound, bound, generator=generator)
        return values.normal_(std=FRESH_B_STD, generator=generator)

    state = {name: filled(name, parameter) for name, parameter in adapted.state_dict().items() if "lora_" in name}
    adapted.peft_config["default"].inference_mode = True
    adapted.save_pretrained(str(path), state_dict=state, save_embedding_layers=False)


def load_adapter(model: nn.Module, path: str | Path, adapter_name: str = "default") -> PeftModel:
    """Puts a saved LoRA adapter on the model, through PEFT's loader, with every tensor of the file in its place.

    A file whose names start otherwise than PEFT's own (`base_model.model.`) is taken if one prefix maps all of it, and one that
    names each expert's projections (`experts.3.up_proj.lora_A.weight`) is put into the stacks that transformers keeps. Raises
    ValueError naming the tensors that have no place in the model, or that the file lacks: PEFT itself would go on without.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(path))
    if config.peft_type != "LORA":
        raise ValueError(f"{path} is a {config.peft_type.value} adapter; the rollout engine applies LoRA only")
    config.inference_mode = True
    saved = load_peft_weights(str(path), device=str(next(model.parameters()).device))
    stacks = collect_experts(saved, model, config)
    with warnings.catch_warnings():
        if stacks:  # PEFT looks for the patterns among the modules alone
            warnings.filterwarnings("ignore", ".*_pattern keys did not match any targeted module", RuntimeWarning)
        adapted = get_peft_model(model, config, adapter_name)
    expected = get_peft_model_state_dict(adapted, adapter_name=adapter_name, save_embedding_layers=False)
    # An embedding that is a target is saved with its base weight, under the model's own name.
    places = expected.keys() | {name for name in adapted.state_dict() if name.endswith("base_layer.weight")}
    state = _with_peft_prefix(saved, places)
    for name, wrapper in adapted.named_modules():
        stack = stacks.get((unwrapped_name(name), target_of(wrapper)))
        if stack is not None:
            state |= stack.tensors(name)
    left_over, missing = sorted(state.keys() - places), sorted(expected.keys() - state.keys())
    if left_over or missing:
        problems = ((left_over, "has no place in the model"), (missing, "is not in the file"))
        raise ValueError(f"adapter {path}: " + "; ".join(f"{_listed(names)} {problem}" for names, problem in problems if names))
    set_peft_model_state_dict(adapted, state, adapter_name=adapter_name)
    return adapted.eval()


@dataclass
class ExpertStack:
    """Adapters of the single experts of one stack `[E, rows, columns]`, as they come to lie in PEFT's one layer for it."""

    num_experts: int
    rows: int
    columns: int
    scaling: float = 0.0  # of the stack: that of its first member
    members: list[tuple[int, int, Tensor, Tensor]] = field(default_factory=list)  # expert, first row, A, B with its own scaling

    @property
    def rank(self) -> int:
        """An expert's members lie side by side in it."""
        return max(Counter(expert for expert, _, a_RK, _ in self.members for _ in a_RK).values())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """A `[E * rank, columns]`, expert-major, and B `[rows, rank * E]`; what no member fills is zero."""
        like, taken = self.members[0][2], Counter()
        a_ERK = like.new_zeros(self.num_experts, self.rank, self.columns)
        b_ENR = like.new_zeros(self.num_experts, self.rows, self.rank)
        for expert, row, a_RK, b_NR in self.members:
            ranks = slice(taken[expert], taken[expert] + len(a_RK))
            taken[expert] += len(a_RK)
            a_ERK[expert, ranks] = a_RK
            b_ENR[expert, row : row + len(b_NR), ranks] = b_NR / self.scaling
        return {f"{name}.lora_A.weight": a_ERK.flatten(0, 1), f"{name}.lora_B.weight": b_ENR.permute(1, 2, 0).flatten(1)}


EXPERT_TENSOR = re.compile(r"(?P<layer>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.lora_A\.(?:\w+\.)?weight")


def collect_experts(saved: dict[str, Tensor], model: nn.Module, config: PeftConfig) -> dict[tuple[str, str], ExpertStack]:
    """Takes the adapters of single experts out of `saved`, and makes `config` target the stacks (layer, parameter) that they are
    part of. Gate and up lie in one stack: a rank for each of the two, B block by block. Raises ValueError naming a tensor."""
    from peft.utils.other import get_pattern_key

    found = [match for match in map(EXPERT_TENSOR.fullmatch, list(saved)) if match]
    if not found:
        return {}
    modules = dict(model.named_modules())

    def known(name: str) -> str | None:
        """The module that a file means, whatever stands before its name, there or here."""
        return next((own for own in modules if f".{name}".endswith(f".{own}") or own.endswith(f".{name}")), None)

    layers = {name: known(name) for name in {match["layer"] for match in found}}
    stacks: dict[tuple[str, str], ExpertStack] = {}
    for match in found:
        name, layer, expert, projection = match.string, layers[match["layer"]], int(match["expert"]), match["projection"]
        parameter = "down_proj" if projection == "down_proj" else "gate_up_proj"
        weight = getattr(modules.get(layer), parameter, None)
        partner = name.replace(".lora_A.", ".lora_B.")
        if projection not in MLP_TARGETS or weight is None or expert >= len(weight):
            raise ValueError(f"{name} has no place in the model")
        if partner not in saved:
            raise ValueError(f"{partner} is not in the file")
        a_RK, b_NR = saved.pop(name), saved.pop(partner)
        _, rows, columns = weight.shape
        own_rows = rows if projection == "down_proj" else rows // 2
        if a_RK.shape[1] != columns or b_NR.shape != (own_rows, len(a_RK)):
            raise ValueError(f"{name}: shapes {tuple(a_RK.shape)} and {tuple(b_NR.shape)} do not fit {own_rows} x {columns}")
        pattern = get_pattern_key(config.alpha_pattern, f"{layer}.{expert}.{projection}")
        alpha = config.alpha_pattern.get(pattern, config.lora_alpha)
        scaling = alpha / (math.sqrt(len(a_RK)) if config.use_rslora else len(a_RK))
        stack = stacks.setdefault((layer, parameter), ExpertStack(*weight.shape, scaling))
        stack.members.append((expert, own_rows if projection == "up_proj" else 0, a_RK, scaling * b_NR))
    others = {name.split(".lora_")[0] for name in saved if ".lora_" in name}
    config.target_modules = {own for own in map(known, others) if own is not None}
    config.target_parameters = {f"{layer}.{parameter}" for layer, parameter in stacks}
    for (layer, parameter), stack in stacks.items():
        pattern = re.escape(f"{layer}.{parameter}")
        config.rank_pattern[pattern] = stack.rank
        config.alpha_pattern[pattern] = stack.scaling * (math.sqrt(stack.rank) if config.use_rslora else stack.rank)
    return stacks


def unwrapped_name(name: str) -> str:
    """Of a wrapper of PEFT's: the name that its module has in the model alone."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _with_peft_prefix(saved: dict[str, Tensor], places: set[str]) -> dict[str, Tensor]:
    """The tensors under PEFT's names: without adapter names inside, and with PEFT's prefix in place of the file's own."""
    state = {_without_adapter_name(name, places): tensor for name, tensor in saved.items()}
    strange = next((name for name in state if name not in places), None)
    if strange is None:
        return state
    parts = strange.split(".")
    for first in range(len(parts)):
        tail = ".".join(parts[first:])
        matches = [place for place in places if place == tail or place.endswith("." + tail)]
        if len(matches) == 1:
            old, new = ".".join([*parts[:first], ""]) if first else "", matches[0].removesuffix(tail)
            mapped = {new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in state.items()}
            return mapped if mapped.keys() <= places else state
    return state


def _without_adapter_name(name: str, places: set[str]) -> str:
    """`x.lora_A.default.weight`, as in a raw state dict, is PEFT's `x.lora_A.weight`."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.startswith("lora_") and name not in places and len(parts) - index > (2 if "embedding" not in part else 1):
            return ".".join([*parts[: index + 1], *parts[index + 2 :]])
    return name


def _listed(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
