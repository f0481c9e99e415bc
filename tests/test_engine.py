"""The engine against plain Hugging Face in fp32: tokens, log-probabilities, stops, seeds, and what must hold when things go wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import tiny_models
from flex_kernels import SlotColumn, advance_rows
from flex_engine import (
    DecodeState,
    EngineConfig,
    FlexEngine,
    HFWalker,
    InvalidPromptError,
    NonFiniteError,
    PagedKVCache,
    SamplingParams,
    completion_seed,
    decode_buckets,
)
from late_device import LateDevice
from numerics import hf_greedy, hf_logits, shuffle_free_pages
from qwen3_flex_inference import Qwen3Walker
from tiny_models import VOCAB, SpellingTokenizer, random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 16
NEW = 40
SEED = 1  # of a model that answers every prompt below with at least 16 distinct tokens
LENGTHS = [1, 2, 17, 40, 64, 70]  # with 40 new tokens up to 7 pages


def make_engine(model, walker=Qwen3Walker, num_pages: int | None = None, tokenizer=None, **config) -> FlexEngine:
    config = {"max_batch_size": 8, "max_seq_len": 160, "page_size": PAGE, **config}
    walker = walker(model)
    if num_pages is not None:
        page_bytes = PAGE * PagedKVCache.bytes_per_token(walker.specs, walker.dtype)
        config["kv_memory_gb"] = (num_pages + 0.5) * page_bytes / 1e9
    return FlexEngine(walker, tokenizer, EngineConfig(**config))


def greedy(max_tokens: int = NEW, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def tokens_of(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def reference():
    """Never walked, so its weights are nobody else's."""
    return tiny_models.qwen3(seed=SEED)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(reference, prompts) -> list[list[int]]:
    """Hugging Face's greedy tokens, varied enough that agreeing with them means something."""
    tokens = [hf_greedy(reference, prompt, NEW) for prompt in prompts]
    assert all(len(set(completion)) >= 16 for completion in tokens)
    return tokens


@pytest.fixture
def model(reference):
    return tiny_models.unshared(reference)


# ------------------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("steps_per_look, overlap_looks", [(1, False), (7, False), (1, True), (5, True)])
@pytest.mark.parametrize("walker", [Qwen3Walker, HFWalker])
def test_greedy_tokens_equal_hugging_face(model, prompts, expected, walker, steps_per_look, overlap_looks):
    """Six mixed lengths in a bucket of 6 and one more in a padded bucket of 2, over up to 7 shuffled pages each."""
    engine = make_engine(model, walker, steps_per_look=steps_per_look, overlap_looks=overlap_looks)
    shuffle_free_pages(engine)
    assert tokens_of(engine.generate(prompts, greedy())) == expected
    assert tokens_of(engine.generate(prompts[3:4], greedy())) == expected[3:4]
    assert tokens_of(engine.generate(prompts[:5], greedy())) == expected[:5]
    assert engine.stats().preemptions == 0


def test_flex_backend_through_the_engine(model, prompts, expected):
    engine = make_engine(model, max_batch_size=2, attention_backend="flex")
    shuffle_free_pages(engine)
    assert tokens_of(engine.generate(prompts[2:4], greedy())) == expected[2:4]


def test_a_corrupted_page_index_shows(model, prompts, expected, monkeypatch):
    """The comparison above would notice one wrong entry of one page list."""
    engine = make_engine(model)
    upload = engine.cache.upload

    def corrupt():
        upload()
        slot = next(s.slot for s in engine._scheduler.running if len(s.prompt) == 70)
        engine.cache.page_table[slot, 1] = engine.cache.page_table[slot - 1, 1]

    monkeypatch.setattr(engine.cache, "upload", corrupt)
    tokens = tokens_of(engine.generate(prompts, greedy()))
    assert tokens[:5] == expected[:5]
    assert tokens[5] != expected[5]


def test_fewer_slots_than_prompts(model, prompts, expected):
    engine = make_engine(model, max_batch_size=2, steps_per_look=5)
    mixed = [3, 40, 7, 31, 12, 25]
    outputs = engine.generate(prompts, [greedy(count) for count in mixed])
    assert tokens_of(outputs) == [tokens[:count] for tokens, count in zip(expected, mixed)]
    assert [output.index for output in outputs] == list(range(6))


