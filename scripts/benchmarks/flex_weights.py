"""Weights at fixed addresses, shared with the trainer: packed projections without a second copy.

A captured graph reads a weight at one address for ever, and q, k, v run as one matmul only if they lie in one storage. So
the engine gives each weight a *slot* and makes the model's own parameter a view of it (`parameter.data = slot`). The optimizer,
gradient checkpointing, PEFT, save and load keep working on the parameter; what silently moves it (`.to(dtype)`, `.half()`, a
safe merge) or puts another in its place (`load_state_dict(assign=True)`) is found at the next `refresh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import flex_kernels
import flex_linear


def unwrapped(model: nn.Module) -> nn.Module:
    """The Hugging Face model itself where PEFT has wrapped it; PEFT's layers stay inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def bias_of(linear: nn.Module) -> nn.Parameter | None:
    """None too for a module that is a linear in all but name, such as a router: it has a `weight` and no more."""
    return getattr(linear, "bias", None)


def out_features_of(linear: nn.Module) -> int:
    return linear.out_features if hasattr(linear, "out_features") else linear.weight.shape[0]


@dataclass(eq=False)
class Slot:
    """The engine's room for one weight, and every place where the model keeps the parameter; several if it is tied."""

    tensor: Tensor
    owners: list[tuple[nn.Module, str]]

    def parameters(self) -> list[nn.Parameter]:
        """One, unless a tied weight's places were given parameters of their own."""
        return list({id(p): p for p in (getattr(module, name) for module, name in self.owners)}.values())

    def holds(self, parameter: nn.Parameter) -> bool:
        same_kind = parameter.dtype == self.tensor.dtype and parameter.shape == self.tensor.shape
        return same_kind and parameter.data_ptr() == self.tensor.data_ptr()


class SharedWeights:
    """The slots of one model's weights, in the dtype and on the device that the engine computes with."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.model, self.dtype, self.device = model, dtype, torch.device(device)
        self.slots: dict[int, Slot] = {}
        self.tensors: list[Tensor] = []  # all that was handed out
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in (*module._parameters.items(), *module._buffers.items()):
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append((module, name))

    def empty(self, *shape: int) -> Tensor:
        self.tensors.append(torch.empty(*shape, dtype=self.dtype, device=self.device))
        return self.tensors[-1]

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.slots

    def hold(self, parameter: nn.Parameter | Tensor) -> Tensor:
        """The slot of one parameter or buffer: its own storage, or a copy where dtype or device differ."""
        if id(parameter) not in self.slots:
            self.refuse_sharded(parameter)
            shared = parameter.dtype == self.dtype and parameter.device == self.device
            slot = self._add(parameter, parameter.data if shared else parameter.data.to(self.device, self.dtype))
            self.tensors.append(slot.tensor)
        return self.slots[id(parameter)].tensor

    def place(self, parameter: nn.Parameter, room: Tensor) -> None:
        """Makes `room`, which the caller has allocated, the parameter's slot."""
        if id(parameter) in self.slots:
            raise ValueError(f"{self.name_of(parameter)} is used by two projections, which the rollout engine can't pack")
        self.refuse_sharded(parameter)
        self._take_over(parameter, self._add(parameter, room))

    def pack(self, parameters: Sequence[nn.Parameter], extra_rows: int = 0) -> Tensor:
        """One storage for several parameters, stacked along the first axis, above `extra_rows` rows of zeros for the caller."""
        if len(parameters) == 1 and not extra_rows:
            return self.hold(parameters[0])
        rows = [parameter.shape[0] for parameter in parameters]
        packed = self.empty(sum(rows) + extra_rows, *parameters[0].shape[1:])
        packed[sum(rows) :] = 0
        for parameter, room in zip(parameters, packed.split([*rows, extra_rows])):
            self.place(parameter, room)
        return packed

    def pack_bias(self, linears: Sequence[nn.Module]) -> Tensor | None:
        """The biases of several linears in one storage, zero where one has none; None if none has one."""
        biases = [bias_of(linear) for linear in linears]
        if all(bias is None for bias in biases):
            return None
        if len(biases) == 1:
            return self.hold(biases[0])
        rows = [out_features_of(linear) for linear in linears]
        packed = self.empty(sum(rows)).zero_()
        for bias, room in zip(biases, packed.split(rows)):
            if bias is not None:
                self.place(bias, room)
        return packed

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings every slot up to date. A parameter that lies in its slot costs one pointer comparison."""
        for slot in self.slots.values():
            current = slot.parameters()
            moved = [parameter for parameter in current if not slot.holds(parameter)]
            if moved:
                others = (parameter for parameter in current if parameter is not moved[0])
                if any(not torch.equal(other.data.to(moved[0]), moved[0].data) for other in others):
                    raise ValueError(f"{self.name_of(moved[0])} was tied to another weight and now differs from it")
                for parameter in moved:
                    self.refuse_sharded(parameter)
                    self._take_over(parameter, slot)

    def _add(self, parameter: nn.Parameter, room: Tensor) -> Slot:
        if id(parameter) not in self._owners:
            raise ValueError(f"a weight of shape {tuple(parameter.shape)} is no parameter of the model, so it can't be shared")
        self.slots[id(parameter)] = Slot(room, self._owners[id(parameter)])
        return self.slots[id(parameter)]

    @torch.no_grad()
    def _take_over(self, parameter: nn.Parameter, slot: Slot) -> None:
        if parameter.shape != slot.tensor.shape or parameter.is_floating_point() != slot.tensor.is_floating_point():
            now, before = (f"{tuple(t.shape)} {t.dtype}" for t in (parameter, slot.tensor))
            raise ValueError(f"{self.name_of(parameter)}: shape and dtype {now} can't follow {before}")
        slot.tensor.copy_(parameter)
        if parameter.dtype == slot.tensor.dtype and parameter.device == slot.tensor.device:
            parameter.data = slot.tensor

    def refuse_sharded(self, parameter: nn.Parameter) -> None:
        sharded = type(parameter.data).__name__ == "DTensor" or hasattr(parameter, "ds_id")
        if sharded or parameter.is_meta or parameter.numel() == 0:
            kind = "sharded (FSDP or ZeRO-3)" if sharded or not parameter.is_meta else "on the meta device"
            raise ValueError(f"{self.name_of(parameter)} is {kind}; the rollout engine needs whole weights")

    def name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, p in self.model.named_parameters() if p is parameter), "a parameter")


class Product:
    """What a walker calls: `[T, K] -> [T, N]`, plain or with what usually follows it. How it is computed is the subclass's."""

    def __call__(self, x_TK: Tensor) -> Tensor:
        raise NotImplementedError

    def add_norm(self, x_TK: Tensor, residual_TN: Tensor, norm_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(total), total) with total = product + residual."""
        return flex_kernels.rms_norm(self(x_TK), norm_N, eps, residual_TN)

    def silu_gated(self, x_TK: Tensor) -> Tensor:
        """silu(gate) * up of a product [gate | up]: `[T, N / 2]`."""
        return flex_kernels.silu_mul(self(x_TK))

    def gelu_gated(self, x_TK: Tensor) -> Tensor:
        """gelu(gate) * up, gelu in its tanh approximation."""
        return flex_kernels.gelu_mul(*self(x_TK).chunk(2, dim=-1))

    def norm_add_norm(
        self, x_TK: Tensor, norm_N: Tensor, eps: float, residual_TN: Tensor, next_norm_N: Tensor | None = None,
        scale: Tensor | float = 1.0,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """(norm(total), total) with total = (residual + norm(product)) * scale; norms as `flex_kernels.norm_add_norm`'s."""
        return flex_kernels.norm_add_norm(self(x_TK), norm_N, eps, residual_TN, next_norm_N, scale)


