"""Pages, masks and attention backends, each against something that can be read in one look."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import flex_paged_attention
from flex_engine import SamplingParams
from flex_paged_attention import (
    FLEX_Q_BLOCK,
    Attend,
    AttentionSpec,
    DecodeBatch,
    FlexAttention,
    OutOfPages,
    PagedKVCache,
    PageTable,
    PrefillBatch,
    SdpaAttention,
    document_block_mask,
    document_blocks,
    make_backend,
    measured_choice,
    paged_block_mask,
)
from flex_scheduler import Prefix, Scheduler, Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 16
CPU = torch.device("cpu")
SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)


def make_cache(num_pages: int, num_slots: int, max_seq_len: int, spec: AttentionSpec = SPEC) -> PagedKVCache:
    return PagedKVCache([spec], num_pages, PAGE, num_slots, max_seq_len, torch.float32, CPU)


# --------------------------------------------------------------------------------------------------------------- page table


class PageTableMachine(RuleBasedStateMachine):
    """Holders allocate, share and release in any order; the table always agrees with them."""

    def __init__(self):
        super().__init__()
        self.table = PageTable(num_pages=12, page_size=PAGE)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = self.table.num_free
        if count > free:
            with pytest.raises(OutOfPages):
                self.table.allocate(count)
            assert self.table.num_free == free
        else:
            self.holders.append(self.table.allocate(count))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.append(self.table.share(holder[: data.draw(st.integers(0, len(holder)))]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.table.release(self.holders.pop(index))

    @invariant()
    def agrees(self):
        self.table.check(self.holders)
        assert self.table.num_used == len({page for holder in self.holders for page in holder})


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_page_table_refuses_misuse():
    table = PageTable(4, PAGE)
    pages = table.allocate(2)
    table.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        table.release(pages)
    with pytest.raises(AssertionError, match="sharing a free page"):
        table.share(pages)
    with pytest.raises(ValueError, match="page 0 is reserved"):
        PageTable(1, PAGE)
    table.allocate(1)
    with pytest.raises(AssertionError, match="1 counted, 0 held"):
        table.check()


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler under random arrivals and stops, with a host array in place of the KV pool: every running sequence
    must find its own tokens in its pages, whatever was shared, copied, recycled or preempted."""

    NUM_PAGES, NUM_SLOTS, MAX_LEN = 14, 4, 96

    def __init__(self):
        super().__init__()
        self.cache = make_cache(self.NUM_PAGES, self.NUM_SLOTS, self.MAX_LEN)
        self.scheduler = Scheduler(self.cache, self.NUM_SLOTS, [])
        self.pool = np.full(self.NUM_PAGES * PAGE, -1)
        self.next_token = 0
        self.finished: list[Sequence] = []

    def tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @rule(length=st.integers(1, 60), max_tokens=st.integers(1, 36), n=st.integers(1, 5))
    def submit(self, length, max_tokens, n):
        prompt = self.tokens(length)
        prefix = Prefix(prompt, pending=n)
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.waiting.extend(Sequence(0, index, prompt, params, 0, [], max_tokens, prefix) for index in range(n))

    @rule(budget=st.sampled_from([1, 40, 1000]))
    def admit(self, budget):
        while batch := self.scheduler.admit(budget):
            computed = [len(token_ids) for token_ids, _ in batch.prefill]
            assert sum(computed) <= budget or sum(length > 0 for length in computed) == 1
            for token_ids, pages in batch.prefill:
                self.pool[self.cache.token_slots(pages, len(token_ids))] = token_ids
            paged = self.pool.reshape(-1, PAGE)
            paged[batch.copies[1]] = paged[batch.copies[0]]

    @precondition(lambda self: self.scheduler.running)
    @rule(max_steps=st.integers(1, 20), stops=st.sets(st.integers(1, NUM_SLOTS)))
    def decode(self, max_steps, stops):
        """One window; the sequences in the slots `stops` end at its first token."""
        steps = self.scheduler.reserve(max_steps)
        assert 1 <= steps <= max_steps
        for sequence in list(self.scheduler.running):
            count = 1 if sequence.slot in stops else min(steps, sequence.remaining)
            for _ in range(count):
                position = sequence.length - 1
                if position >= len(sequence.prefix.token_ids):
                    page = sequence.pages[position // PAGE]
                    assert self.cache.pages.references[page] == 1, "a shared page is written"
                    self.pool[page * PAGE + position % PAGE] = sequence.last_token
                sequence.token_ids += self.tokens(1)
            if sequence.slot in stops or sequence.remaining == 0:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def preempt(self):
        self.scheduler.preempt(self.scheduler.running[-1])

    @rule()
    def interrupt(self):
        self.scheduler.release_all()
        self.cache.pages.check()
        self.scheduler.waiting.clear()

    @invariant()
    def pages_are_accounted_for(self):
        waiting = {id(sequence.prefix): sequence.prefix for sequence in self.scheduler.waiting}
        held = [prefix.pages for prefix in waiting.values() if prefix.pages is not None]
        self.cache.pages.check([*held, *(sequence.pages for sequence in self.scheduler.running)])
        for prefix in waiting.values():
            assert prefix.pending == sum(sequence.prefix is prefix for sequence in self.scheduler.waiting)

    @invariant()
    def slots_are_accounted_for(self):
        slots = [sequence.slot for sequence in self.scheduler.running] + self.scheduler.free_slots
        assert sorted(slots) == list(range(1, self.NUM_SLOTS + 1))
        assert all(not sequence.pages and sequence.slot is None for sequence in self.finished)

    @invariant()
    def every_sequence_finds_its_tokens(self):
        for sequence in self.scheduler.running:
            stored = (sequence.prompt + sequence.token_ids)[:-1]
            assert self.pool[self.cache.token_slots(sequence.pages, len(stored))].tolist() == stored
            listed = self.cache.host_table[sequence.slot, : len(sequence.pages)].tolist()
            assert listed == sequence.pages
            logical = self.cache.host_logical[torch.tensor(sequence.pages, dtype=torch.long)].tolist()
            assert logical == list(range(len(sequence.pages)))

    def teardown(self):
        """Whatever state was reached, the rest runs to its end."""
        for _ in range(10_000):
            if not self.scheduler.busy:
                break
            self.admit(1000)
            assert self.scheduler.running, "nothing runs and nothing can be admitted"
            self.decode(7, set())
            self.pages_are_accounted_for()
            self.every_sequence_finds_its_tokens()
        assert not self.scheduler.busy
        self.cache.pages.check()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# -------------------------------------------------------------------------------------------------------------------- masks


def causal_oracle(lengths: list[int], window: int | None) -> np.ndarray:
    """Which row sees which, document by document, in plain loops."""
    total = sum(lengths)
    seen = np.zeros((total, total), dtype=bool)
    start = 0
    for length in lengths:
        for q in range(length):
            first = 0 if window is None else max(0, q - window + 1)
            seen[start + q, start + first : start + q + 1] = True
        start += length
    return seen


def dense(block_mask) -> torch.Tensor:
    """What attention under a block mask sees, bool `[B, Q, K]`: full blocks whole, partial blocks as their mask_mod says."""
    (query_block, key_block), (queries, keys) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    lists = [
        (block_mask.kv_num_blocks, block_mask.kv_indices, True),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, False),
    ]
    batch = block_mask.kv_num_blocks.shape[0]
    seen = torch.zeros(batch, queries, keys, dtype=torch.bool)
    zero = torch.tensor(0)
    for counts, indices, masked in lists:
        for b in range(batch):
            for row in range(counts.shape[2]):
                listed = indices[b, 0, row, : counts[b, 0, row]].tolist()
                assert len(set(listed)) == len(listed), "a block is listed twice"
                for column in listed:
                    q = torch.arange(row * query_block, min((row + 1) * query_block, queries))
                    k = torch.arange(column * key_block, min((column + 1) * key_block, keys))
                    block = torch.ones(len(q), len(k), dtype=torch.bool)
                    if masked:
                        block = block_mask.mask_mod(torch.tensor(b), zero, q[:, None], k[None]).expand(len(q), len(k))
                    assert not seen[b][q[:, None], k].any(), "a block is both partial and full"
                    seen[b][q[:, None], k] = block
    return seen


