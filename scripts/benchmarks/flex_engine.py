"""The rollout engine: requests, decode steps and their CUDA graphs (flex_scheduler.py says who runs).

    engine = FlexEngine(Qwen3Walker(model), tokenizer, EngineConfig(max_batch_size=64, max_seq_len=1024))
    outputs = engine.generate(["What is 2 + 2?"], SamplingParams(max_tokens=64, n=4))

How one `generate` call runs:

    admit ──► prefill ──► decode window ──► look ──► refill: admit ...
              K, V of     `steps_per_look`  tokens, stops,
              the prompt  graph replays     pages given back

* On a GPU the next window is under way before the host looks at the last one, and a refill comes behind it: the GPU waits for neither.
* A prefill only fills the cache: the prompt's last token is the first decode row of each of its completions (which writes no
  keys, for they are there), so sampling lives in one place, a prompt is computed once for its n completions, and they share its
  full pages.
* A decode step runs from token id to next token id on the device. The host looks every few steps; a row that has ended in
  between stands still, rewriting its own last key and value.
* When pages run out the newest sequence goes back to the queue. Its noise depends on (seed, position, token) alone, so it
  goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface

from flex_compile import FREEZE, CompiledForward, compile_mode
from flex_cpu import PackedWeights
from flex_kernels import SlotColumn, advance_rows, gather_rows
from flex_paged_attention import (
    Attend,
    AttentionSpec,
    DecodeBatch,
    PADDING_SLOT,
    PagedKVCache,
    PrefillBatch,
    fa4_installed,
    fa4_prefill_choice,
    ineligible_decodes,
    make_backend,
    to_device,
)
from flex_lora import Adapters
from flex_nf4 import compute_dtype, keep_storage_layout
from flex_sampling import sample
from flex_scheduler import Prefix, Scheduler, Sequence, completion_seed
from flex_weights import SharedWeights, unwrapped

# ------------------------------------------------------------------------------------------------------ requests, results


@dataclass
class SamplingParams:
    """How to sample one prompt's completions; vLLM's names and meanings.

    temperature 0 is greedy. top_k 0, -1 and None, top_p 1 and min_p 0 are off. Filters apply in Hugging Face's order: temperature,
    top_k, top_p over what is left, min_p. `seed` None draws one. A completion's noise depends on (seed, prompt tokens, index of the
    completion among equal prompts of the call), whatever the batch around it. Stop ids and strings end a completion; the
    stopping tokens stay in `token_ids`, a stop string is cut from `text`. `ignore_eos` ignores the model's own ids only.
    Nothing is read from the model's generation_config except its end-of-sequence ids.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.top_k = 0 if self.top_k in (None, -1) else self.top_k
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        checks = {
            "max_tokens": self.max_tokens >= 1,
            "temperature": 0 <= self.temperature < float("inf"),
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "min_p": 0 <= self.min_p <= 1,
            "n": self.n >= 1,
            "stop": all(isinstance(text, str) and text for text in self.stop),
        }
        for name, valid in checks.items():
            if not valid:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")


@dataclass
class CompletionOutput:
    """One completion. `logprobs[i]` is that of `token_ids[i]` in the distribution it was sampled from (temperature and filters
    applied); `full_logprobs[i]` the same without filters, log_softmax(logits / temperature), as a trainer computes it. At
    temperature 0 both are log_softmax(logits)."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[float]
    full_logprobs: list[float]
    finish_reason: str  # "stop" or "length"


@dataclass
class RequestOutput:
    """The completions of prompt `index`, or the reason why it has none."""

    index: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None


class InvalidPromptError(ValueError):
    """Some prompts can't be run; nothing was started. `errors` maps prompt index to reason."""

    def __init__(self, errors: dict[int, str]):
        self.errors = errors
        super().__init__("; ".join(f"prompt {index}: {reason}" for index, reason in errors.items()))


class NonFiniteError(RuntimeError):
    """A row's logits held NaN; the message names the prompt and, where the weights are to blame, the tensors."""


# ------------------------------------------------------------------------------------------------------------- the engine


@dataclass
class EngineConfig:
    """Sizes and switches. Memory of the KV pool: `kv_memory_gb` (10^9 bytes), or by default what `max_batch_size` sequences of
    `max_seq_len` tokens need, but never more than half of the memory that is free."""

    max_batch_size: int = 64
    max_seq_len: int = 1024
    page_size: int | None = None  # tokens; None: what suits the attention backend
    kv_memory_gb: float | None = None
    prefill_token_budget: int = 8192
    capture_cudagraph: bool | None = None  # None: on a GPU
    steps_per_look: int | None = None  # None: 8 on a GPU, 1 on a CPU
    overlap_looks: bool | None = None  # the GPU runs the next steps while the host looks at the last; None: on a GPU
    decode_buckets: list[int] | None = None  # row counts with a graph of their own; None: finely spaced ones
    attention_backend: str = "auto"
    decode_kernel_options: dict | None = None
    prefill_kernel_options: dict | None = None
    fa4_prefill: bool | None = None  # None: where FlashAttention 4 is installed and has kernels for the GPU
    shared_prefix: bool = True  # completions of one prompt read its pages together, where the attention backend can

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "prefill_token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.page_size is not None and (self.page_size < 16 or self.page_size & (self.page_size - 1)):
            raise ValueError(f"page_size must be a power of two of at least 16, not {self.page_size}")
        if self.steps_per_look is not None and self.steps_per_look < 1:
            raise ValueError(f"steps_per_look must be at least 1, not {self.steps_per_look}")
        if self.decode_buckets is not None:
            self.decode_buckets = sorted(set(self.decode_buckets))
            if not self.decode_buckets or self.decode_buckets[0] < 2 or self.decode_buckets[-1] != max(2, self.max_batch_size):
                raise ValueError(f"decode_buckets must be 2 or more each and end with max_batch_size, not {self.decode_buckets}")


