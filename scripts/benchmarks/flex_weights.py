"""Weights at fixed addresses, shared with the trainer: packed projections without a second copy.

A captured graph reads a weight at one address for ever, and q, k, v run as one matmul only if they lie in one storage. So
the engine gives each weight a *slot* and makes the model's own parameter a view of it (`parameter.data = slot`). The optimizer,
gradient checkpointing, PEFT, save and load keep working on the parameter; what silently moves it (`.to(dtype)`, `.half()`,
`load_state_dict(assign=True)`, a safe merge) is found at the next `refresh`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import flex_kernels


class SharedWeights:
    """The slots of one model's weights, in the dtype and on the device that the engine computes with."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.model, self.dtype, self.device = model, dtype, torch.device(device)
        self.slots: dict[nn.Parameter, Tensor] = {}

    def hold(self, parameter: nn.Parameter) -> Tensor:
        """The slot of one parameter: its own storage, or a copy where dtype or device differ."""
        if parameter not in self.slots:
            self._refuse_sharded(parameter)
            shared = parameter.dtype == self.dtype and parameter.device == self.device
            self.slots[parameter] = parameter.data if shared else parameter.data.to(self.device, self.dtype)
        return self.slots[parameter]

    def pack(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """One slot for several parameters, stacked along the first axis; each becomes a view of its part."""
        if len(parameters) == 1:
            return self.hold(parameters[0])
        for parameter in parameters:
            self._refuse_sharded(parameter)
        rows = [parameter.shape[0] for parameter in parameters]
        packed = torch.empty(sum(rows), *parameters[0].shape[1:], dtype=self.dtype, device=self.device)
        for parameter, slot in zip(parameters, packed.split(rows)):
            self.slots[parameter] = slot
            self._take_over(parameter, slot)
        return packed

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings every slot up to date. A parameter that lies in its slot costs one pointer comparison."""
        for parameter, slot in self.slots.items():
            if parameter.data_ptr() != slot.data_ptr() or parameter.dtype != slot.dtype:
                self._refuse_sharded(parameter)
                self._take_over(parameter, slot)

    @torch.no_grad()
    def _take_over(self, parameter: nn.Parameter, slot: Tensor) -> None:
        if parameter.shape != slot.shape:
            raise ValueError(f"{self._name(parameter)}: shape {tuple(parameter.shape)} was {tuple(slot.shape)} before")
        slot.copy_(parameter)
        if parameter.dtype == slot.dtype and parameter.device == slot.device:
            parameter.data = slot

    def _refuse_sharded(self, parameter: nn.Parameter) -> None:
        sharded = type(parameter.data).__name__ == "DTensor" or hasattr(parameter, "ds_id")
        if sharded or parameter.is_meta or parameter.numel() == 0:
            kind = "sharded (FSDP or ZeRO-3)" if sharded or not parameter.is_meta else "on the meta device"
            raise ValueError(f"{self._name(parameter)} is {kind}; the rollout engine needs whole weights")

    def _name(self, parameter: nn.Parameter) -> str:
        return next((name for name, p in self.model.named_parameters() if p is parameter), "a parameter")


def base_linear(module: nn.Module) -> nn.Module:
    """The linear itself where PEFT has wrapped it."""
    return getattr(module, "base_layer", module)


class Projection:
    """y = x Wᵀ + b, where W stacks the weights of one or more linears that read the same input."""

    def __init__(self, weights: SharedWeights, linears: Sequence[nn.Module]):
        bases = [base_linear(linear) for linear in linears]
        self.weight = weights.pack([linear.weight for linear in bases])
        biases = [linear.bias for linear in bases if linear.bias is not None]
        if biases and len(biases) != len(bases):
            raise ValueError("projections that are packed together must all have a bias, or none")
        self.bias = weights.pack(biases) if biases else None

    def __call__(self, x_TK: Tensor) -> Tensor:
        return nn.functional.linear(x_TK, self.weight, self.bias)