def prefill_batch(lengths: list[int], block: int = FLEX_Q_BLOCK) -> PrefillBatch:
    total = -(-sum(lengths) // block) * block
    zeros = torch.zeros(total, dtype=torch.long)
    return PrefillBatch(zeros, zeros, lengths)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 40)),
    block=st.sampled_from([4, 8, 16]),
)
@settings(max_examples=150, deadline=None)
def test_document_blocks_cover_exactly_what_is_seen(lengths, window, block):
    batch = prefill_batch(lengths, block)
    starts = batch.document_starts()
    partial, full = document_blocks(starts, window, block)
    padding = len(starts) - sum(lengths)
    seen = causal_oracle([*lengths, padding], window)
    blocks = seen.reshape(len(starts) // block, block, len(starts) // block, block)
    assert not (partial & full).any()
    assert ((partial | full) >= blocks.any((1, 3))).all(), "a block with a visible key is skipped"
    assert (full <= blocks.all((1, 3))).all(), "a block that needs its mask is taken whole"


@pytest.mark.parametrize("window", [None, 4, 127, 128, 129])
@pytest.mark.parametrize("lengths", [[16], [100, 1, 155, 200], [127, 1, 128], [129, 127, 31]])
def test_document_block_mask(lengths, window):
    batch = prefill_batch(lengths)
    padding = len(batch.positions_T) - sum(lengths)
    seen = dense(document_block_mask(None, batch, window))[0].numpy()
    assert (seen == causal_oracle([*lengths, padding], window)).all()


def test_each_row_sees_window_many_keys():
    """Length 16, window 4: 1, 2, 3, then 4 keys, never 5."""
    seen = dense(document_block_mask(None, prefill_batch([16]), window=4))[0]
    assert seen.sum(-1)[:16].tolist() == [1, 2, 3] + [4] * 13


def test_prefill_mask_for_16_prompts_then_64():
    """Masks are values of their own batch: nothing of the first stays in the second."""
    for count in (16, 64):
        lengths = [3 + index % 11 for index in range(count)]
        batch = prefill_batch(lengths)
        padding = len(batch.positions_T) - sum(lengths)
        seen = dense(document_block_mask(None, batch, None))[0].numpy()
        assert (seen == causal_oracle([*lengths, padding], None)).all()


@given(
    positions=st.lists(st.integers(0, 95), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 100)),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_paged_block_mask(positions, window, seed):
    """Pages in any order: a row sees keys position - window + 1 .. position of its own pages, and nothing else."""
    cache = make_cache(num_pages=26, num_slots=len(positions) + 1, max_seq_len=96)
    np.random.default_rng(seed).shuffle(cache.pages.free)
    expected = torch.zeros(len(positions) + 1, 1, 26 * PAGE, dtype=torch.bool)
    for slot, position in enumerate(positions, start=1):
        pages = cache.pages.allocate(cache.pages.pages_for(position + 1))
        cache.assign(slot, pages)
        first = 0 if window is None else max(0, position - window + 1)
        expected[slot - 1, 0, cache.token_slots(pages, position + 1)[first:]] = True
    cache.upload()
    expected[-1, 0, 0] = True  # the padded row sees the first token of the padding page
    slots = torch.tensor([*range(1, len(positions) + 1), 0])
    batch = DecodeBatch.of(torch.tensor([*positions, 0]), cache.page_table[slots], cache.page_size)
    assert torch.equal(dense(paged_block_mask(cache, batch, window)), expected)


# ----------------------------------------------------------------------------------------------------------------- backends


def plain_attention(q_THD, k_THD, v_THD, spec: AttentionSpec):
    """One sequence, one head and one row at a time."""
    out = torch.zeros_like(q_THD)
    group = spec.num_heads // spec.num_kv_heads
    for t in range(len(q_THD)):
        first = 0 if spec.window is None else max(0, t - spec.window + 1)
        for head in range(spec.num_heads):
            scores = (k_THD[first : t + 1, head // group] @ q_THD[t, head]) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            out[t, head] = scores.softmax(0) @ v_THD[first : t + 1, head // group]
    return out


def attend_both_ways(backend, spec: AttentionSpec, lengths: list[int]) -> None:
    """Packed prefill of all but each last token, then one decode row each, on shuffled pages; every row against `plain_attention`."""
    generator = torch.Generator().manual_seed(0)
    cache = make_cache(num_pages=40, num_slots=len(lengths), max_seq_len=128, spec=spec)
    np.random.default_rng(0).shuffle(cache.pages.free)
    documents = [
        [torch.randn(length, heads, spec.head_dim, generator=generator) for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)]
        for length in lengths
    ]
    pages = [cache.pages.allocate(cache.pages.pages_for(length)) for length in lengths]
    for slot, own in enumerate(pages, start=1):
        cache.assign(slot, own)
    cache.upload()

    prefix = [length - 1 for length in lengths]
    padding = backend.padded_prefill_length(sum(prefix)) - sum(prefix)
    slots = np.concatenate([*(cache.token_slots(own, count) for own, count in zip(pages, prefix)), np.zeros(padding, np.int64)])
    positions = torch.cat([*(torch.arange(count) for count in prefix), torch.zeros(padding, dtype=torch.long)])
    packed = [torch.cat([*(document[i][:-1] for document in documents)]) for i in range(3)]
    packed = [torch.cat([x, torch.randn(padding, *x.shape[1:], generator=generator)]) for x in packed]
    attend = Attend(cache, PrefillBatch(positions, torch.from_numpy(slots), prefix), backend)
    o_THD = attend.rotated(0, *packed)
    assert torch.isfinite(o_THD).all()
    expected = [plain_attention(*document, spec) for document in documents]
    torch.testing.assert_close(o_THD[: sum(prefix)], torch.cat([e[:-1] for e in expected]), atol=2e-5, rtol=2e-5)

    rows = torch.tensor([*range(1, len(lengths) + 1), 0])  # the last row is padding
    last = [torch.stack([*(document[i][-1] for document in documents), documents[0][i][0]]) for i in range(3)]
    decode = DecodeBatch.of(torch.tensor([*prefix, 0]), cache.page_table[rows], cache.page_size, max_length=max(lengths))
    o_BHD = Attend(cache, decode, backend).rotated(0, *last)
    assert torch.isfinite(o_BHD).all()
    torch.testing.assert_close(o_BHD[:-1], torch.stack([e[-1] for e in expected]), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (9, 3)])
def test_sdpa_backend(heads, softcap, window):
    spec = AttentionSpec(*heads, head_dim=16, scale=0.3, window=window, softcap=softcap)
    attend_both_ways(SdpaAttention(), spec, [1, 2, 16, 17, 40, 70])


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(6, 2, head_dim=16, scale=0.3),  # group of 3
        AttentionSpec(4, 4, head_dim=16, scale=0.3, window=17, softcap=0.8),
    ],
    ids=["group of 3", "window and soft cap"],
)
def test_flex_backend(spec):
    attend_both_ways(FlexAttention(), spec, [2, 17, 40, 70])


