"""The engine's weights against a trainer's adapter: PEFT's LoRA read in place, or merged into weights of the engine's own.

    walker = Qwen3Walker(peft_model, lora_mode="active")     # or "merged", the default
    engine = FlexEngine(walker)
    ...                                                       # an optimizer step
    engine.refresh_lora()

| mode   | the engine computes             | memory                                        | against the trainer's forward |
| active | x Wᵀ + scaling · (x Aᵀ) Bᵀ      | base shared; A, B copied in the engine's dtype | the same function             |
| merged | x (W + scaling · B A)ᵀ          | a second copy of the adapted weights          | W + scaling · B A is rounded  |

In neither does the base change: it is the trainer's, frozen, and `merged` is computed from it anew at each refresh, never
unmerged. So there is nothing to drift. Full fine-tuning needs neither mode: the parameters themselves are read (flex_weights).

Every tensor of the active adapters is read, or the walker's construction fails and names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flex_linear
from flex_kernels import rms_norm
from flex_lora_kernels import (
    MAX_PARTS,
    add_low_rank,
    copy_scaled,
    low_rank_gelu_mul,
    low_rank_silu_mul,
    merge_low_rank,
    padded_rank,
)
from flex_moe import ActiveExperts, Experts, NF4Experts
from flex_nf4 import NF4Projection, float_weight, is_4bit
from flex_weights import Embedding, Product, Projection, SharedWeights, bias_of, out_features_of, unwrapped

LORA_MODES = ("merged", "active")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
MAX_MERGED_EXPERTS_GB = 20.0  # of the second copy that merging into stacked experts takes, all layers together
MAX_SPLITS = 4  # left to the low-rank kernel, each of whose tiles adds all splits of its x Aᵀ up


# ------------------------------------------------------------------------------------------------- what PEFT put on a model


@dataclass(eq=False)
class Delta:
    """One adapter's part of one layer, read from PEFT's own modules whenever it is asked for."""

    layer: nn.Module
    adapter: str

    @cached_property
    def is_embedding(self) -> bool:
        return self.adapter in self.layer.lora_embedding_A

    @cached_property
    def linears(self) -> tuple[nn.Linear, nn.Linear]:
        """PEFT's B and A. Others than these are another adapter, which `Adapters.changed` notices."""
        return self.layer.lora_B[self.adapter], self.layer.lora_A[self.adapter]

    @property
    def scaling(self) -> float:
        return self.layer.scaling[self.adapter]

    @property
    def bias(self) -> nn.Parameter | None:
        return None if self.is_embedding else self.layer.lora_B[self.adapter].bias

    @property
    def magnitude(self) -> nn.Module | None:
        """DoRA's module, whose weight holds the norms."""
        return self.layer.lora_magnitude_vector[self.adapter] if self.adapter in self.layer.lora_magnitude_vector else None

    @property
    def transposed(self) -> bool:
        return not self.is_embedding and self.layer.fan_in_fan_out

    def factors(self) -> tuple[Tensor, Tensor]:
        """`left [rows, r]`, `right [r, columns]`: the weight's delta is scaling * left @ right. Of stacked experts `[E, rows, r]`,
        `[E, r, columns]`: PEFT keeps A as `[E * r, columns]`, and B as `[rows, r * E]`."""
        if self.is_embedding:
            return self.layer.lora_embedding_A[self.adapter].data.T, self.layer.lora_embedding_B[self.adapter].data.T
        left, right = (linear.weight.data for linear in self.linears)
        experts = num_experts(self.layer)
        if experts > 1:
            return left.unflatten(1, (-1, experts)).permute(2, 0, 1), right.unflatten(0, (experts, -1))
        return left, right

    def parameters(self) -> Iterator[nn.Parameter]:
        for name in self.layer.adapter_layer_names:
            holder = getattr(self.layer, name)
            if self.adapter in holder:
                item = holder[self.adapter]
                yield from item.parameters() if isinstance(item, nn.Module) else (item,)

    def merged_by_peft(self, base: Tensor) -> Tensor:
        """The merged weight by PEFT's own arithmetic, for layers that are more than base + scaling * B A."""
        variant = self.layer.lora_variant.get(self.adapter)
        if variant is None:
            return base + self.layer.get_delta_weight(self.adapter)
        merged = variant.merge_safe(self.layer, self.adapter, base.clone())
        self.layer._caches.pop(f"{self.adapter}-weight_norm", None)  # kept for an unmerge that never comes
        return merged

    def dora_scale(self, base: Tensor) -> Tensor:
        """magnitude / |W + scaling * B A| of each output, fp32, as PEFT's forward computes it."""
        left, right = self.factors()
        norm = self.magnitude.get_weight_norm(base.to(left.dtype), left @ right, self.scaling)
        return (self.magnitude.weight / norm).float()