@pytest.mark.parametrize("budget", [1, 64, 8192])
def test_prefill_budget(model, prompts, expected, budget, monkeypatch):
    """Prompts are packed up to the budget; a longer one goes alone."""
    engine = make_engine(model, prefill_token_budget=budget)
    packed = []
    prefill = engine._prefill
    monkeypatch.setattr(engine, "_prefill", lambda batch: (packed.append([len(ids) for ids, _ in batch]), prefill(batch)))
    assert tokens_of(engine.generate(prompts, greedy())) == expected
    assert all(sum(lengths) <= budget or sum(length > 0 for length in lengths) == 1 for lengths in packed)
    assert len(packed) == {1: 6, 64: 3, 8192: 1}[budget]


def test_completions_share_prompt_pages(model, prompts, expected):
    """n completions of one prompt: it is computed once, and its full pages exist once."""
    engine = make_engine(model)
    outputs = engine.generate([prompts[5]], greedy(n=5))
    assert tokens_of(outputs) == [expected[5]] * 5
    stats = engine.stats()
    assert stats.prefill_tokens == len(prompts[5])
    full, per_completion = 70 // PAGE, engine.cache.pages.pages_for(70 + NEW - 1) - 70 // PAGE
    assert stats.peak_pages_used == full + 5 * per_completion


def test_equal_prompts_are_computed_once(model, prompts, expected):
    engine = make_engine(model)
    order = [4, 5, 4, 4, 5]
    outputs = engine.generate([prompts[index] for index in order], greedy())
    assert tokens_of(outputs) == [expected[index] for index in order]
    assert engine.stats().prefill_tokens == 64 + 70
    assert engine.stats().prompt_tokens == 3 * 64 + 2 * 70


@pytest.mark.parametrize("steps_per_look, overlap_looks", [(1, False), (7, False), (1, True), (5, True)])
def test_preemption_changes_nothing(model, prompts, expected, steps_per_look, overlap_looks):
    """A pool that holds little more than the longest sequence."""
    engine = make_engine(model, num_pages=10, steps_per_look=steps_per_look, overlap_looks=overlap_looks)
    shuffle_free_pages(engine)
    assert tokens_of(engine.generate(prompts, greedy())) == expected
    outputs = engine.generate([prompts[5], prompts[4]], greedy(n=3))
    assert tokens_of(outputs) == [expected[5]] * 3 + [expected[4]] * 3
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.peak_pages_used <= 9
    assert stats.generated_tokens == 12 * NEW


def test_places_are_refilled_while_steps_run(model, prompts, expected):
    """Behind the window under way: at a prefill other sequences have steps that the host has not looked at."""
    engine = make_engine(model, max_batch_size=2, steps_per_look=3, overlap_looks=True)
    prefill, ahead = engine._prefill, []

    def recorded(batch):
        ahead.append(max(sequence.ahead for sequence in engine._scheduler.running))
        prefill(batch)

    engine._prefill = recorded
    lengths = [NEW, 5, 8, 11, 14, NEW]
    outputs = engine.generate(prompts, [greedy(length) for length in lengths])
    assert tokens_of(outputs) == [tokens[:length] for tokens, length in zip(expected, lengths)]
    assert ahead == [0, 3, 3, 3, 3]


def random_load(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams], dict]:
    """Prompts, some equal or with a prefix of whole pages in common, their params, and an engine, often with few pages."""
    lengths = [rng.choice([1, 2, 15, 16, 17, 32, 33, 48, 64, 70]) for _ in range(4)]
    pool = random_prompts([*lengths, 64], seed=rng.randrange(1000))
    pool += [pool[-1][:32], pool[-1][:48] + [5]]
    prompts = [rng.choice(pool) for _ in range(rng.randint(1, 9))]
    params = [
        SamplingParams(
            max_tokens=rng.choice([1, 2, 7, 16, 33, 60]), temperature=rng.choice([0, 1]), n=rng.choice([1, 1, 2, 3]), seed=rng.randrange(99),
            stop=[f"<{token}>" for token in rng.sample(range(VOCAB), rng.choice([0, 0, 20]))],
            stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 8])),
        )
        for _ in prompts
    ]  # fmt: skip
    config = dict(
        max_batch_size=rng.choice([1, 3, 8]), steps_per_look=rng.randint(1, 9), num_pages=rng.choice([11, 13, 60]),
        prefill_token_budget=rng.choice([16, 64, 8192]),
    )  # fmt: skip
    return prompts, params, config


def check_held_pages(engine: FlexEngine) -> None:
    scheduler = engine._scheduler
    prefixes = {id(sequence.prefix): sequence.prefix for sequence in scheduler.waiting}.values()
    engine.cache.pages.check([*(s.pages for s in scheduler.running), *(prefix.pages or [] for prefix in prefixes)])


