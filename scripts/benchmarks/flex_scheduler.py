"""Who waits, who runs, and in which slots and pages.

A sequence is one completion. Completions of a prompt start from one prefix, whose full pages they share:

    waiting ──► admit: slot, pages ──► reserve: pages for the next steps ──► finish: slot and pages are free
       ▲                                           │ too few pages
       └──────────── preempt: the newest ◄─────────┘
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flex_decode_attention import MIN_SHARED_KEYS
from flex_paged_attention import OutOfPages, PagedKVCache

if TYPE_CHECKING:
    from flex_engine import SamplingParams


@dataclass
class Prefix:
    """Tokens whose K and V several sequences start from. `pending` counts the sequences not yet admitted; while there are
    any, the prefix holds a reference on its own pages."""

    token_ids: list[int]
    pending: int = 0
    pages: list[int] | None = None


@dataclass(eq=False)
class Sequence:
    """One completion under way. Its next decode row is its last token."""

    request: int
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    max_tokens: int
    prefix: Prefix
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    ahead: int = 0  # decode steps under way, which the host has not looked at
    finish_reason: str | None = None
    text: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.token_ids)

    @property
    def max_length(self) -> int:
        """Tokens whose keys and values it may come to need: all but the last."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]


def completion_seed(seed: int, prompt: SequenceOf[int], index: int) -> int:
    """A 63-bit seed of its own for each completion, the same in any batch."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8)
    digest.update(f"{seed}/{index}".encode())
    return int.from_bytes(digest.digest(), "little") >> 1


@dataclass
class AdmittedBatch:
    """Sequences that got slots together, the prefixes to compute (token ids, pages), and pages to copy (from, to)."""

    sequences: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[list[int], list[int]]] = field(default_factory=list)
    copies: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def __bool__(self) -> bool:
        return bool(self.sequences)


class Scheduler:
    """Who waits, who runs, and in which slots and pages. First come, first served; the newest is preempted.

    `running` is in the order of admission, so the completions of a prompt stand side by side, however many have ended.
    """

    def __init__(self, cache: PagedKVCache, num_slots: int, sequences: list[Sequence]):
        self.cache, self.pages = cache, cache.pages
        self.waiting = deque(sequences)
        self.running: list[Sequence] = []
        self.free_slots = list(range(num_slots, 0, -1))
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self, token_budget: int) -> AdmittedBatch:
        """Gives slots and pages to as many waiting sequences as fit, up to `token_budget` prompt tokens to compute (a longer
        prompt goes alone)."""
        batch, tokens = AdmittedBatch(), 0
        growing = sum(map(self._will_grow, self.running))
        while self.waiting and self.free_slots:
            sequence = self.waiting[0]
            prefix = sequence.prefix
            new_prefix = prefix.pages is None
            if new_prefix and tokens and tokens + len(prefix.token_ids) > token_budget:
                break
            if not self._can_admit(prefix, growing):
                break
            if new_prefix:
                prefix.pages = self.pages.allocate(self.pages.pages_for(len(prefix.token_ids)))
                batch.prefill.append((prefix.token_ids, prefix.pages))
                tokens += len(prefix.token_ids)
            self.waiting.popleft()
            self._take_pages(sequence, batch.copies)
            sequence.slot = self.free_slots.pop()
            self.cache.assign(sequence.slot, sequence.pages)
            self.running.append(sequence)
            growing += self._will_grow(sequence)
            batch.sequences.append(sequence)
        return batch

    def _will_grow(self, sequence: Sequence) -> bool:
        return len(sequence.pages) < self.pages.pages_for(sequence.max_length)

    def _can_admit(self, prefix: Prefix, growing: int) -> bool:
        """Whether the pages suffice, and leave one for each running sequence that will grow: else one is preempted at once."""
        needed = 1 if prefix.pages is not None else 1 + self.pages.pages_for(len(prefix.token_ids))
        if needed + growing <= self.pages.num_free:
            return True
        if self.running:
            return False
        for sequence in self.waiting:
            # Nothing runs, so the pages lie with prefixes whose other completions wait behind this one.
            if sequence.prefix is not prefix:
                self._drop(sequence.prefix)
        return needed <= self.pages.num_free

    def _take_pages(self, sequence: Sequence, copies: tuple[list[int], list[int]]) -> None:
        """Pages for the prefix's tokens: its own when no other sequence waits for it, else shared, the last part copied."""
        prefix = sequence.prefix
        prefix.pending -= 1
        if prefix.pending == 0:
            sequence.pages, prefix.pages = prefix.pages, None
            return
        full, rest = divmod(len(prefix.token_ids), self.pages.page_size)
        sequence.pages = self.pages.share(prefix.pages[:full])
        if rest:
            own = self.pages.allocate(1)
            copies[0].append(prefix.pages[full])
            copies[1].extend(own)
            sequence.pages += own

    def needs_look(self, max_steps: int) -> bool:
        """Whether what the steps under way gave must be known before more are given: all may have ended, or the pages do not suffice
        for `max_steps` more."""
        if all(sequence.remaining <= sequence.ahead for sequence in self.running):
            return True
        return sum(self._missing_pages(sequence, max_steps) for sequence in self.running) > self.pages.num_free

    def _missing_pages(self, sequence: Sequence, steps: int) -> int:
        """For the steps under way and `steps` more."""
        positions = min(sequence.length + sequence.ahead + steps - 1, sequence.max_length)
        return max(0, self.pages.pages_for(positions) - len(sequence.pages))

    def reserve(self, max_steps: int) -> int:
        """Pages for the coming steps of every running sequence, preempting from the newest if there are too few. Returns the number of
        steps: while others wait, no more than until a sixteenth of the rows must have ended, so that refills come in batches and few
        rows stand still for long."""
        remaining = sorted(sequence.remaining - sequence.ahead for sequence in self.running)
        remaining = [steps for steps in remaining if steps > 0] or [1]
        steps = min(max_steps, remaining[len(remaining) // 16] if self.waiting else remaining[-1])
        for sequence in list(self.running):
            if sequence.slot is None:
                continue
            while missing := self._missing_pages(sequence, steps):
                try:
                    new = self.pages.allocate(missing)
                except OutOfPages:
                    assert not any(other.ahead for other in self.running), "pages are taken from nobody whose steps are under way"
                    self._make_room(sequence)
                    if sequence.slot is None:
                        break
                else:
                    self.cache.assign(sequence.slot, new, start=len(sequence.pages))
                    sequence.pages += new
        return steps

    def shared_tokens(self) -> int:
        """Keys that running sequences hold in the same pages as the sequence before them; 0 where reading these together would
        not pay, because the kernel that does is a little slower for all other keys."""
        total = 0
        for before, sequence in itertools.pairwise(self.running):
            full = len(sequence.prefix.token_ids) // self.pages.page_size
            # A prefix that was dropped and computed anew lies in other pages.
            if full and sequence.prefix is before.prefix and sequence.pages[0] == before.pages[0]:
                keys = full * self.pages.page_size
                total += keys if keys >= MIN_SHARED_KEYS else 0
        return total if total * 16 >= sum(sequence.length for sequence in self.running) else 0

    def _make_room(self, sequence: Sequence) -> None:
        idle = {id(other.prefix): other.prefix for other in self.waiting if other.prefix.pages is not None}
        if idle:
            for prefix in idle.values():
                self._drop(prefix)
            return
        assert self.running[0] is not sequence or len(self.running) > 1, "a request was admitted that can never fit"
        self.preempt(self.running[-1])

    def _drop(self, prefix: Prefix) -> None:
        if prefix.pages is not None:
            self.pages.release(prefix.pages)
            prefix.pages = None

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; what it has generated becomes part of its prefix."""
        self._vacate(sequence)
        sequence.prefix = Prefix(sequence.prompt + sequence.token_ids, pending=1)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self.free_slots.append(sequence.slot)
        sequence.pages, sequence.slot = [], None

    def release_all(self) -> None:
        for sequence in list(self.running):
            self._vacate(sequence)
        for sequence in self.waiting:
            self._drop(sequence.prefix)