@dataclass(eq=False)
class Projection(Product):
    """y = x Wᵀ + b, where W stacks the weights of one or more linears that read the same input."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weights: SharedWeights, linears: Sequence[nn.Module]) -> Projection:
        return cls(weights.pack([linear.weight for linear in linears]), weights.pack_bias(linears))

    def __call__(self, x_TK: Tensor) -> Tensor:
        return flex_linear.linear(x_TK, self.weight, self.bias)

    def add_norm(self, x_TK: Tensor, residual_TN: Tensor, norm_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            return super().add_norm(x_TK, residual_TN, norm_N, eps)
        return flex_linear.linear_add_norm(x_TK, self.weight, residual_TN, norm_N, eps)

    def silu_gated(self, x_TK: Tensor) -> Tensor:
        if self.bias is not None:
            return super().silu_gated(x_TK)
        return flex_linear.gate_up_silu(x_TK, self.weight)

    def gelu_gated(self, x_TK: Tensor) -> Tensor:
        if self.bias is not None:
            return super().gelu_gated(x_TK)
        return flex_linear.gate_up_gelu(x_TK, self.weight)

    def norm_add_norm(
        self, x_TK: Tensor, norm_N: Tensor, eps: float, residual_TN: Tensor, next_norm_N: Tensor | None = None,
        scale: Tensor | float = 1.0,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        if self.bias is not None:
            return super().norm_add_norm(x_TK, norm_N, eps, residual_TN, next_norm_N, scale)
        return flex_linear.linear_norm_add_norm(x_TK, self.weight, norm_N, eps, residual_TN, next_norm_N, scale)


@dataclass(eq=False)
class Embedding:
    """The rows of a table."""

    weight: Tensor

    def __call__(self, tokens_T: Tensor) -> Tensor:
        return nn.functional.embedding(tokens_T, self.weight)
