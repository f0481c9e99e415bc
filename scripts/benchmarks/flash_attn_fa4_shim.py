"""FlashAttention 4 under transformers' continuous batching: `--attn_impl flash_attention_4`.

transformers' paged attention calls every FlashAttention version's varlen function with FlashAttention 2's positions (cumulative
lengths right after q, k, v) and -1 for "no window". FlashAttention 4 has `qv` in that place and None for no window.
`install` puts an adapter between them; importing this module changes nothing.

FlashAttention 4 has no `flash_attn_with_kvcache`, so transformers' fast path for decode steps stays off: keys and values are
gathered from the pages at every step. That is transformers' own choice for this version, not the shim's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from transformers import modeling_flash_attention_utils as flash_utils
from transformers.utils.generic import split_attention_implementation

IMPLEMENTATION = "flash_attention_4"
POSITIONAL = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def adapt(varlen: Callable) -> Callable:
    """FlashAttention 4's `flash_attn_varlen_func` behind FlashAttention 2's calling convention."""

    @functools.wraps(varlen)  # transformers reads the signature to learn what the function supports
    def call(q, k, v, *lengths, window_size=(-1, -1), **options):
        options |= dict(zip(POSITIONAL, lengths))
        window = tuple(None if side is None or side < 0 else side for side in window_size)
        return varlen(q, k, v, window_size=window, **options)

    return call


def install() -> None:
    """Makes transformers load FlashAttention 4 through the adapter. More than once is as good as once."""
    lazy_imports = flash_utils._lazy_imports
    if hasattr(lazy_imports, "adapts_fa4"):
        return

    @functools.wraps(lazy_imports)
    def adapted(implementation: str | None, *args, **kwargs):
        flash, varlen, *others = lazy_imports(implementation, *args, **kwargs)
        if split_attention_implementation(implementation)[1] == IMPLEMENTATION:
            varlen = adapt(varlen)
        return flash, varlen, *others

    adapted.adapts_fa4 = True
    flash_utils._lazy_imports = adapted