@dataclass(eq=False)
class Adapted:
    """A module of the model under whatever PEFT has wrapped around it: `base` holds the weight that is frozen, as `parameter`."""

    name: str
    base: nn.Module
    deltas: list[Delta] = field(default_factory=list)
    parameter: str = "weight"

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.base, self.parameter)

    @cached_property
    def dora(self) -> Delta | None:
        return next((delta for delta in self.deltas if delta.magnitude is not None), None)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the merged weight is base + scaling * B A and nothing else."""
        return self.dora is None and not any(delta.transposed for delta in self.deltas)

    @property
    def has_own_bias(self) -> bool:
        return any(delta.bias is not None for delta in self.deltas)

    def bias(self) -> Tensor:
        """The base's bias (or zeros) and the adapters', fp32 `[N]`."""
        base = bias_of(self.base)
        total = torch.zeros(out_features_of(self.base), device=self.weight.device) if base is None else base.float()
        return total + sum(delta.scaling * delta.bias.float() for delta in self.deltas if delta.bias is not None)


def is_adapted(module: nn.Module) -> bool:
    """PEFT marks everything it wraps with the names of the tensors it added."""
    return hasattr(module, "adapter_layer_names")


def num_experts(layer: nn.Module) -> int:
    """Of a layer of PEFT's that adapts one stack of experts; 1 for any other."""
    return getattr(layer, "num_experts", 1)


def target_of(layer: nn.Module) -> str:
    """The parameter that a layer of PEFT's adapts: `weight`, unless the config's `target_parameters` name another."""
    return getattr(layer, "parameter_name", "weight")


def is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def unwrap(name: str, module: nn.Module, parameter: str = "weight") -> Adapted:
    """Looks through PEFT's wrappers of one parameter. Raises ValueError for a layer that PEFT has merged."""
    deltas: list[Delta] = []
    while is_adapted(module):
        if module.merged_adapters:
            raise ValueError(
                f"{name}: adapter {', '.join(module.merged_adapters)} is merged into the base weight and would be applied twice; "
                "call unmerge_adapter(), or merge_and_unload() to keep it"
            )
        if not hasattr(module, "base_layer"):  # modules_to_save
            active = [adapter for adapter in module.active_adapters if adapter in getattr(module, "modules_to_save", ())]
            module = module.modules_to_save[active[0]] if active and not module.disable_adapters else module.original_module
            continue
        if is_lora(module) and not module.disable_adapters and target_of(module) == parameter:
            deltas += [
                Delta(module, adapter)
                for adapter in module.active_adapters
                if (adapter in module.lora_A or adapter in module.lora_embedding_A) and is_supported(module, adapter)
            ]
        module = module.base_layer
    if len(deltas) > 1 and any(delta.magnitude is not None for delta in deltas):
        raise ValueError(f"{name}: DoRA with several active adapters ({', '.join(d.adapter for d in deltas)}) is not supported")
    return Adapted(name, module, deltas, parameter)


def is_supported(layer: nn.Module, adapter: str) -> bool:
    """Plain LoRA, and DoRA on linears. What is not supported is not read, and `Adapters.check` names its tensors."""
    variant = layer.lora_variant.get(adapter)
    return variant is None or (type(variant).__name__ == "DoraLinearVariant" and adapter in layer.lora_A)


def merged_experts_gb(model: nn.Module, dtype: torch.dtype) -> float:
    """Of the stacked experts that active adapters change, in `dtype`: what a merged copy of them takes, in 10^9 bytes."""
    stacks = {}
    for module in model.modules():
        if is_lora(module) and num_experts(module) > 1 and not module.disable_adapters:
            if any(adapter in module.lora_A for adapter in module.active_adapters):
                parameter = module.get_param()
                stacks[id(parameter)] = parameter.numel()
    return sum(stacks.values()) * dtype.itemsize / 1e9


def can_merge(model: nn.Module, dtype: torch.dtype) -> bool:
    return merged_experts_gb(model, dtype) <= MAX_MERGED_EXPERTS_GB and not any(is_4bit(module) for module in model.modules())