@pytest.mark.parametrize("seed", range(12))
def test_looks_that_overlap_change_nothing(reference, model, monkeypatch, seed):
    """Random loads, all at once or one after the other, some after a call that was interrupted somewhere."""
    rng = random.Random(seed)
    prompts, params, config = random_load(rng)
    method, call = rng.choice(["_decode_step", "_look", "_launch", "_refill"]), rng.randint(0, 12)

    def outputs_of(engine: FlexEngine) -> list:
        if seed % 2:
            return engine.generate(prompts, params)
        pauses = random.Random(seed)

        def arrivals():
            for prompt, p in zip(prompts, params):
                yield from [([], [])] * pauses.choice([0, 0, 1, 4])
                yield [prompt], [p]

        return sorted(engine.stream(arrivals()), key=lambda output: output.index)

    found = []
    for overlap, its_model in ((False, tiny_models.unshared(reference)), (True, model)):
        engine = make_engine(its_model, tokenizer=SpellingTokenizer(), overlap_looks=overlap, **config)
        shuffle_free_pages(engine)
        advance, steps, decode = engine._advance, [], engine._decode_step

        def checked(*args):
            result = advance(*args)
            check_held_pages(engine)
            return result

        monkeypatch.setattr(engine, "_advance", checked)
        if seed % 4 > 1:
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(engine, method, interrupt_at(call, getattr(engine, method)))
                outputs_of(engine)
            engine.cache.pages.check()
        engine.reset_stats()
        monkeypatch.setattr(engine, "_decode_step", lambda *args, **kwargs: [steps.append(1), decode(*args, **kwargs)])
        found.append(outputs_of(engine))
        engine.cache.pages.check()
        stats, completions = engine.stats(), [completion for output in found[-1] for completion in output.outputs]
        assert stats.decode_steps == len(steps) and stats.generated_tokens == sum(len(c.token_ids) for c in completions)
    for first, second, p in zip(*found, params, strict=True):
        assert len(first.outputs) == len(second.outputs) == p.n
        for one, other in zip(first.outputs, second.outputs):
            assert one.token_ids == other.token_ids and one.text == other.text and one.finish_reason == other.finish_reason
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
            assert one.full_logprobs == pytest.approx(other.full_logprobs, abs=2e-4)


@pytest.mark.parametrize("seed", range(16))
def test_a_device_that_runs_as_late_as_it_may(reference, model, monkeypatch, seed):
    """Nothing that the host does comes too early for steps, prefills and copies that have not run yet; each refill is timed once."""
    rng = random.Random(seed)
    prompts, params, config = random_load(rng)
    method, call = ("_look", 2) if seed % 2 else ("_launch", rng.randint(0, 1))
    one_by_one = [([prompt], [p]) for prompt, p in zip(prompts, params)]

    def outputs_of(engine: FlexEngine, pauses: list[int]) -> list:
        if seed % 2:
            return engine.generate(prompts, params)
        arrivals = (arrival for own, pause in zip(one_by_one, pauses) for arrival in [([], [])] * pause + [own])
        return sorted(engine.stream(arrivals), key=lambda output: output.index)

    expected = outputs_of(make_engine(tiny_models.unshared(reference), tokenizer=SpellingTokenizer(), **config), [0] * len(prompts))
    engine = make_engine(model, tokenizer=SpellingTokenizer(), overlap_looks=True, **config)
    shuffle_free_pages(engine)
    device, refills, admit = LateDevice(engine), [], engine.state.admit
    if seed % 4 > 1:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(engine, method, interrupt_at(call, getattr(engine, method)))
            engine.generate(prompts, params)
        engine.reset_stats()
    monkeypatch.setattr(engine.state, "admit", lambda sequences: [refills.append(sequences), admit(sequences)])
    outputs = outputs_of(engine, [rng.choice([0, 0, 1, 4]) for _ in prompts])
    assert tokens_of(outputs) == tokens_of(expected)
    for one, other in zip(outputs, expected):
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert mine.finish_reason == its.finish_reason and mine.logprobs == pytest.approx(its.logprobs, abs=2e-4)
    assert device.done == len(device.queue), "something runs on behind the call"
    assert engine.stats().prefill_seconds == len(refills)


