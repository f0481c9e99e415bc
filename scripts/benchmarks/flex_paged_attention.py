"""Paged KV cache and the one `attend` entry of every walker.

Three layers, from the inside out:

* `PageTable`      which physical page belongs to whom (host only, reference counted).
* `PagedKVCache`   the pools those pages index, and each slot's page list on the device.
* `Attend`         one forward's view of both: writes K and V, then attends with the chosen backend.

Two kinds of forward exist. A *prefill* packs whole prompts into one flat row of tokens and attends over the packed K and V,
masked document-causally; it never reads a page. A *decode* has one row per sequence and reads pages only.

Rules that never break (each is asserted or tested):
page 0 and slot 0 are padding, so a padded row writes only there, attends only there, and stays finite;
a page is counted once for every holder that can read it, and a shared page is never written;
page order means nothing, because a page knows its own logical index (`logical_page`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache as memoize
from importlib import metadata
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import flex_decode_attention
import flex_kernels
from flex_memory import DeviceMemory

PADDING_PAGE = 0
PADDING_SLOT = 0
MAX_FLEX_POOL = 2**31 - 1  # elements of one layer's keys or values
FLEX_Q_BLOCK = 128  # flex_attention's default sparse block size


class OutOfPages(Exception):
    """Fewer free pages than asked for; nothing was taken."""


class PageTable:
    """Free list and reference counts of `num_pages` physical pages. Page 0 is never handed out."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; page 0 is reserved, so at least 2 are needed")
        self.num_pages, self.page_size = num_pages, page_size
        self.free: list[int] = list(range(num_pages - 1, PADDING_PAGE, -1))
        self.references = np.zeros(num_pages, dtype=np.int32)
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self.free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each, or OutOfPages."""
        if count > len(self.free):
            raise OutOfPages(f"{count} pages asked for, {len(self.free)} free")
        pages = [self.free.pop() for _ in range(count)]
        self.references[pages] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more reference on each of `pages`."""
        assert all(self.references[page] > 0 for page in pages), "sharing a free page"
        for page in pages:
            self.references[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.references[page] > 0, f"page {page} released twice"
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    def check(self, holders: Iterable[Sequence[int]] = ()) -> None:
        """Asserts that every page is either free, once, or counted by exactly the `holders` that list it."""
        held = Counter(page for pages in holders for page in pages)
        free = Counter(self.free)
        for page in range(1, self.num_pages):
            assert self.references[page] == held[page], f"page {page}: {self.references[page]} counted, {held[page]} held"
            assert free[page] == (held[page] == 0), f"page {page}: free {free[page]} times, held {held[page]} times"
        assert held[PADDING_PAGE] == free[PADDING_PAGE] == 0, "the padding page was handed out"


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer as the cache sees it. `store_layer` names the layer whose K and V it reads (None: its own).

    `window`: row at position q sees keys k with 0 <= q - k < window. `softcap`: scores become softcap * tanh(scores / softcap).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    store_layer: int | None = None


def to_device(values: np.ndarray | Sequence, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of the host's values that the host does not wait for; it comes behind what the GPU was given before."""
    values = torch.as_tensor(values, dtype=dtype)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class PagedKVCache:
    """K and V pools `[num_kv_heads, num_pages * page_size, head_dim]` for every storing layer, and the slots' page lists.

    `layers[i]` is layer i's `[2, num_kv_heads, tokens, head_dim]`. All pools lie in one allocation, which can be given back and
    taken again at the same addresses (`sleep`, `wake_up`).
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.specs, self.page_size, self.num_pages = list(specs), page_size, num_pages
        self.dtype, self.device, self.max_seq_len = dtype, torch.device(device), max_seq_len
        self.pages = PageTable(num_pages, page_size)
        pages_per_slot = self.pages.pages_for(max_seq_len)
        pinned = self.device.type == "cuda"
        self.host_table = torch.zeros(num_slots + 1, pages_per_slot, dtype=torch.int32, pin_memory=pinned)
        self.host_logical = torch.zeros(num_pages, dtype=torch.int32, pin_memory=pinned)
        self.page_table = torch.zeros_like(self.host_table, device=self.device)
        self.logical_page = torch.zeros_like(self.host_logical, device=self.device)
        self.dirty, self.uploaded = False, None
        self.layers = self._allocate_pools()

    @staticmethod
    def bytes_per_token(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> int:
        storing = [spec for spec in specs if spec.store_layer is None]
        return sum(2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in storing)

    def _allocate_pools(self) -> list[Tensor]:
        """Each layer's `[2, heads, tokens, head_dim]`, zeroed: a padded row's stale values must be finite."""
        tokens = self.num_pages * self.page_size
        self.pool_bytes = self.bytes_per_token(self.specs, self.dtype) * tokens
        if self.device.type == "cuda":
            self.memory = DeviceMemory(self.pool_bytes, self.device)
            flat = self.memory.tensor((self.pool_bytes // self.dtype.itemsize,), self.dtype)
        else:
            self.memory = None
            flat = torch.empty(self.pool_bytes // self.dtype.itemsize, dtype=self.dtype)
        flat.zero_()
        layers: list[Tensor] = []
        start = 0
        for spec in self.specs:
            if spec.store_layer is not None:
                layers.append(layers[spec.store_layer])
                continue
            shape = (2, spec.num_kv_heads, tokens, spec.head_dim)
            layers.append(flat[start : start + prod(shape)].view(shape))
            start += prod(shape)
        self.flat = flat
        return layers

    def sleep(self) -> None:
        """Gives the pools' memory back to the device; addresses stay reserved, contents are lost."""
        self.pages.check()  # nothing may be held
        if self.memory is not None:
            self.memory.unmap()

    def wake_up(self) -> None:
        if self.memory is not None and not self.memory.mapped:
            self.memory.map()
            self.clear()

    def clear(self) -> None:
        """Zeroes the pools: whatever a later owner of a page does not overwrite must be finite."""
        self.flat.zero_()

    def assign(self, slot: int, pages: Sequence[int], start: int = 0) -> None:
        """Writes `pages` into `slot`'s list from logical index `start` on (on the device at the next `upload`)."""
        if self.uploaded is not None:
            self.uploaded.synchronize()  # the last upload may still wait its turn behind decode steps
            self.uploaded = None
        stop = start + len(pages)
        self.host_table[slot, start:stop] = torch.tensor(pages, dtype=torch.int32)
        self.host_logical[torch.tensor(pages, dtype=torch.long)] = torch.arange(start, stop, dtype=torch.int32)
        self.dirty = True

    def upload(self) -> None:
        if self.dirty:
            self.page_table.copy_(self.host_table, non_blocking=True)
            self.logical_page.copy_(self.host_logical, non_blocking=True)
            self.dirty = False
            if self.device.type == "cuda":
                self.uploaded = torch.cuda.current_stream(self.device).record_event()

    def token_slots(self, pages: Sequence[int], num_tokens: int) -> np.ndarray:
        """Pool index of each of the first `num_tokens` tokens of a sequence that lies in `pages`, int64 `[num_tokens]`."""
        index = np.arange(num_tokens, dtype=np.int64)
        return np.asarray(pages, dtype=np.int64)[index // self.page_size] * self.page_size + index % self.page_size

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies whole pages, in every layer."""
        if not source:
            return
        source_index, target_index = to_device(source, self.device), to_device(target, self.device)
        for spec, kv in zip(self.specs, self.layers):
            if spec.store_layer is None:
                paged = kv.unflatten(2, (self.num_pages, self.page_size))
                paged[:, :, target_index] = paged[:, :, source_index]


@dataclass
class PrefillBatch:
    """Packed prompts. `lengths` are the documents' token counts in order; the rest of the row up to T is padding."""

    positions_T: Tensor
    token_slots_T: Tensor
    lengths: list[int]

    def document_starts(self) -> np.ndarray:
        """First row of each row's document, int64 `[T]`; the padding is a document of its own."""
        total = self.positions_T.shape[0]
        lengths = [*self.lengths, total - sum(self.lengths)]
        starts = np.cumsum([0, *lengths[:-1]])
        return np.repeat(starts, lengths)


@dataclass
class DecodeBatch:
    """One row per sequence; row b sees its first `lengths_B[b]` = position + 1 keys, its own among them. Padded rows have
    position 0 and an all-zero page list.

    `max_length` bounds the row lengths when the host knows it (None inside a captured graph: the whole page list counts).
    `shares_pages`: neighbouring rows may begin with the same pages, and the backend may read these once for all of them.
    """

    positions_T: Tensor
    token_slots_T: Tensor
    lengths_B: Tensor
    page_table_BP: Tensor
    max_length: int | None = None
    shares_pages: bool = False

    @classmethod
    def of(cls, positions_B: Tensor, page_table_BP: Tensor, page_size: int, max_length: int | None = None) -> DecodeBatch:
        """The batch of rows at `positions_B` (int64) with these page lists."""
        pages_B = page_table_BP.gather(1, (positions_B // page_size)[:, None])[:, 0].long()
        token_slots_B = pages_B * page_size + positions_B % page_size
        return cls(positions_B, token_slots_B, (positions_B + 1).int(), page_table_BP, max_length)


@dataclass
class Attend:
    """What a walker calls at every layer: `o_TE = attend(layer, qkv_TE, q_norm, k_norm, rope)`.

    `packed_kv` keeps a prefill's K and V of the layers that others read too.
    """

    cache: PagedKVCache
    batch: PrefillBatch | DecodeBatch
    backend: AttentionBackend
    packed_kv: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill = isinstance(self.batch, PrefillBatch)
        self.shared_layers = {spec.store_layer for spec in self.cache.specs}
        self.plan = self.backend.plan(self.cache, self.batch)

    def __call__(
        self,
        layer: int,
        qkv_TE: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: tuple[Tensor, Tensor],
        eps: float = 1e-6,
        norm_v: bool = False,
    ) -> Tensor:
        """Raw projections `[T, (heads + 2 kv heads) * head_dim]` in, `[T, heads * head_dim]` out.

        `q_norm`, `k_norm`: RMS-norm weights `[head_dim]` over each head, or None. `norm_v`: each head of v is normed without a
        weight. `rope`: cos and sin tables, fp32 `[max_seq_len, rotary_dim]`, rotate-half convention. Without the v heads, v is
        k before norm and rotation. A layer that reads another's keys and values passes its q heads alone.
        """
        spec = self.cache.specs[layer]
        stores = spec.store_layer is None
        pools = self.cache.layers[layer]
        out = flex_kernels.qk_norm_rope_store(
            qkv_TE, q_norm, k_norm, eps, *rope, self.batch.positions_T, self.batch.token_slots_T,
            *(pools if stores else (None, None)), spec.num_heads, self.prefill and stores, norm_v,
        )  # fmt: skip
        if not self.prefill:
            return self.backend.decode(out, *pools, spec, self.plan).flatten(1)
        if stores:
            q_THD, *packed = out
            if layer in self.shared_layers:
                self.packed_kv[layer] = packed
        else:
            q_THD, packed = out, self.packed_kv[spec.store_layer]
        return self.backend.prefill(q_THD, *packed, spec, self.plan).flatten(1)

    def rotated(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        """The same for q, k, v that are normed and rotated already; `[T, heads, head_dim]` out."""
        spec = self.cache.specs[layer]
        k_pool_HND, v_pool_HND = self.cache.layers[layer]
        if spec.store_layer is None:
            k_pool_HND[:, self.batch.token_slots_T] = k_THD.transpose(0, 1)
            v_pool_HND[:, self.batch.token_slots_T] = v_THD.transpose(0, 1)
        if self.prefill:
            return self.backend.prefill(q_THD, k_THD, v_THD, spec, self.plan)
        return self.backend.decode(q_THD, k_pool_HND, v_pool_HND, spec, self.plan)


# ---------------------------------------------------------------------------------------------------- attention backends


class AttentionBackend:
    """Attention over packed documents and over pages. `plan` is what all layers of one forward share."""

    name: str
    page_size = 32  # tokens, unless the user says otherwise: of a prompt, whole pages are shared
    reads_shared_pages_once = False  # where `DecodeBatch.shares_pages` says that there may be some
    reason = ""  # why `auto` took it

    def plan(self, cache: PagedKVCache, batch: PrefillBatch | DecodeBatch):
        raise NotImplementedError

    def prefill(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, spec: AttentionSpec, plan) -> Tensor:
        raise NotImplementedError

    def decode(self, q_BHD: Tensor, k_pool_HND: Tensor, v_pool_HND: Tensor, spec: AttentionSpec, plan) -> Tensor:
        raise NotImplementedError

    def padded_prefill_length(self, num_tokens: int) -> int:
        """Row count that a packed prefill of `num_tokens` is padded to."""
        return num_tokens

    def check(self, cache: PagedKVCache) -> None:
        """Raises ValueError if the backend can't read these pools."""


def masked_attention(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attention with a boolean mask (True: seen) that broadcasts to `[B, H, Q, K]`; None is causal. Soft cap in fp32."""
    grouped = q_BHQD.shape[1] != k_BHKD.shape[1]
    if spec.softcap is None:
        return F.scaled_dot_product_attention(
            q_BHQD, k_BHKD, v_BHKD, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=grouped
        )
    if grouped:
        k_BHKD, v_BHKD = (x.repeat_interleave(q_BHQD.shape[1] // x.shape[1], dim=1) for x in (k_BHKD, v_BHKD))
    if mask is None:
        mask = torch.ones(q_BHQD.shape[2], k_BHKD.shape[2], dtype=torch.bool, device=q_BHQD.device).tril()
    scores = (q_BHQD @ k_BHKD.mT).float() * spec.scale
    scores = (spec.softcap * torch.tanh(scores / spec.softcap)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v_BHKD.dtype) @ v_BHKD


class SdpaAttention(AttentionBackend):
    """Pages gathered, then scaled_dot_product_attention: the reference, and the quickest way on a CPU."""

    name = "sdpa"

    def plan(self, cache: PagedKVCache, batch: PrefillBatch | DecodeBatch):
        if isinstance(batch, PrefillBatch):
            return _split_documents(batch)
        pages_BP, page_size = batch.page_table_BP, cache.page_size
        longest = pages_BP.shape[1] * page_size if batch.max_length is None else batch.max_length
        key_position = torch.arange(longest, device=pages_BP.device)
        slots_BK = pages_BP[:, key_position // page_size].long() * page_size + key_position % page_size
        return slots_BK, batch.positions_T[:, None] - key_position

    def prefill(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, spec: AttentionSpec, documents) -> Tensor:
        o_THD = torch.zeros_like(q_THD)
        for rows in documents:
            q, k, v = (x[rows].transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
            mask = None
            if spec.window is not None and q.shape[2] > spec.window:
                index = torch.arange(q.shape[2], device=q.device)
                distance = index[:, None] - index
                mask = (distance >= 0) & (distance < spec.window)
            o_THD[rows] = masked_attention(q, k, v, mask, spec)[0].transpose(0, 1)
        return o_THD

    def decode(self, q_BHD: Tensor, k_pool_HND: Tensor, v_pool_HND: Tensor, spec: AttentionSpec, plan) -> Tensor:
        slots_BK, distance_BK = plan
        seen_BK = distance_BK >= 0
        if spec.window is not None:
            seen_BK = seen_BK & (distance_BK < spec.window)
        # index_select copies rows; plain indexing takes nine times as long on a CPU.
        k_BHKD, v_BHKD = (
            pool.index_select(1, slots_BK.flatten()).unflatten(1, slots_BK.shape).transpose(0, 1)
            for pool in (k_pool_HND, v_pool_HND)
        )
        # The query heads of one KV head are rows of one product: no K or V is repeated.
        q_BHGD = q_BHD.unflatten(1, (spec.num_kv_heads, -1))
        return masked_attention(q_BHGD, k_BHKD, v_BHKD, seen_BK[:, None, None], spec).flatten(1, 2)


def _split_documents(batch: PrefillBatch) -> list[slice]:
    bounds = np.cumsum([0, *batch.lengths]).tolist()
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]


@memoize
def _compiled_flex(dynamic: bool):
    # Every bucket, head size and pool is a compilation of its own, and past dynamo's limits (8 and 256) nothing is compiled.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 512)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    config.specialize_float = True  # a soft cap is a constant; flex's lowering takes no symbolic float
    mode = os.environ.get("FLEX_COMPILE_MODE")
    return torch.compile(flex_attention, dynamic=dynamic, fullgraph=True, mode=mode)


# What kept a decode call of flex_attention from the decode kernel; it would take the long-query kernel without a word.
ineligible_decodes: list[str] = []


@memoize
def _watch_decode_lowering() -> None:
    """Notes every compilation in which Inductor refuses the decode kernel to a single query row."""
    from torch._inductor.kernel.flex import flex_attention as lowering

    choose = lowering._use_flex_decoding

    def watched(query, kv_indices, value, *args):
        taken = choose(query, kv_indices, value, *args)
        sizes = [list(tensor.get_size()) for tensor in (query, value)]
        if not taken and sizes[0][2] == 1:
            ineligible_decodes.append(f"flex_attention refused its decode kernel for queries {sizes[0]} over values {sizes[1]}")
        return taken

    lowering._use_flex_decoding = watched


def fa4_prefill_choice(
    requested: bool | None, capability: tuple[int, int] | None, installed: bool = True
) -> tuple[bool, str | None]:
    """Whether prefill uses flex_attention's FLASH backend (FlashAttention 4), and a warning where that is not what was asked.

    `requested` None is auto: by `capability` (None: no CUDA GPU), if the package is `installed`. The FLASH backend needs FA4's block
    sparsity, which it has for Hopper and datacenter Blackwell; its sm_80 and sm_120 kernels assert that there is none.
    """
    if requested is False:
        return False, None
    if capability is None:
        reason = "there is no CUDA GPU"
    elif capability[0] not in (9, 10, 11):
        reason = f"FlashAttention 4 has no block-sparse kernel for sm_{capability[0]}{capability[1]}"
    elif not installed:
        reason = "flash-attn-4 is not installed"
    else:
        return True, None
    return False, f"--fa4_prefill: {reason}, so prefill uses flex_attention's own kernel" if requested else None


def fa4_installed() -> bool:
    """By the distribution's name: FlashAttention 2 ships a `flash_attn.cute` that does not work alone."""
    return any(metadata.distributions(name="flash-attn-4"))


def fa4_takes(spec: AttentionSpec) -> bool:
    """Layers that FA4 can run: heads of at most 128; a window or a soft cap would be a captured number."""
    return spec.head_dim <= 128 and spec.window is None and spec.softcap is None


def _softcap_score_mod(softcap: float | None):
    if softcap is None:
        return None
    return lambda score, b, h, q, kv: softcap * torch.tanh(score / softcap)


class FlexAttention(AttentionBackend):
    """flex_attention over block masks: document-causal for packed prompts, and a page list per row for decode."""

    name = "flex"
    page_size = 64  # a block of its masks

    def __init__(self, decode_options: dict | None = None, prefill_options: dict | None = None, fa4_prefill: bool = False):
        self.decode_options, self.prefill_options, self.fa4_prefill = decode_options, prefill_options, fa4_prefill

    def padded_prefill_length(self, num_tokens: int) -> int:
        blocks = -(-num_tokens // FLEX_Q_BLOCK)
        return FLEX_Q_BLOCK * blocks

    def check(self, cache: PagedKVCache) -> None:
        largest = max(layer[0].numel() for layer in cache.layers)
        if largest > MAX_FLEX_POOL:  # Inductor's decode template does not compile with 64-bit indices (torch 2.11)
            raise ValueError(
                f"a pool of {largest} elements is beyond the 2^31 that flex decode can address: "
                "take less KV memory, or the triton attention backend"
            )

    def plan(self, cache: PagedKVCache, batch: PrefillBatch | DecodeBatch):
        """Block masks by window, built on first use and shared by the layers that have that window."""
        build = document_block_mask if isinstance(batch, PrefillBatch) else paged_block_mask
        return memoize(lambda window: build(cache, batch, window))

    def prefill(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, spec: AttentionSpec, mask_for) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        options = for_head_size(self.prefill_options, spec.head_dim) or default_prefill_options(q_THD)
        if self.fa4_prefill and fa4_takes(spec):
            options = {"BACKEND": "FLASH", **(options or {})}
        o_1HTD = _compiled_flex(dynamic=q.is_cuda)(
            q, k, v,
            score_mod=_softcap_score_mod(spec.softcap),
            block_mask=mask_for(spec.window),
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            kernel_options=options,
        )  # fmt: skip
        return o_1HTD[0].transpose(0, 1)

    def decode(self, q_BHD: Tensor, k_pool_HND: Tensor, v_pool_HND: Tensor, spec: AttentionSpec, mask_for) -> Tensor:
        group = spec.num_heads // spec.num_kv_heads
        padded_group = 1 << (group - 1).bit_length()
        q_BHGD = q_BHD.unflatten(1, (spec.num_kv_heads, group))
        if padded_group != group:
            # The decode kernel takes power-of-two groups only; others would silently get the long-query kernel.
            q_BHGD = F.pad(q_BHGD, (0, 0, 0, padded_group - group))
        block_mask = mask_for(spec.window)
        options = for_head_size(self.decode_options, spec.head_dim)
        options = options or default_decode_options(q_BHD, page_size=block_mask.BLOCK_SIZE[1])
        if q_BHD.is_cuda:
            _watch_decode_lowering()
        o_BH1D = _compiled_flex(dynamic=False)(
            q_BHGD.flatten(1, 2)[:, :, None], k_pool_HND[None], v_pool_HND[None],
            score_mod=_softcap_score_mod(spec.softcap),
            block_mask=block_mask,
            scale=spec.scale,
            enable_gqa=padded_group > 1,
            kernel_options=options,
        )  # fmt: skip
        return o_BH1D[:, :, 0].unflatten(1, (spec.num_kv_heads, padded_group))[:, :, :group].flatten(1, 2)


def for_head_size(options: dict | None, head_dim: int) -> dict | None:
    """Kernel options serve all layers, or come by head size, as {"256": {...}, "512": {...}}; a size left out has its default."""
    if options and all(isinstance(value, dict) for value in options.values()):
        return options.get(str(head_dim))
    return options


def default_decode_options(q_BHD: Tensor, page_size: int) -> dict:
    if not q_BHD.is_cuda:
        return {"PARTITION_SIZE": 1}  # other partition sizes have returned wrong values on CPUs
    key_bytes = q_BHD.shape[-1] * q_BHD.element_size()
    block_n = min(64, 32768 // key_bytes, page_size)  # a tile of K and one of V for each stage, in 227 KiB
    return {"BLOCK_N": block_n, "num_warps": 4, "num_stages": 3 if q_BHD.shape[-1] <= 128 else 2}


def default_prefill_options(q_THD: Tensor) -> dict | None:
    """None is Inductor's choice; above a head size of 256 its three stages of K and V do not fit into shared memory."""
    if not q_THD.is_cuda or q_THD.shape[-1] <= 256:
        return None
    if q_THD.dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}


def paged_block_mask(cache: PagedKVCache, batch: DecodeBatch, window: int | None) -> BlockMask:
    """Block mask `[B, 1, 1, pages]` over physical pages, from tensors only, so it can live in a captured graph.

    Pages that a row sees in whole are listed as full blocks and are not masked; the page it is writing, and the one
    that its window cuts, are partial blocks.
    """
    page_size, pages_BP, positions_B = cache.page_size, batch.page_table_BP, batch.positions_T
    width = pages_BP.shape[1]
    unused = cache.num_pages - width  # the lowering wants as many columns as the pool has pages
    index_P = torch.arange(width, device=pages_BP.device)
    start_B = (positions_B - window + 1).clamp(min=0) if window is not None else torch.zeros_like(positions_B)
    first_B, last_B = start_B // page_size, positions_B // page_size
    first_full_B = (start_B + page_size - 1) // page_size
    full_count_B = ((positions_B + 1) // page_size - first_full_B).clamp(min=0)
    full_BP = pages_BP.gather(1, (first_full_B[:, None] + index_P).clamp(max=width - 1))

    ends_inside_B = (positions_B + 1) % page_size != 0
    starts_inside_B = (start_B % page_size != 0) & ~(ends_inside_B & (first_B == last_B))
    ends_B = torch.stack([torch.where(starts_inside_B, first_B, last_B), last_B], dim=1)
    partial_BP = F.pad(pages_BP.gather(1, ends_B), (0, cache.num_pages - 2))
    partial_count_B = starts_inside_B.int() + ends_inside_B.int()

    logical_page = cache.logical_page

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        key_position = logical_page[kv // page_size] * page_size + kv % page_size
        return (key_position <= positions_B[b]) & (key_position >= start_B[b])

    return BlockMask.from_kv_blocks(
        partial_count_B.int()[:, None, None],
        partial_BP.int()[:, None, None],
        full_count_B.int()[:, None, None],
        F.pad(full_BP, (0, unused)).int()[:, None, None],
        BLOCK_SIZE=(FLEX_Q_BLOCK, page_size),  # the decode kernel's tile of padded queries must divide the first
        mask_mod=seen,
        seq_lengths=(1, cache.num_pages * page_size),
        compute_q_blocks=False,
    )


def document_block_mask(cache: PagedKVCache, batch: PrefillBatch, window: int | None) -> BlockMask:
    """Document-causal block mask `[1, 1, T / 128, T / 128]`, computed from the document bounds on the host.

    create_block_mask is not used: compiled for one prompt length and reused at another it has read out of bounds.
    """
    block, device = FLEX_Q_BLOCK, batch.positions_T.device
    starts_T = batch.document_starts()
    partial, full = document_blocks(starts_T, window, block)
    document_start = to_device(starts_T, device, torch.int32)

    # Reads no tensor by key, and without a window captures no number: FA4 takes neither.
    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_document = (kv <= q) & (kv >= document_start[q])
        return in_document if window is None else in_document & (q - kv < window)

    def listed(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
        counts = blocks.sum(1, dtype=np.int32)
        return (to_device(x, device)[None, None] for x in (counts, order))

    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=block, mask_mod=seen,
        seq_lengths=(len(starts_T), len(starts_T)), compute_q_blocks=False,
    )  # fmt: skip


def document_blocks(starts_T: np.ndarray, window: int | None, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Which key blocks each query block sees in part and in whole: two bool `[T / block, T / block]` arrays.

    `starts_T[t]` is the first row of row t's document; T is a multiple of `block`.
    """
    count = len(starts_T) // block
    key_first = np.arange(count) * block
    key_last, query_first, query_last = key_first + block - 1, key_first[:, None], key_first[:, None] + block - 1
    reach = window if window is not None else len(starts_T)
    first_start, last_start = starts_T[query_first], starts_T[query_last]
    touched = (key_first <= query_last) & (key_last >= np.maximum(first_start, query_first - reach + 1))
    full = (key_last <= query_first) & (key_first >= last_start) & (query_last - key_first < reach)
    return touched & ~full, touched & full


class TritonAttention(FlexAttention):
    """The paged decode kernel of flex_decode_attention; prefill stays with flex."""

    name = "triton"
    page_size = 32
    reads_shared_pages_once = True

    def __init__(self, decode_options: dict | None = None, prefill_options: dict | None = None, fa4_prefill: bool = False):
        super().__init__(decode_options, prefill_options, fa4_prefill)
        known = {option.name for option in fields(flex_decode_attention.DecodeOptions)}
        sizes = [name for name, value in (decode_options or {}).items() if isinstance(value, dict)]
        for options in [decode_options[size] for size in sizes] or [decode_options or {}]:
            if unknown := set(options) - known:
                raise ValueError(f"decode_kernel_options {sorted(unknown)}: the triton backend has {sorted(known)}")
            flex_decode_attention.DecodeOptions(**options)

    def check(self, cache: PagedKVCache) -> None:
        """The kernel's addresses are 64 bits wide."""

    def plan(self, cache: PagedKVCache, batch: PrefillBatch | DecodeBatch):
        if isinstance(batch, PrefillBatch):
            return super().plan(cache, batch)
        pages_BP, lengths_B = batch.page_table_BP, batch.lengths_B

        @memoize
        def work_for(
            window: int | None, num_heads: int, num_kv_heads: int, head_dim: int
        ) -> flex_decode_attention.DecodePlan:
            shared = flex_decode_attention.SharedPages(pages_BP, cache.page_size, num_heads) if batch.shares_pages else None
            given = for_head_size(self.decode_options, head_dim)
            options = flex_decode_attention.DecodeOptions(**given) if given else None
            return flex_decode_attention.decode_attention_plan(
                lengths_B, num_kv_heads, head_dim, cache.dtype, window, options, shared
            )

        return pages_BP, lengths_B, cache.page_size, work_for

    def decode(self, q_BHD: Tensor, k_pool_HND: Tensor, v_pool_HND: Tensor, spec: AttentionSpec, plan) -> Tensor:
        pages_BP, lengths_B, page_size, work_for = plan
        return flex_decode_attention.paged_decode_attention(
            q_BHD, k_pool_HND, v_pool_HND, pages_BP, lengths_B, page_size, spec.scale, spec.window, spec.softcap,
            work_for(spec.window, spec.num_heads, spec.num_kv_heads, spec.head_dim),
        )  # fmt: skip


# Microseconds of one layer's decode attention with its share of the plan or block mask, by rows: Qwen3-4B's shape (32/8 heads
# of 128, bf16), lengths 128 ... 640, on an H200, by kernel_bench.py (triton: middle of 31 ... 37 and of 100 ... 116).
DECODE_MICROSECONDS = {"triton": {64: 34.0, 256: 108.0}, "flex": {64: 41.6, 256: 126.0}}


def measured_choice(batch_size: int) -> tuple[str, str]:
    """The backend that decodes fastest on a GPU at the measured row count nearest to `batch_size`, and why in words."""
    rows = min(DECODE_MICROSECONDS["triton"], key=lambda measured: abs(measured - batch_size))
    figures = {name: by_rows[rows] for name, by_rows in DECODE_MICROSECONDS.items()}
    words = ", ".join(f"{name} {us:g} us" for name, us in figures.items())
    return min(figures, key=figures.get), f"{words} a layer, measured at {rows} rows on an H200"


def make_backend(
    name: str,
    device: torch.device,
    decode_options: dict | None = None,
    prefill_options: dict | None = None,
    fa4_prefill: bool = False,
    batch_size: int = 64,
) -> AttentionBackend:
    """`auto` is the measured choice for decoding `batch_size` rows; the backend then knows the `reason`. On a CPU it is sdpa."""
    on_gpu = torch.device(device).type == "cuda"
    if name == "auto":
        name, reason = measured_choice(batch_size) if on_gpu else ("sdpa", "the quickest on a CPU")
        backend = make_backend(name, device, decode_options, prefill_options, fa4_prefill)
        backend.reason = reason
        return backend
    if name == "sdpa":
        return SdpaAttention()
    if name == "flex":
        return FlexAttention(decode_options, prefill_options, fa4_prefill)
    if name == "triton":
        if not on_gpu:
            raise ValueError("--attention_backend triton needs a CUDA GPU; on a CPU use sdpa or flex")
        return TritonAttention(decode_options, prefill_options, fa4_prefill)
    raise ValueError(f"unknown attention backend {name!r}: auto, flex, triton or sdpa")