def adapter_holders(module: nn.Module) -> Iterator[tuple[str, nn.ModuleDict | nn.ParameterDict]]:
    """What a wrapper of PEFT's keeps by adapter name."""
    for name in module.adapter_layer_names:
        with contextlib.suppress(AttributeError):
            yield name, attrgetter(name)(module)


def active_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(name, tensor, kind of layer) of everything that the active adapters add to the model."""
    for name, module in model.named_modules():
        if not is_adapted(module) or module.disable_adapters:
            continue
        for holder_name, holder in adapter_holders(module):
            for adapter in module.active_adapters:
                if adapter not in holder:
                    continue
                item, prefix = holder[adapter], f"{name}.{holder_name}.{adapter}"
                variant = getattr(module, "lora_variant", {}).get(adapter)
                kind = type(module).__name__ + (f", {type(variant).__name__}" if variant is not None else "")
                if isinstance(item, nn.Parameter):
                    yield prefix, item, kind
                    continue
                # A saved module may have been copied with another adapter's layers in it, which speak for themselves.
                inner = (holder for child in item.modules() if is_adapted(child) for _, holder in adapter_holders(child))
                others = {id(parameter) for holder in inner for parameter in holder.parameters()}
                for inside, parameter in item.named_parameters():
                    if id(parameter) not in others:
                        yield f"{prefix}.{inside}", parameter, kind


def peft_configs(model: nn.Module) -> dict:
    """Adapter name to PEFT config, by whichever way the adapter came onto the model."""
    base = unwrapped(model)
    return getattr(base, "peft_config", None) or getattr(model, "peft_config", None) or {}


# --------------------------------------------------------------------------------------------------------------- projections


class ActiveProjection(Product):
    """y = x Wᵀ + b + scaling · (x Aᵀ) Bᵀ part by part, times DoRA's scale; the kernel that follows adds the low-rank part.

    Where it can, A lies under W in one storage, so that one product gives y and x Aᵀ; a base of another kind (NF4, or tied to the
    embedding) comes as `base`, and x Aᵀ is a product of its own. Ranks are padded to one width R for all parts, several active
    adapters side by side in it; `b_RN` holds scaling · Bᵀ.
    """

    def __init__(
        self, a_PRK: Tensor, b_RN: Tensor, sizes: list[int], stacked: Projection | None = None, base: Product | None = None,
        scale_N: Tensor | None = None,
    ):  # fmt: skip
        self.a_PRK, self.b_RN, self.sizes, self.scale_N = a_PRK, b_RN, sizes, scale_N
        self.stacked, self.base = stacked, base

    def products(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """x Wᵀ + b `[S, T, N]` and x Aᵀ `[S, T, P * R]`, which the kernel that follows adds up over S."""
        if self.stacked is not None:
            return self._stacked_products(x_TK).tensor_split([self.b_RN.shape[1]], dim=-1)
        return self.base(x_TK)[None], flex_linear.linear(x_TK, self.a_PRK.flatten(0, 1))[None]

    def _stacked_products(self, x_TK: Tensor) -> Tensor:
        if self.stacked.bias is None:
            options = flex_linear.options_for(x_TK, self.stacked.weight)
            if options is not None and 1 < options.split_k <= MAX_SPLITS:
                return flex_linear.linear_splits_triton(x_TK, self.stacked.weight, options)
        return self.stacked(x_TK)[None]

    def __call__(self, x_TK: Tensor) -> Tensor:
        return add_low_rank(*self.products(x_TK), self.b_RN, self.sizes, self.scale_N)

    def add_norm(self, x_TK: Tensor, residual_TN: Tensor, norm_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm(add_low_rank(*self.products(x_TK), self.b_RN, self.sizes, self.scale_N, residual_TN), norm_N, eps)

    def silu_gated(self, x_TK: Tensor) -> Tensor:
        return low_rank_silu_mul(*self.products(x_TK), self.b_RN, self.scale_N)

    def gelu_gated(self, x_TK: Tensor) -> Tensor:
        return low_rank_gelu_mul(*self.products(x_TK), self.b_RN, self.scale_N)


@dataclass(eq=False)
class ActiveEmbedding:
    """The table's rows, plus the rows of scaling · Aᵀ `[V, R]` times Bᵀ `[R, C]`."""

    weight: Tensor
    a_VR: Tensor
    b_RC: Tensor

    def __call__(self, tokens_T: Tensor) -> Tensor:
        low_TC = F.embedding(tokens_T, self.a_VR).float() @ self.b_RC.float()
        return (F.embedding(tokens_T, self.weight) + low_TC).to(self.weight.dtype)