def test_every_round_equals_a_fresh_engine(reference, model):
    """Recycled pages and slots: mixed loads, one after the other in one engine of few pages."""
    engine = make_engine(model, num_pages=24)
    fresh_model = tiny_models.unshared(reference)
    for round_index in range(6):
        prompts = random_prompts([5 + 13 * round_index % 60, 30, 61, 2 + round_index], seed=round_index)
        params = [SamplingParams(max_tokens=10 + 9 * index, seed=round_index, n=1 + index % 2) for index in range(4)]
        fresh = make_engine(fresh_model)
        assert tokens_of(engine.generate(prompts, params)) == tokens_of(fresh.generate(prompts, params))
        assert engine.cache.pages.num_used == 0


def test_requests_that_arrive_one_after_the_other(model, prompts, expected):
    """Each is given as soon as it has ended, numbered in the order of arrival; one that can't be run harms no other."""
    engine = make_engine(model, max_batch_size=3)
    order = [0, 4, 2, 1, 5, 3]

    def arrivals():
        for at, index in enumerate(order):
            yield [prompts[index], []], [greedy(4 if at == 2 else NEW), greedy()]
            yield [], []

    outputs = {}
    for output in engine.stream(arrivals()):
        if output.error is None:
            outputs[output.index] = output.outputs[0].token_ids
        else:
            assert output.index % 2 == 1 and output.error == "empty"
    assert [outputs[2 * at] for at in range(6)] == [expected[index][: 4 if at == 2 else NEW] for at, index in enumerate(order)]
    assert list(outputs)[0] == 4 and torch.is_grad_enabled()
    closed = engine.stream(arrivals())
    next(closed)
    with pytest.raises(RuntimeError, match="while the engine is generating"):
        engine.generate(prompts, greedy())
    closed.close()
    assert engine.cache.pages.num_used == 0
    assert tokens_of(engine.generate(prompts, greedy())) == expected


def test_who_arrives_joins_the_very_next_window(model, prompts):
    engine = make_engine(model, max_batch_size=2, steps_per_look=3, overlap_looks=True)
    prefill, given = engine._prefill, []

    def steps_given() -> int:
        first = engine._scheduler.running[0]
        return len(first.token_ids) + first.ahead

    def recorded(batch):
        given.append(steps_given())
        prefill(batch)

    def arrivals():
        yield [prompts[0]], [greedy()]
        yield from [([], [])] * 3
        given.append(steps_given())
        yield [prompts[1]], [greedy()]

    engine._prefill = recorded
    assert len(list(engine.stream(arrivals()))) == 2
    first, arrived, second = given
    assert first == 0 and arrived == second > 0


def test_waiting_for_arrivals_is_not_decoding(model, prompts, expected):
    """All end by a stop id, with a window under way behind the one in which they do."""
    engine = make_engine(model, steps_per_look=3, overlap_looks=True)

    def arrivals():
        yield [prompts[0]], [greedy(stop_token_ids=[expected[0][1]])]
        while engine._scheduler.busy:
            yield [], []
        time.sleep(1)

    assert len(list(engine.stream(arrivals()))) == 1
    assert engine.stats().decode_steps == 6 and engine.stats().decode_seconds < 1


@pytest.mark.parametrize("overlap_looks", [False, True])
def test_steps_behind_the_last_token_of_a_full_sequence(model, overlap_looks):
    """It stands still on its last page, whose end is the page list's end."""
    engine = make_engine(model, max_seq_len=64, steps_per_look=8, overlap_looks=overlap_looks)
    prompts = random_prompts([30, 5])
    alone = [engine.generate([prompt], greedy(64 - len(prompt), ignore_eos=True)) for prompt in prompts]
    together = engine.generate(prompts, [greedy(64 - len(prompt), ignore_eos=True) for prompt in prompts])
    assert tokens_of(together) == [tokens for outputs in alone for tokens in tokens_of(outputs)]


def test_a_second_call_returns_its_own_requests(model, prompts, expected):
    engine = make_engine(model)
    engine.generate(prompts[:3], greedy())
    outputs = engine.generate(prompts[3:5], greedy())
    assert tokens_of(outputs) == expected[3:5]
    assert [output.prompt_token_ids for output in outputs] == prompts[3:5]
    assert engine.generate([], greedy()) == []