def test_backend_choice():
    assert make_backend("auto", CPU).name == "sdpa"
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        make_backend("triton", CPU)
    with pytest.raises(ValueError, match="unknown attention backend 'fa9'"):
        make_backend("fa9", CPU)


def test_layers_that_share_keys_share_pools():
    spec, reader = AttentionSpec(4, 2, 16, 1.0), AttentionSpec(4, 2, 16, 1.0, store_layer=0)
    cache = PagedKVCache([spec, AttentionSpec(4, 1, 32, 1.0), reader, spec], 8, PAGE, 2, 64, torch.float32, CPU)
    assert cache.layers[2] is cache.layers[0]
    addresses = {cache.layers[layer].data_ptr() for layer in (0, 1, 3)}
    assert len(addresses) == 3
    assert PagedKVCache.bytes_per_token(cache.specs, torch.float32) == 4 * (2 * 2 * 16 * 2 + 2 * 1 * 32)


def test_copy_pages_copies_every_layer():
    cache = PagedKVCache([SPEC, SPEC], 8, PAGE, 2, 64, torch.float32, CPU)
    for layer in cache.layers:
        layer.normal_()
    before = [layer.clone() for layer in cache.layers]
    cache.copy_pages([3, 5], [1, 2])
    for layer, old in zip(cache.layers, before):
        new, old = layer.unflatten(2, (8, PAGE)), old.unflatten(2, (8, PAGE))
        assert torch.equal(new[:, :, [1, 2]], old[:, :, [3, 5]])
        assert torch.equal(new[:, :, [0, 3, 4, 5, 6, 7]], old[:, :, [0, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("batch_size", [1, 64, 200, 1000])
def test_auto_on_a_gpu_takes_what_measured_fastest_and_says_why(batch_size):
    name, reason = measured_choice(batch_size)
    assert name == "triton" and "flex" in reason and "H200" in reason
    backend = make_backend("auto", torch.device("cuda"), {"block_n": 32}, batch_size=batch_size)
    assert backend.name == name and backend.reason == reason and backend.decode_options == {"block_n": 32}
    assert not make_backend("triton", torch.device("cuda")).reason  # asked for, not chosen


def test_the_other_backends_decode_options_are_refused_by_name():
    with pytest.raises(ValueError, match="BLOCK_N"):
        make_backend("triton", torch.device("cuda"), {"BLOCK_N": 32})


def test_flex_refuses_a_pool_that_it_cannot_address(monkeypatch):
    cache = PagedKVCache([AttentionSpec(4, 2, 16, 0.25)], 8, 16, 2, 64, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(flex_paged_attention, "MAX_FLEX_POOL", 2 * 8 * 16 * 16)
    make_backend("flex", cache.device).check(cache)
    monkeypatch.setattr(flex_paged_attention, "MAX_FLEX_POOL", 2 * 8 * 16 * 16 - 1)
    with pytest.raises(ValueError, match="4096 elements.*triton"):
        make_backend("flex", cache.device).check(cache)