@dataclass(eq=False)
class Room:
    """Where one delta's factors lie in an active projection: left (B, or an embedding's A) with the scaling, right without."""

    delta: Delta
    scaled: Tensor
    plain: Tensor


# ------------------------------------------------------------------------------------------------------- a model's adapters


class Adapters:
    """Builds the projections of a model that PEFT may have adapted, and brings them up to date.

    `mode` is "merged" or "active"; None takes merged, or active where that can't be: over a 4-bit base, and over experts whose
    second copy would pass MAX_MERGED_EXPERTS_GB. Several active adapters are summed. Made anew when `changed()`: another adapter,
    other layers, adapters switched on or off.
    """

    def __init__(self, model: nn.Module, weights: SharedWeights, mode: str | None = None):
        if mode not in (None, *LORA_MODES):
            raise ValueError(f"lora_mode must be one of {', '.join(LORA_MODES)}, not {mode!r}")
        for name, config in peft_configs(model).items():
            if config.peft_type != "LORA":
                raise ValueError(f"adapter {name!r} is {config.peft_type.value}; the rollout engine's own walkers apply LoRA only")
        self.model, self.weights = model, weights
        copied_gb = merged_experts_gb(model, weights.dtype)
        if mode == "merged" and copied_gb > MAX_MERGED_EXPERTS_GB:
            raise ValueError(
                f"lora_mode merged: a second copy of the adapted experts takes {copied_gb:.1f} GB, more than the "
                f"{MAX_MERGED_EXPERTS_GB:g} GB it may take; use --lora_mode active, which needs none"
            )
        self.mode = mode or ("merged" if can_merge(model, weights.dtype) else "active")
        self.sites: dict[int, tuple[str, dict, str]] = {}
        for name, parent in model.named_modules():
            for key, child in parent._modules.items():
                self.sites.setdefault(id(child), (f"{name}.{key}".lstrip("."), parent._modules, key))
        self.used: list[tuple[dict, str, nn.Module]] = []
        self.wrappers = [module for module in model.modules() if is_adapted(module)]
        self.configs = peft_configs(model).copy()
        self.state = self._state()
        self.read: set[int] = set()
        self.merges: list[tuple[Adapted, Tensor]] = []
        self.rooms: list[Room] = []
        self.scales: list[tuple[Adapted, Tensor]] = []
        self.biases: list[tuple[Adapted, Tensor, Tensor | None]] = []

    def projection(self, linears: Sequence[nn.Module]):
        """One callable `[T, K] -> [T, N]` for linears that read the same input, whatever PEFT and bitsandbytes made of them."""
        parts = [self._unwrap(linear) for linear in linears]
        bases = [part.base for part in parts]
        four_bit = is_4bit(bases[0])
        for part in parts:
            if is_4bit(part.base) != four_bit or not (four_bit or part.base.weight.is_floating_point()):
                kind = f"{type(part.base).__name__} with a weight of {part.base.weight.dtype}"
                raise ValueError(f"{part.name} is a {kind}; the rollout engine takes floating point, or 4-bit NF4 as a whole")
        if not any(part.deltas for part in parts):
            return NF4Projection.of(self.weights, bases) if four_bit else Projection.of(self.weights, bases)
        if self.mode == "active":
            return self._active(parts, four_bit)
        if four_bit:
            raise ValueError(f"{parts[0].name} is 4-bit, which can't be merged into: use --lora_mode active")
        return self._merged(parts)

    def embedding(self, module: nn.Module):
        """A callable `[T] -> [T, C]`."""
        part = self._unwrap(module)
        base = part.base.weight
        if not part.deltas:
            return Embedding(self.weights.hold(base))
        if self.mode == "merged":
            self.merges.append((part, self.weights.empty(*base.shape)))
            return Embedding(self.merges[-1][1])
        rank = padded_rank(sum(delta.factors()[1].shape[0] for delta in part.deltas))
        a_VR, b_RC = self.weights.empty(base.shape[0], rank).zero_(), self.weights.empty(rank, base.shape[1]).zero_()
        self._add_rooms(part, a_VR, b_RC)
        return ActiveEmbedding(self.weights.hold(base), a_VR, b_RC)

    def experts(self, module: nn.Module) -> Experts | ActiveExperts:
        """The bank of one layer's stacked experts, with whatever LoRA its `gate_up_proj [E, 2 I, C]` and `down_proj [E, C, I]` carry;
        of experts in 4 bits, which carry none."""
        parts = [self._unwrap(module, parameter) for parameter in EXPERT_PARAMETERS]
        if isinstance(parts[0].base, NF4Experts):
            for codes_or_scales in parts[0].base.buffers():
                self.weights.place(codes_or_scales, codes_or_scales.data)
            return parts[0].base.bank()
        if self.mode == "merged":
            return Experts(*(self._merged_stack(part) for part in parts))
        bank = Experts(*(self.weights.hold(part.weight) for part in parts))
        if not any(part.deltas for part in parts):
            return bank
        return ActiveExperts(bank, *(factor for part in parts for factor in self._active_stack(part)))

    def _merged_stack(self, part: Adapted) -> Tensor:
        if not part.deltas:
            return self.weights.hold(part.weight)
        self.weights.refuse_sharded(part.weight)
        self.merges.append((part, self.weights.empty(*part.weight.shape)))
        return self.merges[-1][1]

    def _active_stack(self, part: Adapted) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """A `[E, R, columns]` and scaling * Bᵀ `[E, R, rows]` of all active adapters side by side."""
        if not part.deltas:
            return None, None
        experts, rows, columns = part.weight.shape
        rank = padded_rank(sum(delta.factors()[1].shape[-2] for delta in part.deltas))
        a_ERK, b_ERN = (self.weights.empty(experts, rank, width).zero_() for width in (columns, rows))
        self._add_rooms(part, b_ERN.mT, a_ERK)
        return a_ERK, b_ERN

    def _unwrap(self, module: nn.Module, parameter: str = "weight") -> Adapted:
        name, siblings, key = self.sites[id(module)]
        self.used.append((siblings, key, module))
        part = unwrap(name, module, parameter)
        self.read.update(id(parameter) for delta in part.deltas for parameter in delta.parameters())
        return part

    def _merged(self, parts: list[Adapted]) -> Projection:
        """Adapted parts are weights of the engine's own; the others stay shared with the trainer."""
        rows = [len(part.weight) for part in parts]
        weight = self.weights.empty(sum(rows), parts[0].weight.shape[1])
        for part, room in zip(parts, weight.split(rows)):
            if part.deltas:
                self.weights.refuse_sharded(part.weight)
                self.merges.append((part, room))
            else:
                self.weights.place(part.weight, room)
        return Projection(weight, self._bias(parts))

    def _active(self, parts: list[Adapted], four_bit: bool) -> ActiveProjection:
        if len(parts) > MAX_PARTS:
            raise ValueError(f"{parts[0].name}: active LoRA packs at most {MAX_PARTS} projections, not {len(parts)}")
        weights, bases = self.weights, [part.base for part in parts]
        sizes = [out_features_of(base) for base in bases]
        rank = padded_rank(max(sum(delta.factors()[1].shape[0] for delta in part.deltas) for part in parts))
        rows, extra = sum(sizes), len(parts) * rank
        b_RN = weights.empty(rank, rows).zero_()
        scale_N = torch.ones(rows, device=weights.device) if any(part.dora for part in parts) else None
        stacked = base = None
        if four_bit or any(weights.holds(linear.weight) for linear in bases):
            a_NK = weights.empty(extra, bases[0].in_features).zero_()
            bias = self._bias(parts, scale_N)
            base = NF4Projection.of(weights, bases, bias) if four_bit else Projection(weights.pack([b.weight for b in bases]), bias)
        else:
            storage = weights.pack([linear.weight for linear in bases], extra_rows=extra)
            a_NK = storage[rows:]
            stacked = Projection(storage, self._bias(parts, scale_N, extra))
        a_PRK = a_NK.unflatten(0, (len(parts), rank))
        for part, a_RK, own_b_RN in zip(parts, a_PRK, b_RN.split(sizes, dim=1)):
            self._add_rooms(part, own_b_RN.T, a_RK)
        if scale_N is not None:
            self.scales += [(part, room) for part, room in zip(parts, scale_N.split(sizes)) if part.dora]
        return ActiveProjection(a_PRK, b_RN, sizes, stacked, base, scale_N)

    def _add_rooms(self, part: Adapted, left: Tensor, right: Tensor) -> None:
        first = 0
        for delta in part.deltas:
            last = first + delta.factors()[1].shape[-2]
            self.rooms.append(Room(delta, left[..., first:last], right[..., first:last, :]))
            first = last

    def _bias(self, parts: list[Adapted], scale_N: Tensor | None = None, extra_rows: int = 0) -> Tensor | None:
        """The packed bias, above `extra_rows` zeros. Under a DoRA scale it lies divided by it: PEFT does not scale the bias."""
        biases = [bias_of(part.base) for part in parts]
        sizes = [out_features_of(part.base) for part in parts]
        own = [
            part.has_own_bias or (bias is not None and scale_N is not None and bool(part.dora)) for part, bias in zip(parts, biases)
        ]
        if not any(own) and not extra_rows:
            return self.weights.pack_bias([part.base for part in parts])
        if not any(own) and all(bias is None for bias in biases):
            return None
        packed = self.weights.empty(sum(sizes) + extra_rows).zero_()
        scales = [None] * len(parts) if scale_N is None else scale_N.split(sizes)
        for part, base_bias, owned, scale, room in zip(parts, biases, own, scales, packed.split([*sizes, extra_rows])):
            if owned:
                self.biases.append((part, room, scale))
            elif base_bias is not None:
                self.weights.place(base_bias, room)
        return packed

    # -------------------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Raises ValueError naming the active adapters' tensors that no projection, embedding or held weight reads."""
        left_out = [
            f"{name} ({kind})"
            for name, parameter, kind in active_tensors(self.model)
            if id(parameter) not in self.read and not self.weights.holds(parameter)
        ]
        if left_out:
            shown = ", ".join(left_out[:4]) + (f" and {len(left_out) - 4} more" if len(left_out) > 4 else "")
            raise ValueError(f"adapter tensors that this walker can't apply: {shown}. --walker hf runs PEFT's own layers")

    def changed(self) -> bool:
        """Whether PEFT's wrappers are others than those that the projections were built from."""
        configs = peft_configs(self.model)
        return (
            configs.keys() != self.configs.keys()
            or any(configs[name] is not config for name, config in self.configs.items())
            or self.state != self._state()
            or any(siblings.get(key) is not module for siblings, key, module in self.used)
        )

    def _state(self) -> list[tuple[bool, list[str]]]:
        return [(module.disable_adapters, list(module.active_adapters)) for module in self.wrappers]

    def written(self) -> Iterator[Tensor]:
        """Everything that `refresh` writes."""
        yield from (room for _, room in self.merges)
        for room in self.rooms:
            yield from (room.scaled, room.plain)
        yield from (room for _, room in self.scales)
        yield from (room for _, room, _ in self.biases)

    # ------------------------------------------------------------------------------------------------------------ refresh

    @torch.no_grad()
    def refresh(self) -> None:
        """Writes the adapters' current state to the engine's addresses. `merged` starts from the trainer's base each time."""
        for wrapper in self.wrappers:
            if wrapper.merged_adapters:
                raise ValueError(
                    f"adapter {', '.join(wrapper.merged_adapters)} is merged into the base weights and would be applied twice; "
                    "call unmerge_adapter() first"
                )
        self._merge()
        matrices = [room for room in self.rooms if room.plain.dim() == 2]
        lefts, rights = zip(*(room.delta.factors() for room in matrices)) if matrices else ((), ())
        copy_scaled([room.scaled for room in matrices], lefts, [room.delta.scaling for room in matrices])
        copy_scaled([room.plain for room in matrices], rights, [1.0] * len(rights))
        for room in self.rooms:
            if room.plain.dim() == 3:  # the factors of a whole stack: large enough for launches of their own
                left_ENr, right_ErK = room.delta.factors()
                torch.mul(left_ENr, room.delta.scaling, out=room.scaled)
                room.plain.copy_(right_ErK)
        for part, room in self.scales:
            room.copy_(part.dora.dora_scale(float_weight(part.base)))
        for part, room, scale in self.biases:
            room.copy_(part.bias() if scale is None else part.bias() / scale)

    def _merge(self) -> None:
        plain: list[list[tuple[Delta, Tensor, Tensor]]] = []
        for part, room in self.merges:
            base = part.weight.data
            if not part.is_plain:
                for delta in part.deltas:
                    base = delta.merged_by_peft(base)
                room.copy_(base)
                continue
            for index, delta in enumerate(part.deltas):
                if index == len(plain):
                    plain.append([])
                plain[index].append((delta, base if index == 0 else room, room))
        for jobs in plain:
            columns: tuple[list, ...] = ([], [], [], [], [])
            for delta, base, room in jobs:
                matrices = [room, base, *delta.factors()]
                experts = zip(*matrices) if room.dim() == 3 else [matrices]
                for matrix in experts:
                    for column, value in zip(columns, (*matrix, delta.scaling)):
                        column.append(value)
            merge_low_rank(*columns)