def test_padded_rows_write_only_to_page_0(model, prompts):
    """Batch 5 in a bucket of 6: every page that was never handed out is bit for bit what it was."""
    engine = make_engine(model)
    handed_out: set[int] = set()
    allocate = engine.cache.pages.allocate

    def record(count):
        pages = allocate(count)
        handed_out.update(pages)
        return pages

    engine.cache.pages.allocate = record
    for layer in engine.cache.layers:
        layer.normal_()
    before = [layer.clone() for layer in engine.cache.layers]
    engine.generate(prompts[:5], greedy())
    unused = [page for page in range(1, engine.cache.num_pages) if page not in handed_out]
    assert len(unused) > 20 and len(handed_out) > 10
    for layer, old in zip(engine.cache.layers, before):
        pages, old_pages = (x.unflatten(2, (-1, PAGE)) for x in (layer, old))
        assert torch.equal(pages[:, :, unused], old_pages[:, :, unused])
        changed = (pages[:, :, 0] != old_pages[:, :, 0]).any((0, 1, 3))
        # A padded row stays at position 0, and a prompt's last token is in its pages already when it is decoded.
        assert set(changed.nonzero().flatten().tolist()) == {0, *((len(prompt) - 1) % PAGE for prompt in prompts[:5])}


# ----------------------------------------------------------------------------------------------------------------------- stops


def test_max_tokens_and_finish_reasons(model, prompts, expected):
    engine = make_engine(model, steps_per_look=4)
    stop = expected[3][5]
    first = expected[3].index(stop)
    cases = {1: "length", first: "length", first + 1: "stop", NEW: "stop"}
    for max_tokens, reason in cases.items():
        completion = engine.generate([prompts[3]], greedy(max_tokens, stop_token_ids=[stop]))[0].outputs[0]
        assert completion.token_ids == expected[3][: min(max_tokens, first + 1)]
        assert completion.finish_reason == reason
        assert len(completion.logprobs) == len(completion.full_logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("source", ["generation_config", "config", "tokenizer"])
def test_every_end_of_sequence_id_stops(model, prompts, expected, source):
    """A secondary id too, wherever it is written down; `ignore_eos` ignores the model's ids and keeps the caller's."""
    ids = [expected[4][20], expected[4][9]]
    tokenizer = SpellingTokenizer()
    if source == "tokenizer":
        tokenizer.eos_token_id = ids[1]
    else:
        getattr(model, source).eos_token_id = ids
    engine = make_engine(model, tokenizer=tokenizer, steps_per_look=6)
    first = min(expected[4].index(token) for token in (ids if source != "tokenizer" else ids[1:]))
    completion = engine.generate([prompts[4]], greedy())[0].outputs[0]
    assert completion.token_ids == expected[4][: first + 1] and completion.finish_reason == "stop"
    completion = engine.generate([prompts[4]], greedy(ignore_eos=True))[0].outputs[0]
    assert completion.token_ids == expected[4] and completion.finish_reason == "length"
    own = expected[4][2]
    completion = engine.generate([prompts[4]], greedy(ignore_eos=True, stop_token_ids=[own]))[0].outputs[0]
    assert completion.token_ids == expected[4][: expected[4].index(own) + 1]


@pytest.mark.parametrize("steps_per_look, overlap_looks", [(1, False), (16, False), (3, True)])
def test_stop_strings_that_span_tokens(model, prompts, expected, steps_per_look, overlap_looks):
    engine = make_engine(model, tokenizer=SpellingTokenizer(), steps_per_look=steps_per_look, overlap_looks=overlap_looks)
    whole = engine.generate([prompts[4]], greedy())[0].outputs[0]
    assert whole.text == SpellingTokenizer().decode(expected[4])
    stop = f"{str(expected[4][10])[-1]}><{str(expected[4][11])[0]}"
    cut = whole.text.index(stop)
    last = next(count for count in range(NEW + 1) if stop in SpellingTokenizer().decode(expected[4][:count]))
    engine.reset_stats()
    outputs = engine.generate([prompts[4], prompts[3]], [greedy(stop=["never", stop]), greedy()])
    completion = outputs[0].outputs[0]
    assert completion.text == whole.text[:cut]
    assert completion.token_ids == expected[4][:last]
    assert completion.finish_reason == "stop"
    assert completion.logprobs == pytest.approx(whole.logprobs[:last], abs=1e-4)
    assert len(completion.full_logprobs) == last
    assert tokens_of(outputs[1:]) == [expected[3]]
    assert engine.stats().generated_tokens == last + NEW, "overshoot is not counted"
    engine.cache.pages.check()


# -------------------------------------------------------------------------------------------------------------------- sampling


def test_seeds(model, prompts):
    """A completion's tokens depend on its seed, prompt and index alone: not on batch, slot, bucket, look or preemption."""
    engine = make_engine(model)
    params = SamplingParams(max_tokens=NEW, seed=7, n=3)
    first = engine.generate(prompts, params)
    for output in first:
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(first)

    other = make_engine(tiny_models.qwen3(seed=SEED), num_pages=12, max_batch_size=3, steps_per_look=5)
    again = other.generate(prompts[:1:-1], params)
    assert other.stats().preemptions > 0
    assert tokens_of(again[::-1]) == tokens_of(first[2:])
    assert tokens_of(engine.generate(prompts, dataclasses.replace(params, seed=8))) != tokens_of(first)
    unseeded = SamplingParams(max_tokens=NEW)
    assert tokens_of(engine.generate(prompts, unseeded)) != tokens_of(engine.generate(prompts, unseeded))


def test_equal_prompts_with_one_seed_differ(model, prompts):
    """Prompts that a trainer has repeated itself, n = 1 each, are a group like any other."""
    engine = make_engine(model)
    params = SamplingParams(max_tokens=NEW, seed=7)
    repeated = tokens_of(engine.generate([prompts[3]] * 3, params))
    assert repeated == tokens_of(engine.generate([prompts[3]], dataclasses.replace(params, n=3)))
    assert len({tuple(tokens) for tokens in repeated}) == 3


def test_completion_seeds():
    seeds = {completion_seed(seed, prompt, index) for seed in (0, 1) for prompt in ([1, 2], [12]) for index in range(4)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}])