@dataclass
class EngineStats:
    """Totals since the last `reset_stats`. Seconds are wall clock, memory in 10^9 bytes."""

    attention_backend: str
    steps_per_look: int
    total_pages: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    preemptions: int = 0
    peak_pages_used: int = 0
    shared_prefix_tokens: int = 0  # keys that a row read together with the row before it, over all steps
    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    capture_seconds_per_bucket: dict[int, float] = field(default_factory=dict)
    graph_memory_gb: float = 0.0
    refresh_seconds: float = 0.0
    fallbacks: list[str] = field(default_factory=list)


class Walker(Protocol):
    """One architecture's forward. `specs` has one entry per attention layer; `model` is the Hugging Face model it walks."""

    model: torch.nn.Module
    specs: list[AttentionSpec]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    def prepare(self, max_seq_len: int) -> None:
        """Called once by the engine, before the first forward."""

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        """Logits `[T, vocab]` of a decode; None of a prefill, which is run for its keys and values alone."""

    def refresh(self) -> bool:
        """Takes over weights that have changed or moved since the last call. True if the forward now reads other addresses, so
        that captured graphs are stale."""

    def session(self) -> contextlib.AbstractContextManager:
        """Whatever must hold of the model while it is walked, undone afterwards."""


def decode_buckets(max_batch_size: int) -> list[int]:
    """Row counts with a graph of their own; from 32 on in steps of at most an eighth, so that little of a batch is padding."""
    buckets, size = [], 2
    while size < max_batch_size:
        buckets.append(size)
        power = 1 << (size.bit_length() - 1)
        size += 2 if size < 8 else max(4, power // 8)
    return [*buckets, max(2, max_batch_size)]


@dataclass
class Window:
    """Decode steps that the GPU was given, between two looks."""

    sequences: list[Sequence]  # by row
    steps: int
    buffer: int  # of the host's two
    shared_tokens: int
    done: torch.cuda.Event | None
    refills: list[tuple[torch.cuda.Event, torch.cuda.Event]]  # where the prefills before it begin and end; none on a CPU


class DecodeState:
    """What a decode step reads and writes on the device, by slot. Slot 0 is padding: it has ended before it begins."""

    STOP_IDS = 8

    def __init__(self, num_slots: int, max_steps: int, device: torch.device):
        rows, pinned = max(2, num_slots), device.type == "cuda"
        self.ints = torch.zeros(num_slots + 1, SlotColumn.FIRST_STOP + self.STOP_IDS, dtype=torch.int64, device=device)
        self.ints[PADDING_SLOT, SlotColumn.ENDED] = 1
        self.floats = torch.ones(num_slots + 1, 3, dtype=torch.float32, device=device)
        self.row_slot = torch.zeros(rows, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.ring_tokens = torch.zeros(max_steps, rows, dtype=torch.int64, device=device)
        self.ring_logprobs = torch.zeros(max_steps, 2, rows, dtype=torch.float32, device=device)
        # Two of each, for a window under way and the one before it.
        self.host_rows = torch.zeros(2, rows, dtype=torch.int64, pin_memory=pinned)
        self.host_tokens = torch.zeros(2, *self.ring_tokens.shape, dtype=torch.int64, pin_memory=pinned)
        self.host_logprobs = torch.zeros(2, *self.ring_logprobs.shape, dtype=torch.float32, pin_memory=pinned)

    def admit(self, sequences: list[Sequence]) -> None:
        ints, floats = [], []
        for sequence in sequences:
            params, position = sequence.params, sequence.length - 1
            stops = sequence.stop_ids + [-1] * (self.STOP_IDS - len(sequence.stop_ids))
            last_position = position + sequence.remaining - 1
            first_own = len(sequence.prefix.token_ids)  # the prefill has written what comes before, some of it into shared pages
            ints.append([sequence.last_token, position, last_position, sequence.seed, params.top_k, 0, first_own, *stops])
            floats.append([params.temperature, params.top_p, params.min_p])
        slots = to_device([sequence.slot for sequence in sequences], self.ints.device)
        self.ints[slots] = to_device(ints, self.ints.device)
        self.floats[slots] = to_device(floats, self.ints.device, torch.float32)


class FlexEngine:
    """Generates with a walker over a paged KV cache. Not thread safe; one engine per model."""

    def __init__(self, walker: Walker, tokenizer=None, config: EngineConfig | None = None):
        self.walker, self.tokenizer, self.config = walker, tokenizer, config or EngineConfig()
        self.device = torch.device(walker.device)
        walker.prepare(self.config.max_seq_len)
        self.fallbacks: list[str] = []
        on_gpu = self.device.type == "cuda"
        capture = self.config.capture_cudagraph
        if capture and not on_gpu:
            self._fall_back("--capture_cudagraph: there is no CUDA GPU, so the decode step runs without a graph")
        self.use_graphs = on_gpu if capture is None else capture and on_gpu
        steps = self.config.steps_per_look or (8 if on_gpu else 1)
        self.overlap_looks = on_gpu if self.config.overlap_looks is None else self.config.overlap_looks
        capability = torch.cuda.get_device_capability(self.device) if on_gpu else None
        fa4_prefill, warning = fa4_prefill_choice(self.config.fa4_prefill, capability, fa4_installed())
        if warning:
            self._fall_back(warning)
        self.backend = make_backend(
            self.config.attention_backend, self.device, self.config.decode_kernel_options,
            self.config.prefill_kernel_options, fa4_prefill, self.config.max_batch_size,
        )  # fmt: skip
        if self.config.page_size is None:
            self.config = replace(self.config, page_size=self.backend.page_size)
        self.shared_prefix = self.config.shared_prefix and self.backend.reads_shared_pages_once
        self.buckets = self.config.decode_buckets or decode_buckets(self.config.max_batch_size)
        self.cache = PagedKVCache(
            walker.specs, self._num_pages(), self.config.page_size, self.config.max_batch_size,
            self.config.max_seq_len, walker.dtype, self.device,
        )  # fmt: skip
        self.backend.check(self.cache)
        self.state = DecodeState(self.config.max_batch_size, steps, self.device)
        self.eos_ids = end_of_sequence_ids(walker.model, tokenizer)
        self.steps_per_look = steps
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by row count, and whether rows share pages
        self.graph_pool = None
        self.packed = PackedWeights()  # on a CPU, while sequences run
        self._refills: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of the next window
        self._scheduler: Scheduler | None = None
        self.reset_stats()

    def _fall_back(self, message: str) -> None:
        warnings.warn(message, stacklevel=3)
        self.fallbacks.append(message)

    def _num_pages(self) -> int:
        config, per_token = self.config, PagedKVCache.bytes_per_token(self.walker.specs, self.walker.dtype)
        page_bytes = per_token * config.page_size
        if config.kv_memory_gb is not None:
            return max(2, int(config.kv_memory_gb * 1e9 / page_bytes))
        wanted = 2 + config.max_batch_size * -(-config.max_seq_len // config.page_size)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return max(2, min(wanted, int(free / 2 / page_bytes)))
        return wanted

    # ------------------------------------------------------------------------------------------------------------ public

    def generate(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        progress: bool = False,
        skip_invalid: bool = False,
    ) -> list[RequestOutput]:
        """Completions of every prompt (text, or token ids), in order.

        `params` is one for all or one per prompt. Equal prompts are computed once. A prompt that can't be run raises
        InvalidPromptError before anything starts; with `skip_invalid` its output carries the `error` and the others run.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} SamplingParams for {len(prompts)} prompts")
        outputs = self._requests(prompts, params, itertools.count())
        errors = {output.index: output.error for output in outputs if output.error}
        if errors and not skip_invalid:
            raise InvalidPromptError(errors)
        for _ in self._stream(iter([(outputs, params)]), progress):
            pass
        return outputs

    def stream(
        self, arrivals: Iterable[tuple[SequenceOf[str | SequenceOf[int]], SequenceOf[SamplingParams]]]
    ) -> Iterator[RequestOutput]:
        """`generate` for requests that come one after the other: gives each as soon as all of its completions have ended.

        `arrivals` gives (prompts, their params), perhaps none, and is asked before each look until it ends; where nothing runs it may
        wait. Requests are numbered through. A prompt that can't be run comes back with its `error`. The engine is busy, and gradients are
        off in this thread, until the stream has ended or is closed. Weights that change meanwhile need `refresh_lora`.
        """
        numbers = itertools.count()
        yield from self._stream((self._requests(prompts, params, numbers), params) for prompts, params in arrivals)

    def refresh_lora(self) -> None:
        """Takes over the trainer's current weights, adapter or full; call it after every optimizer step."""
        started = time.perf_counter()
        self.packed.clear()
        with torch.no_grad():
            if self.walker.refresh():
                self.drop_graphs()
        self._synchronize()
        self._stats.refresh_seconds += time.perf_counter() - started

    def capture(self, progress: bool = False, groups: bool = False) -> None:
        """Captures every bucket's graph now instead of at its first use; with `groups` also those of sequences that share their
        prompt's pages."""
        self.wake_up()
        kinds = [False, True] if groups and self.shared_prefix else [False]
        if self.use_graphs:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False), self.walker.session():
                for bucket in tqdm(self.buckets[::-1], "capturing", disable=None if progress else True):
                    for shares_pages in kinds:
                        self._graph(bucket, shares_pages)

    def drop_graphs(self) -> None:
        """Forgets what was captured; what it is used for is captured anew."""
        self._synchronize()  # an interrupted call may have left steps under way
        self.graphs.clear()
        self.graph_pool = None  # a memory pool whose graphs are all gone takes no new one

    def sleep(self) -> None:
        """Gives the KV pool's memory to whoever needs it next, such as a training step. Graphs stay valid."""
        self._require_idle("sleep")
        self.cache.sleep()

    def wake_up(self) -> None:
        """Takes the KV pool's memory again; `generate` does it by itself."""
        self.cache.wake_up()

    def stats(self) -> EngineStats:
        fallbacks = [*self.fallbacks, *(ineligible_decodes if self.backend.name == "flex" else [])]
        return replace(self._stats, peak_pages_used=self.cache.pages.peak_used, fallbacks=fallbacks)

    def reset_stats(self) -> None:
        """Starts counting anew; what was compiled and captured so far stays counted."""
        kept = {}
        if hasattr(self, "_stats"):
            names = ("compile_seconds", "capture_seconds", "capture_seconds_per_bucket", "graph_memory_gb")
            kept = {name: getattr(self._stats, name) for name in names}
        self._stats = EngineStats(self.backend.name, self.steps_per_look, self.cache.num_pages - 1, **kept)
        self.cache.pages.peak_used = self.cache.pages.num_used

    def _require_idle(self, name: str) -> None:
        if self._scheduler is not None:
            raise RuntimeError(f"{name} was called while the engine is generating")

    # ---------------------------------------------------------------------------------------------------------- requests

    def _encode(self, prompt, params: SamplingParams) -> tuple[list[int], str | None]:
        """Token ids of a prompt, and the reason why it can't be run."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                return [], "text needs a tokenizer, and the engine has none"
            ids = list(self.tokenizer.encode(prompt, add_special_tokens=False) if prompt else [])
        else:
            ids = prompt.tolist() if isinstance(prompt, (Tensor, np.ndarray)) else prompt
            if not isinstance(ids, (list, tuple)) or not all(issubclass(kind, (int, np.integer)) for kind in set(map(type, ids))):
                return [], f"neither text nor a flat list of token ids, but {type(prompt).__name__}"
            ids = list(map(int, ids))
        vocab = self.walker.vocab_size
        limit, pages = self.config.max_seq_len, self.cache.pages
        if not ids:
            return ids, "empty"
        if min(ids) < 0 or max(ids) >= vocab:
            return ids, f"token id {min(ids) if min(ids) < 0 else max(ids)} is outside the vocabulary of {vocab}"
        if len(ids) + params.max_tokens > limit:
            return ids, f"{len(ids)} prompt tokens and max_tokens {params.max_tokens} exceed max_seq_len {limit}"
        # One page more: the prompt's last page exists twice while completions of the same prompt wait.
        needed = pages.pages_for(len(ids) + params.max_tokens) + 1
        if needed > self.cache.num_pages - 1:
            return ids, f"needs {needed} pages of {pages.page_size} tokens, and the pool has {self.cache.num_pages - 1}"
        stops = len(self._stop_ids(params))
        if stops > DecodeState.STOP_IDS:
            return ids, f"{stops} stop token ids; at most {DecodeState.STOP_IDS} are supported"
        if params.stop and self.tokenizer is None:
            return ids, "stop strings need a tokenizer, and the engine has none"
        return ids, None

    def _requests(self, prompts: SequenceOf, params: SequenceOf[SamplingParams], numbers: Iterator[int]) -> list[RequestOutput]:
        requests = []
        for prompt, p in zip(prompts, params, strict=True):
            ids, error = self._encode(prompt, p)
            requests.append(RequestOutput(next(numbers), ids, error=error))
        return requests

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        return sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)})

    def _sequences(self, requests: list[RequestOutput], params: SequenceOf[SamplingParams]) -> list[Sequence]:
        """All completions, those of equal prompts side by side so that they start from one prefix."""
        groups: dict[tuple[int, ...], list[Sequence]] = {}
        for request, p in zip(requests, params):
            if request.error:
                continue
            prompt = request.prompt_token_ids
            group = groups.setdefault(tuple(prompt), [])
            prefix = group[0].prefix if group else Prefix(prompt)
            seed = secrets.randbits(62) if p.seed is None else p.seed
            for index in range(p.n):
                own_seed = completion_seed(seed, prompt, len(group))
                stop_ids = self._stop_ids(p)
                group.append(Sequence(request.index, index, prompt, p, own_seed, stop_ids, p.max_tokens, prefix))
                prefix.pending += 1
        return [sequence for group in groups.values() for sequence in group]

    def _decode_text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True) if self.tokenizer is not None else ""

    # -------------------------------------------------------------------------------------------------------------- loop

    def _stream(
        self, arrivals: Iterator[tuple[list[RequestOutput], SequenceOf[SamplingParams]]], progress: bool = False
    ) -> Iterator[RequestOutput]:
        self._require_idle("generate")
        self._synchronize()  # an interrupted call may have left steps under way
        self.wake_up()
        self.packed.clear()
        self._refills = []
        scheduler = self._scheduler = Scheduler(self.cache, self.config.max_batch_size, [])
        under_way: dict[int, tuple[RequestOutput, int]] = {}  # with the number of its completions
        window: Window | None = None
        bar = tqdm(total=0, desc="generating", unit="seq", disable=None if progress else True)
        started, generated = time.perf_counter(), self._stats.generated_tokens
        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False), self.walker.session():
                arrived = next(arrivals, None)
                while arrived is not None or scheduler.busy:
                    if arrived is not None:
                        requests, params = arrived
                        sequences = self._sequences(requests, params)
                        scheduler.waiting.extend(sequences)
                        self._stats.prompt_tokens += sum(len(sequence.prompt) for sequence in sequences)
                        bar.total += len(sequences)
                        under_way |= {request.index: (request, p.n) for request, p in zip(requests, params)}
                        yield from (request for request in requests if request.error)
                    if scheduler.busy:
                        window, finished = self._advance(scheduler, window)
                        for sequence in finished:
                            bar.update()
                            request, n = under_way[sequence.request]
                            request.outputs.append(self._completion(sequence))
                            if len(request.outputs) == n:
                                del under_way[sequence.request]
                                request.outputs.sort(key=lambda completion: completion.index)
                                yield request
                    if progress:
                        rate = (self._stats.generated_tokens - generated) / (time.perf_counter() - started)
                        bar.set_postfix(
                            {
                                "tok/s": f"{rate:.0f}",
                                "running": len(scheduler.running),
                                "waiting": len(scheduler.waiting),
                                "free pages": self.cache.pages.num_free,
                            },
                            refresh=False,
                        )
                    if not scheduler.busy:
                        if window is not None:  # given before the host knew that all had ended: its steps count, waiting does not
                            self._look(scheduler, window)
                            window = None
                        self.packed.clear()  # whoever is waited for may change the weights
                    arrived = next(arrivals, None)
        finally:
            # An interrupted rollout must leave the pool as it found it.
            scheduler.release_all()
            self.packed.clear()
            self._stats.preemptions += scheduler.preemptions
            self._scheduler = None
            bar.close()
        self.cache.pages.check()

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        text = sequence.text if sequence.text is not None else self._decode_text(sequence.token_ids)
        return CompletionOutput(
            sequence.index, sequence.token_ids, text, sequence.logprobs, sequence.full_logprobs, sequence.finish_reason
        )

    def _refill(self, scheduler: Scheduler) -> None:
        """Admits what fits, prefill batch by prefill batch. Nothing here waits for the GPU: steps under way run on meanwhile, and what
        is written here, into pages and slots that they may still read, comes behind them."""
        started, admitted = time.perf_counter(), []
        while True:
            batch = scheduler.admit(self.config.prefill_token_budget)
            if not batch:
                break
            if not admitted:
                begin = self._record_event()
            self._prefill(batch.prefill)
            self.cache.copy_pages(*batch.copies)
            admitted += batch.sequences
        if admitted:
            self.state.admit(admitted)
            if begin is not None:
                self._refills.append((begin, self._record_event()))
            else:
                seconds = time.perf_counter() - started
                self._stats.prefill_seconds += seconds
                self._decode_clock += seconds

    def _prefill(self, prompts: list[tuple[list[int], list[int]]]) -> None:
        """K and V of every (token ids, pages), in one packed forward."""
        lengths = [len(token_ids) for token_ids, _ in prompts]
        total = sum(lengths)
        if not total:
            return
        padding = self.backend.padded_prefill_length(total) - total

        def row(parts: list[np.ndarray]) -> Tensor:
            return to_device(np.concatenate([*parts, np.zeros(padding, dtype=np.int64)]), self.device)

        tokens_T = row([np.asarray(token_ids, dtype=np.int64) for token_ids, _ in prompts])
        positions_T = row([np.arange(length, dtype=np.int64) for length in lengths])
        slots_T = row([self.cache.token_slots(pages, len(token_ids)) for token_ids, pages in prompts])
        attend = Attend(self.cache, PrefillBatch(positions_T, slots_T, lengths), self.backend)
        with self.packed.in_use():
            self.walker.forward(tokens_T, positions_T, attend)
        self._stats.prefill_tokens += total

    def _advance(self, scheduler: Scheduler, window: Window | None) -> tuple[Window | None, list[Sequence]]:
        """Gives the GPU its next window, and looks at `window`, the one before. Returns the new one, and the sequences that ended.

        Free places are refilled behind `window`, while it runs. Where the look decides what comes next (whose pages are taken away,
        whether anyone still runs) it comes first.
        """
        finished: list[Sequence] = []
        if window is None:
            self._decode_clock = time.perf_counter()
        self._refill(scheduler)
        if window is not None and scheduler.needs_look(self.steps_per_look):
            finished, window = self._look(scheduler, window), None
            self._refill(scheduler)
        following = self._launch(scheduler, window) if scheduler.running else None
        if window is not None:
            finished += self._look(scheduler, window)
        if following is not None and not self.overlap_looks:
            finished, following = finished + self._look(scheduler, following), None
        return following, finished

    def _launch(self, scheduler: Scheduler, before: Window | None) -> Window:
        """Several decode steps of every running sequence, behind those of the window `before`. Nothing here waits for the GPU, unless a
        graph has yet to be captured."""
        steps = scheduler.reserve(self.steps_per_look)
        running, state = list(scheduler.running), self.state
        bucket = next(size for size in self.buckets if size >= len(running))
        shared_tokens = scheduler.shared_tokens() if self.shared_prefix else 0
        graph = self._graph(bucket, shared_tokens > 0) if self.use_graphs else None
        self.cache.upload()
        buffer = 0 if before is None else 1 - before.buffer
        slots = [sequence.slot for sequence in running] + [PADDING_SLOT] * (bucket - len(running))
        state.host_rows[buffer, :bucket] = torch.tensor(slots)
        state.row_slot[:bucket].copy_(state.host_rows[buffer, :bucket], non_blocking=True)
        state.step.zero_()
        longest = max(sequence.length + sequence.ahead for sequence in running)
        for step in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self._decode_step(bucket, shared_tokens > 0, max_length=min(longest + step, self.config.max_seq_len))
        for host, ring in ((state.host_tokens, state.ring_tokens), (state.host_logprobs, state.ring_logprobs)):
            host[buffer, :steps].copy_(ring[:steps], non_blocking=True)
        for sequence in running:
            sequence.ahead += steps
        refills, self._refills = self._refills, []
        return Window(running, steps, buffer, shared_tokens, self._record_event(), refills)

    def _decode_step(self, bucket: int, shares_pages: bool = False, max_length: int | None = None) -> None:
        """One token for each row; the body of a captured graph, so no tensor may leave the device."""
        state = self.state
        slots_B = state.row_slot[:bucket]
        rows = gather_rows(slots_B, state.ints, state.floats, self.cache.page_table, self.config.page_size)
        batch = DecodeBatch(
            rows.positions_B, rows.token_slots_B, rows.lengths_B, rows.page_table_BP, max_length, shares_pages
        )
        with self.packed.in_use():
            logits_BV = self.walker.forward(rows.tokens_B, rows.positions_B, Attend(self.cache, batch, self.backend))
        sampled = sample(
            logits_BV, rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B, rows.seeds_B, rows.positions_B
        )
        advance_rows(slots_B, state.ints, state.step, state.ring_tokens, state.ring_logprobs, *sampled)

    def _graph(self, bucket: int, shares_pages: bool = False) -> torch.cuda.CUDAGraph:
        """The captured decode step of `bucket` rows. Warm-up and capture run on the padding slot alone."""
        if (bucket, shares_pages) in self.graphs:
            return self.graphs[bucket, shares_pages]
        started = time.perf_counter()
        rows = self.state.row_slot.clone()
        self.state.row_slot.zero_()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.state.step.zero_()
                self._decode_step(bucket, shares_pages)
        self._synchronize()
        compiled = time.perf_counter()
        torch.cuda.empty_cache()  # capturing does so too: what it adds afterwards is the graph's
        reserved = torch.cuda.memory_reserved(self.device)
        self.state.step.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool, stream=stream):
            self._decode_step(bucket, shares_pages)
        self.graph_pool = self.graph_pool or graph.pool()
        self.state.row_slot.copy_(rows)
        self._synchronize()
        done = time.perf_counter()
        for reason in set(ineligible_decodes) if self.backend.name == "flex" else ():
            warnings.warn(reason, stacklevel=2)
        self._stats.compile_seconds += compiled - started
        self._stats.capture_seconds += done - compiled
        per_bucket = self._stats.capture_seconds_per_bucket
        per_bucket[bucket] = per_bucket.get(bucket, 0.0) + done - started
        self._stats.graph_memory_gb += (torch.cuda.memory_reserved(self.device) - reserved) / 1e9
        self.graphs[bucket, shares_pages] = graph
        return graph

    def _look(self, scheduler: Scheduler, window: Window) -> list[Sequence]:
        """Waits for the window, hands its tokens to their sequences and ends those that are done."""
        if window.done is not None:
            window.done.synchronize()
        now = time.perf_counter()
        prefill_seconds = sum(begin.elapsed_time(end) for begin, end in window.refills) / 1e3
        self._stats.prefill_seconds += prefill_seconds
        self._stats.decode_seconds += now - self._decode_clock - prefill_seconds
        self._decode_clock = now
        self._stats.decode_steps += window.steps
        self._stats.shared_prefix_tokens += window.shared_tokens * window.steps
        rows = len(window.sequences)
        tokens_BS = self.state.host_tokens[window.buffer, : window.steps, :rows].T.numpy()
        counts = (tokens_BS != SlotColumn.NO_TOKEN).sum(1).tolist()
        new_tokens, is_nan = tokens_BS.tolist(), (tokens_BS == -1).any(1).tolist()
        logprobs, full_logprobs = self.state.host_logprobs[window.buffer, : window.steps, :, :rows].permute(1, 2, 0).tolist()
        finished = []
        for row, (sequence, count) in enumerate(zip(window.sequences, counts)):
            sequence.ahead -= window.steps
            if sequence.finish_reason is not None:
                continue  # it had ended in the window before
            if is_nan[row]:
                self.cache.clear()  # a masked key has weight 0, and 0 * NaN would reach the pages' next owners
                raise NonFiniteError(self._explain_nan(sequence))
            sequence.token_ids += new_tokens[row][:count]
            sequence.logprobs += logprobs[row][:count]
            sequence.full_logprobs += full_logprobs[row][:count]
            if sequence.params.stop:
                count -= self._cut_at_stop_string(sequence, count)
            self._stats.generated_tokens += count
            if sequence.finish_reason is None:
                if sequence.token_ids[-1] in sequence.stop_ids:
                    sequence.finish_reason = "stop"
                elif sequence.remaining == 0:
                    sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                scheduler.finish(sequence)
                finished.append(sequence)
        return finished

    def _cut_at_stop_string(self, sequence: Sequence, new_tokens: int) -> int:
        """Ends the sequence at the first token that completes a stop string; text goes without it, tokens with it. Returns the
        number of tokens that were generated beyond."""
        stops = sequence.params.stop
        text = self._decode_text(sequence.token_ids)
        if not any(stop in text for stop in stops):
            return 0
        total = len(sequence.token_ids)
        for count in range(total - new_tokens + 1, total + 1):
            text = self._decode_text(sequence.token_ids[:count])
            found = [text.find(stop) for stop in stops if stop in text]
            if found:
                del sequence.token_ids[count:], sequence.logprobs[count:], sequence.full_logprobs[count:]
                sequence.text, sequence.finish_reason = text[: min(found)], "stop"
                return total - count
        return 0

    def _explain_nan(self, sequence: Sequence) -> str:
        model = self.walker.model
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())  # 4-bit experts' scales are buffers
        named = [name for name, tensor in tensors if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
        cause = f"non-finite weights: {', '.join(named[:5])}" if named else "all weights are finite"
        return f"prompt {sequence.request}: logits are NaN after {len(sequence.token_ids)} tokens; {cause}"

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _record_event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))


# ---------------------------------------------------------------------------------------------------------------- walkers


def refuse_length_dependent_rope(model: torch.nn.Module) -> None:
    """Raises ValueError for rope types whose frequencies change with the sequence's length: one forward holds many lengths."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise ValueError(f"rope_type {kind!r} is not supported: its frequencies depend on each sequence's length")


class WrittenWalker:
    """Base of the walkers that architecture scripts write: weights at fixed addresses, and the rope table.

    A subclass names its `model_types`, fills `specs` and `layers` in `build`, and writes `forward`. `model` may be wrapped by PEFT.
    `dtype` is what the engine computes in; parameters of another dtype (fp32 masters) are copied at each refresh. `lora_mode`:
    "merged" or "active" (flex_lora). `compile_walker`: one of flex_compile.COMPILE_MODES, or True; None asks the environment variable
    UNSLOTH_FLEX_COMPILE_WALKER. `compile_opts`: one of flex_compile.COMPILE_OPTS.
    """

    model_types: tuple[str, ...] = ()
    # The rope types whose frequencies do not depend on the sequence's length, so that one table serves all.
    rope_types = ("default", "linear", "llama3", "yarn", "proportional")

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype | None = None, lora_mode: str | None = None,
        compile_walker: bool | str | None = None, compile_opts: str = "stock",
    ):  # fmt: skip
        base = unwrapped(model)
        if base.config.model_type not in self.model_types:
            raise ValueError(
                f"{type(self).__name__} walks {', '.join(self.model_types)}, not {base.config.model_type}; use --walker hf"
            )
        embedding = base.get_input_embeddings().weight
        self.model, self.config = model, base.config.get_text_config()
        self.dtype, self.device = dtype or compute_dtype(model) or embedding.dtype, embedding.device
        keep_storage_layout(model)
        self.base, self.decoder, self.lora_mode = base, base.get_decoder(), lora_mode
        self._build()
        self.compile_mode = compile_mode(compile_walker)
        self.compile_opts = compile_opts
        if self.compile_mode != "off":
            self.forward = CompiledForward(self, self.compile_mode, compile_opts)

    def _build(self) -> None:
        self.is_built = False
        self.vocab_size = self.base.get_input_embeddings().weight.shape[0]
        self.specs: list[AttentionSpec] = []
        self.layers: list = []
        self.weights = SharedWeights(self.model, self.dtype, self.device)
        self.adapters = Adapters(self.model, self.weights, self.lora_mode)
        with torch.no_grad():
            self.build(self.decoder, self.base.get_output_embeddings())
            self.adapters.check()
            self.adapters.refresh()
        self.is_built = True

    def build(self, decoder: torch.nn.Module, lm_head: torch.nn.Module) -> None:
        raise NotImplementedError

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        raise NotImplementedError

    def projection(self, *linears: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        """One product for linears that read the same input: `[T, K] -> [T, N]`, with whatever LoRA they carry."""
        return self.adapters.projection(linears)

    def embedding(self, module: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        """`[T] -> [T, C]`."""
        return self.adapters.embedding(module)

    def prepare(self, max_seq_len: int) -> None:
        self.rope = self.rope_table(self.decoder.rotary_emb, max_seq_len)

    def rope_table(self, rotary: torch.nn.Module, max_seq_len: int, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin `[max_seq_len, rotary_dim]` in fp32, by the model's own rotary module, which may tell types of layers apart."""
        refuse_length_dependent_rope(rotary)
        rope_type = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
        if rope_type not in self.rope_types:
            raise ValueError(f"rope_type {rope_type!r} is not supported by {type(self).__name__}; use --walker hf")
        positions = torch.arange(max_seq_len, device=self.device)[None]
        of_type = () if layer_type is None else (layer_type,)
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=self.device), positions, *of_type)
        return cos[0].contiguous(), sin[0].contiguous()

    def refresh(self) -> bool:
        """Takes over the trainer's state; builds anew where PEFT has wrapped, unwrapped or switched something since."""
        if self.compile_mode != "off" and self.compile_opts == FREEZE:
            raise ValueError(f"compile_opts {FREEZE} bakes the weights in, so no refresh reaches them; use stock or unsloth_O3")
        if not self.is_built or self.adapters.changed():
            self._build()
            return True
        self.weights.refresh()
        self.adapters.refresh()
        return False

    def session(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


HF_ATTENTION = "flex_paged"


def _paged_attention_forward(module, query, key, value, attention_mask, scaling=None, attend=None, **options):
    """The registered attention function: `[1, heads, T, D]` in, `[1, T, heads, D]` out. `attend` comes through the model's kwargs."""
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} attends to later tokens too, which a rollout can't")
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    options["scaling"] = module.head_dim**-0.5 if scaling is None else scaling
    return attend(module.layer_idx, q_THD, k_THD, v_THD, **options)[None], None


AttentionInterface.register(HF_ATTENTION, _paged_attention_forward)
AttentionMaskInterface.register(HF_ATTENTION, lambda *args, **kwargs: None)


class HFWalker:
    """Any Hugging Face decoder through its own forward, its attention replaced by `attend`.

    Correct for every architecture that calls its attention through AttentionInterface, and the reference of the written walkers. What
    the layers are (heads, scale, window, soft cap) is seen in one probing forward. A `dtype` other than the parameters' is autocast's.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None = None):
        refuse_length_dependent_rope(model)
        self.model = model
        parameter, embedding = next(model.parameters()), model.get_input_embeddings().weight
        self.device, self.dtype = parameter.device, dtype or embedding.dtype
        self.is_autocast = self.dtype != embedding.dtype
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self.specs = self._probe()

    def _probe(self) -> list[AttentionSpec]:
        specs: dict[int, AttentionSpec] = {}
        keys: dict[int, int] = {}

        def record(layer, q_THD, k_THD, v_THD, scaling, sliding_window=None, softcap=None, **_):
            store_layer = keys.setdefault(k_THD.data_ptr(), layer)
            specs[layer] = AttentionSpec(
                q_THD.shape[1], k_THD.shape[1], q_THD.shape[2], scaling, sliding_window, softcap,
                store_layer=store_layer if store_layer != layer else None,
            )  # fmt: skip
            kept.append(k_THD)  # so that no later layer's keys get the same address
            return torch.zeros_like(q_THD)

        kept: list[Tensor] = []
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.no_grad(), self.session():
            self._call(token, token, record)
        if not specs:
            raise ValueError(
                f"{type(self.model).__name__} does not call its attention through transformers' AttentionInterface; "
                "it needs a written walker"
            )
        return [specs[layer] for layer in sorted(specs)]

    def _call(self, tokens_T: Tensor, positions_T: Tensor, attend, keep: Tensor | None = None) -> Tensor:
        keep = torch.zeros(1, dtype=torch.long, device=self.device) if keep is None else keep
        return self.model(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, logits_to_keep=keep, attend=attend
        ).logits[0]

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor | None:
        def attend_rotated(layer, q_THD, k_THD, v_THD, **_):
            # Under autocast q and k leave the rotation in fp32.
            return attend.rotated(layer, q_THD.to(self.dtype), k_THD.to(self.dtype), v_THD.to(self.dtype))

        if attend.prefill:
            self._call(tokens_T, positions_T, attend_rotated)
            return None
        return self._call(tokens_T, positions_T, attend_rotated, torch.arange(len(tokens_T), device=self.device))

    def prepare(self, max_seq_len: int) -> None:
        """Nothing to do: the model computes its own positions."""

    def refresh(self) -> bool:
        """Nothing to do: the model's own parameters are read at every step."""
        return False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Evaluation mode and the registered attention; every module and config is put back as it was."""
        training = [module for module in self.model.modules() if module.training]
        configs = {id(c): c for m in self.model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
        before = [(config, config._attn_implementation) for config in configs.values()]
        try:
            self.model.eval()
            for config, _ in before:
                config._attn_implementation = HF_ATTENTION
            with torch.autocast(self.device.type, self.dtype) if self.is_autocast else contextlib.nullcontext():
                yield
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation
            for module in training:
                module.training = True


def end_of_sequence_ids(model: torch.nn.Module, tokenizer=None) -> list[int]:
    """Every id that ends a sequence: of the generation config, the model config and the tokenizer together."""
    sources = [getattr(model, "generation_config", None), tokenizer]
    if hasattr(model, "config"):
        sources += [model.config, model.config.get_text_config()]
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return sorted(ids)
