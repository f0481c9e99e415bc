"""A walker's decode forward through torch.compile, before it is captured: what Inductor fuses is recorded in the CUDA graph.

    walker = Qwen3Walker(model, compile_walker="walker_fullgraph", compile_opts="unsloth_O3")

While it is traced, the ops of the kernel files are their plain references (`flex_triton.use_triton`), for Inductor to fuse. What it
must not see the inside of (attention and its KV write, experts, 4-bit products) is an `Opaque` call. Rows are symbolic, so
that one compilation serves every bucket; weights stay inputs, so that a refresh reaches them, except under `inference_freeze`.
A prefill runs as it is: it is bound by arithmetic, and its lengths vary.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flex_engine import WrittenWalker
    from flex_paged_attention import Attend

COMPILE_MODES = ("off", "walker", "walker_fullgraph")  # fullgraph: a graph break is an error
COMPILE_VARIABLE = "UNSLOTH_FLEX_COMPILE_WALKER"
FREEZE = "inference_freeze"
COMPILE_OPTS: dict[str, dict[str, object]] = {
    "stock": {},
    "unsloth_O3": {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "aggressive_fusion": True,
        "epilogue_fusion": True,
        "shape_padding": True,
        "triton.cudagraphs": False,  # the engine captures
    },
    FREEZE: {"freezing": True},
}


def compile_mode(asked: bool | str | None) -> str:
    """One of COMPILE_MODES: as asked for, True for walker_fullgraph, None for what the environment says. Raises ValueError."""
    source, value = "compile_walker", asked
    if asked is None:
        source, value = COMPILE_VARIABLE, os.environ.get(COMPILE_VARIABLE, "0")
    names = {True: "walker_fullgraph", False: "off", "1": "walker_fullgraph", "0": "off", "": "off"}
    mode = names.get(value, value)
    if mode not in COMPILE_MODES:
        raise ValueError(f"{source} must be 0, 1 or one of {', '.join(COMPILE_MODES)}, not {value!r}")
    return mode


# --------------------------------------------------------------------------------------------------------------- opaque calls

_opaque: WeakValueDictionary[int, Opaque] = WeakValueDictionary()
_keys = itertools.count()


class Opaque:
    """`run(*tensors, *numbers) -> tensors`, called as it is, and in a compiled forward through an op that is not looked into.

    `fake(*tensors, *numbers)` makes empty results of the same shapes. `run` may read and write tensors that it is not passed, as
    long as its own results carry the order in which that has to happen. Results share no memory with what it is passed.
    """

    def __init__(self, run: Callable[..., Sequence[Tensor]], fake: Callable[..., Sequence[Tensor]]):
        self.run, self.fake, self.key = run, fake, next(_keys)
        _opaque[self.key] = self

    def __call__(self, *tensors: Tensor | None, numbers: Sequence[float] = ()) -> Sequence[Tensor]:
        if torch.compiler.is_compiling():
            return torch.ops.flex_walker.opaque(self.key, tensors, numbers)
        return self.run(*tensors, *numbers)


def _run_opaque(key: int, tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> list[Tensor]:
    return list(_opaque[key].run(*tensors, *numbers))


def _fake_opaque(key: int, tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> list[Tensor]:
    return list(_opaque[key].fake(*tensors, *numbers))


_SCHEMA = "(int key, Tensor?[] tensors, float[] numbers) -> Tensor[]"
torch.library.custom_op("flex_walker::opaque", _run_opaque, mutates_args=(), schema=_SCHEMA).register_fake(_fake_opaque)


# ----------------------------------------------------------------------------------------------------------------- the walker


class OpaqueAttend:
    """Stands for a decode's `Attend` while a walker is compiled; `current` is the one of the call under way."""

    prefill = False

    def __init__(self, walker: WrittenWalker):
        def fake(qkv_TE, q_norm, k_norm, cos, sin, layer, eps, norm_v):
            spec = walker.specs[int(layer)]
            return (qkv_TE.new_empty(qkv_TE.shape[0], spec.num_heads * spec.head_dim),)

        def run(qkv_TE, q_norm, k_norm, cos, sin, layer, eps, norm_v):
            return (self.current(int(layer), qkv_TE, q_norm, k_norm, (cos, sin), eps, bool(norm_v)),)

        self.current: Attend | None = None
        self.op = Opaque(run, fake)

    def __call__(
        self, layer: int, qkv_TE: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, rope: tuple[Tensor, Tensor],
        eps: float = 1e-6, norm_v: bool = False,
    ) -> Tensor:  # fmt: skip
        return self.op(qkv_TE, q_norm, k_norm, *rope, numbers=(layer, eps, norm_v))[0]


class CompiledForward:
    """`walker.forward` with its decode compiled."""

    def __init__(self, walker: WrittenWalker, mode: str, opts: str):
        if opts not in COMPILE_OPTS:
            raise ValueError(f"compile_opts must be one of {', '.join(COMPILE_OPTS)}, not {opts!r}")
        self.plain, self.frozen = walker.forward, opts == FREEZE
        self.walker, self.attend = walker, OpaqueAttend(walker)
        # A walker that is built anew is compiled anew; past dynamo's limit of 8 nothing is compiled without a word.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        if self.frozen:
            for weight in walker.weights.tensors:
                torch._dynamo.mark_static_address(weight)  # what Inductor takes for a constant
        self.compiled = torch.compile(self._decode, fullgraph=mode == "walker_fullgraph", options=COMPILE_OPTS[opts] or None)

    def _decode(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.plain(tokens_T, positions_T, self.attend)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        if attend.prefill:
            return self.plain(tokens_T, positions_T, attend)
        for row in (tokens_T, positions_T):
            torch._dynamo.maybe_mark_dynamic(row, 0)
        self.attend.current = attend
        try:
            with torch._inductor.config.patch(freezing=True) if self.frozen else contextlib.nullcontext():
                return self.compiled(tokens_T, positions_T)
        finally:
            self.attend.current = None