def test_logprobs(reference, model, prompts, temperature, filters):
    """`full_logprobs` are a trainer's log_softmax(logits / temperature), `logprobs` those of the filtered distribution."""
    engine = make_engine(model, steps_per_look=6)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, **filters)
    for output in engine.generate(prompts, params):
        completion = output.outputs[0]
        logits_TV = hf_logits(reference, output.prompt_token_ids, completion.token_ids) / (temperature or 1)
        tokens_T = torch.tensor(completion.token_ids)[:, None]
        full_T = logits_TV.log_softmax(-1).gather(1, tokens_T)[:, 0]
        assert completion.full_logprobs == pytest.approx(full_T.tolist(), abs=2e-4)
        if temperature == 0:
            assert completion.token_ids == logits_TV.argmax(-1).tolist()
            assert completion.logprobs == completion.full_logprobs
            continue
        kept_TV = torch.stack([kept_by(filters, row) for row in logits_TV])
        kept_T = logits_TV.masked_fill(~kept_TV, -torch.inf).log_softmax(-1).gather(1, tokens_T)[:, 0]
        assert completion.logprobs == pytest.approx(kept_T.tolist(), abs=2e-4)


def kept_by(filters: dict, logits_V: torch.Tensor) -> torch.Tensor:
    """The tokens that top_k, then top_p, then min_p leave; bool `[V]`."""
    order = logits_V.argsort(descending=True)[: filters.get("top_k", len(logits_V))]
    probs = logits_V[order].softmax(-1)
    before = probs.cumsum(-1) - probs
    order = order[before < filters.get("top_p", 1.0)] if "top_p" in filters else order
    order = order[logits_V[order] >= logits_V.max() + np.log(filters.get("min_p", 0.0) or 1e-30)]
    return torch.zeros_like(logits_V, dtype=torch.bool).index_fill(0, order, True)


def test_what_is_off_is_off(model, prompts):
    engine = make_engine(model)
    plain = tokens_of(engine.generate(prompts, SamplingParams(max_tokens=20, seed=1)))
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": None}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_k": tiny_models.VOCAB}):
        assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=20, seed=1, **off))) == plain
    for one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}):
        first = engine.generate(prompts, SamplingParams(max_tokens=20, seed=1, **one))
        assert tokens_of(first) == tokens_of(engine.generate(prompts, greedy(20)))


def test_the_models_generation_config_is_not_asked(model, prompts, expected):
    plain = tokens_of(make_engine(model).generate(prompts, SamplingParams(max_tokens=20, seed=1)))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0, max_new_tokens=2, min_new_tokens=30
    )
    engine = make_engine(model)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=20, seed=1))) == plain
    assert tokens_of(engine.generate(prompts, greedy())) == expected


