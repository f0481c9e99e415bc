"""Matrix products on a CPU: oneDNN's, against weights that are packed once for a whole generate call.

    packed = PackedWeights()
    with packed.in_use():       # flex_linear.dense finds it
        walker.forward(...)
    packed.clear()              # the weights may change

Packed weights take a second copy of every weight that is multiplied with, for as long as a call runs. They can't go stale, since none
outlives the call: an optimizer writes through `parameter.data`, which leaves no trace on the tensors that the engine holds. Weights that
change while sequences run need `FlexEngine.refresh_lora`, which drops the copies too.

Two cores with AVX512, products of a decode step of SmolLM2-135M as a part of F.linear's time at 1, 2, 8, 16, 32, 128 and 800 rows: fp32
.71 .44 .39 .44 .58 .62 .87 (8 rows: 33 ms), bf16 .83 .70 .72 .71 .77 .89 .95 (18 ms). Packing takes 125 and 65 ms. The packed layout is the
same for all of them, so there is no rule by rows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_thread = threading.local()


class PackedWeights:
    """Packed copies of weights, made at their first use. Holds the weights too, so that no other tensor takes an address meanwhile."""

    def __init__(self) -> None:
        self.entries: dict[tuple, tuple[Tensor, int, Tensor]] = {}  # weight, its version, packed

    def clear(self) -> None:
        self.entries.clear()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """`linear` packs the weights that it meets in this thread."""
        before, _thread.packed = getattr(_thread, "packed", None), self
        try:
            yield
        finally:
            _thread.packed = before

    def of(self, weight_NK: Tensor) -> Tensor:
        key = weight_NK.data_ptr(), weight_NK.dtype, *weight_NK.shape, *weight_NK.stride()
        entry = self.entries.get(key)
        if entry is None or entry[1] != weight_NK._version:
            entry = weight_NK, weight_NK._version, torch.ops.mkldnn._reorder_linear_weight(weight_NK)
            self.entries[key] = entry
        return entry[2]


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """F.linear; against a packed weight where `PackedWeights` are in use."""
    packed = getattr(_thread, "packed", None)
    if packed is None or torch.is_grad_enabled() or not _can_pack(x_TK, weight_NK):
        return F.linear(x_TK, weight_NK, bias_N)
    return torch.ops.mkldnn._linear_pointwise(x_TK, packed.of(weight_NK), bias_N, "none", [], "")


def _can_pack(x_TK: Tensor, weight_NK: Tensor) -> bool:
    same_kind = weight_NK.device.type == "cpu" and weight_NK.dtype == x_TK.dtype
    return same_kind and _onednn_has(weight_NK.dtype) and not weight_NK.is_inference() and x_TK.numel() > 0


@functools.cache
def _onednn_has(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