@pytest.mark.parametrize(
    "name, value",
    [("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1), ("top_k", -2)]
    + [("min_p", -0.1), ("min_p", 1.1), ("n", 0), ("stop", [""]), ("stop", [3])],
)
def test_sampling_params_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^{name} is out of range"):
        SamplingParams(**{name: value})


def test_unknown_sampling_params_are_refused():
    with pytest.raises(TypeError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1.1)


@pytest.mark.parametrize(
    "name, value", [("max_batch_size", 0), ("max_seq_len", 0), ("prefill_token_budget", 0), ("page_size", 24), ("page_size", 8)]
)
def test_config_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


# --------------------------------------------------------------------------------------------------------------- invalid prompts

INVALID = {
    "empty list": ([], "empty"),
    "empty text": ("", "empty"),
    "empty array": (np.zeros(0, dtype=np.int64), "empty"),
    "too long": ([5] * 150, "150 prompt tokens and max_tokens 40 exceed max_seq_len 160"),
    "not text": (3.5, "float"),
    "none": (None, "NoneType"),
    "floats": ([1.0, 2.0], "list"),
    "nested": ([[1, 2]], "list"),
    "batch": (torch.tensor([[1, 2]]), "Tensor"),
    "float tensor": (torch.tensor([1.0]), "Tensor"),
    "float array": (np.array([1.0]), "ndarray"),
    "beyond the vocabulary": ([3, tiny_models.VOCAB], f"token id {tiny_models.VOCAB} is outside the vocabulary"),
    "negative": ([3, -1], "token id -1 is outside the vocabulary"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_prompts_are_named_and_the_others_unharmed(model, prompts, expected, case):
    bad, reason = INVALID[case]
    engine = make_engine(model, tokenizer=SpellingTokenizer())
    mixed = [prompts[3], bad, prompts[2]]
    with pytest.raises(InvalidPromptError, match="prompt 1: ") as caught:
        engine.generate(mixed, greedy())
    assert list(caught.value.errors) == [1] and reason in caught.value.errors[1]
    assert engine.stats().generated_tokens == 0
    outputs = engine.generate(mixed, greedy(), skip_invalid=True)
    assert outputs[1].error == caught.value.errors[1] and outputs[1].outputs == []
    assert tokens_of(outputs) == [expected[3], expected[2]]


def test_a_prompt_that_never_fits_is_refused(model, prompts, expected):
    engine = make_engine(model, num_pages=7)
    with pytest.raises(InvalidPromptError, match="prompt 1: needs 8 pages of 16 tokens, and the pool has 6"):
        engine.generate([prompts[2], prompts[5]], greedy())
    outputs = engine.generate([prompts[2], prompts[5]], greedy(), skip_invalid=True)
    assert tokens_of(outputs) == expected[2:3]


def test_prompts_of_every_kind(model, prompts, expected):
    """Token ids as list, tuple, array or tensor, and text; all the same prompt."""
    engine = make_engine(model, tokenizer=SpellingTokenizer())
    ids = prompts[3]
    kinds = [ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids], "".join(map(chr, ids))]
    assert tokens_of(engine.generate(kinds, greedy())) == [expected[3]] * len(kinds)
    assert tokens_of(engine.generate(kinds[-1], greedy())) == [expected[3]]


def test_what_needs_a_tokenizer_says_so(model, prompts):
    engine = make_engine(model)
    with pytest.raises(InvalidPromptError, match="prompt 0: text needs a tokenizer"):
        engine.generate("hello", greedy())
    with pytest.raises(InvalidPromptError, match="prompt 0: stop strings need a tokenizer"):
        engine.generate([prompts[0]], greedy(stop="x"))
    with pytest.raises(InvalidPromptError, match="9 stop token ids; at most 8"):
        engine.generate([prompts[0]], greedy(stop_token_ids=list(range(9))))
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
        engine.generate([prompts[0]], [greedy(), greedy()])


# ------------------------------------------------------------------------------------------------------- when things go wrong


def interrupt_at(call: int, function):
    calls = iter(range(call))

    def interrupted(*args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize("method, call", [("_decode_step", 0), ("_decode_step", 5), ("_prefill", 0), ("_prefill", 1), ("_look", 3)])
@pytest.mark.parametrize("walker", [Qwen3Walker, HFWalker])
def test_an_interrupted_call_leaves_the_engine_whole(model, prompts, expected, walker, method, call):
    engine = make_engine(model, walker, max_batch_size=4, prefill_token_budget=64, overlap_looks=walker is Qwen3Walker)
    model.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, method, interrupt_at(call, getattr(engine, method)))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, greedy(n=2))
    engine.cache.pages.check()
    assert model.training and model.config._attn_implementation != "flex_paged"
    assert tokens_of(engine.generate(prompts, greedy())) == expected


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_hf_walker_puts_the_model_back(prompts, expected, implementation):
    model = tiny_models.qwen3(seed=SEED, attn_implementation=implementation, attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine = make_engine(model, HFWalker)
    assert tokens_of(engine.generate(prompts, greedy())) == expected
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == implementation
    loss = model(input_ids=torch.tensor([prompts[3]]), labels=torch.tensor([prompts[3]])).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("walker", [Qwen3Walker, HFWalker])
def test_nan_weights_are_named(model, prompts, expected, walker):
    engine = make_engine(model, walker, steps_per_look=4)
    weight = model.model.layers[1].mlp.down_proj.weight
    value = weight.data[3, 5].clone()
    weight.data[3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^prompt 0: .*non-finite weights: model\.layers\.1\.mlp\.down_proj\.weight$"):
        engine.generate(prompts, greedy())
    weight.data[3, 5] = value
    engine.refresh_lora()
    assert tokens_of(engine.generate(prompts, greedy())) == expected


def test_nan_keys_do_not_outlive_the_call(model, prompts, expected):
    """NaN that reached the pool's pages must not reach the sequences that get those pages next."""
    engine = make_engine(model)
    weight = model.model.layers[0].self_attn.v_proj.weight
    value = weight.data[0, 0].clone()
    weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"self_attn\.v_proj\.weight"):
        engine.generate(prompts, greedy())
    weight.data[0, 0] = value
    engine.refresh_lora()
    assert tokens_of(engine.generate(prompts, greedy())) == expected


def test_generating_under_autocast_and_grad(model, prompts, expected):
    """A trainer's surroundings do not reach the engine."""
    engine = make_engine(model)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert tokens_of(engine.generate(prompts, greedy())) == expected
    assert torch.is_grad_enabled()


def test_capture_falls_back_on_a_cpu(model, prompts, expected):
    with pytest.warns(UserWarning, match="no CUDA GPU"):
        engine = make_engine(model, capture_cudagraph=True)
    assert tokens_of(engine.generate(prompts[2:4], greedy())) == expected[2:4]
    assert "no CUDA GPU" in engine.stats().fallbacks[0]


def test_sleep_and_wake_up(model, prompts, expected):
    engine = make_engine(model)
    assert tokens_of(engine.generate(prompts, greedy())) == expected
    engine.sleep()
    engine.wake_up()
    assert tokens_of(engine.generate(prompts, greedy())) == expected


# ----------------------------------------------------------------------------------------------------------------- small parts


@pytest.mark.parametrize("size", [1, 2, 3, 8, 33, 64, 256, 300])
def test_decode_buckets(size):
    buckets = decode_buckets(size)
    assert buckets[0] == 2 and buckets[-1] == max(2, size)
    assert buckets == sorted(set(buckets))
    assert all(b - a <= max(4, b // 8) for a, b in zip(buckets, buckets[1:]))


def test_rows_that_have_ended_stand_still():
    """Row 0 goes on, row 1 hits a stop id, row 2 its last position, row 3 NaN, row 4 had ended: only row 0 moves."""
    state = DecodeState(5, max_steps=2, device=torch.device("cpu"))
    rows = torch.tensor([1, 2, 3, 4, 0])
    state.ints[1:5, SlotColumn.POSITION] = torch.tensor([10, 20, 30, 40])
    state.ints[1:5, SlotColumn.LAST_POSITION] = torch.tensor([99, 99, 30, 99])
    state.ints[1:5, SlotColumn.FIRST_STOP :] = -1
    state.ints[2, SlotColumn.FIRST_STOP] = 6
    tokens = torch.tensor([5, 6, 7, -1, 8])
    advance_rows(rows, state.ints, state.step, state.ring_tokens, state.ring_logprobs, tokens, *torch.zeros(2, 5))
    assert state.ring_tokens[0].tolist() == [5, 6, 7, -1, SlotColumn.NO_TOKEN]
    assert state.ints[1:5, SlotColumn.POSITION].tolist() == [11, 20, 30, 40]
    assert state.ints[:5, SlotColumn.ENDED].tolist() == [1, 0, 1, 1, 1]
    assert state.ints[0, SlotColumn.POSITION] == 0
    advance_rows(rows, state.ints, state.step, state.ring_tokens, state.ring_logprobs, tokens, *torch.zeros(2, 5))
    assert state.ring_tokens[1].tolist() == [5, *[SlotColumn.NO_TOKEN] * 4]


def test_chosen_buckets(model, prompts, expected):
    engine = make_engine(model, max_batch_size=6, decode_buckets=[6, 3])
    assert engine.buckets == [3, 6] and tokens_of(engine.generate(prompts, greedy())) == expected
    for buckets in ([], [1, 6], [3]):
        with pytest.raises(ValueError, match="decode_buckets must be"):
            EngineConfig(max_batch_size=6, decode_buckets=buckets)
