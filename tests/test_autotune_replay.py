"""flex_autotune_replay.py without a GPU: Inductor's log, what is picked from it, and the order of the sweeps."""

from __future__ import annotations

import json
import os

import pytest
import tiny_models
import torch
from flex_autotune_replay import (
    LOG_VARIABLE,
    Timing,
    autotuning,
    choose,
    confirm,
    decode_entries,
    measure_all,
    parse_shape,
    rank_tiles,
    read_log,
    tune_flex,
    tune_triton,
)
from flex_cli import json_object
from flex_decode_attention import DecodeOptions
from flex_engine import EngineConfig, FlexEngine
from flex_profile import time_decode_step
from qwen3_flex_inference import Qwen3Walker


def choice(milliseconds: float, block_n: int, warps: int = 4, stages: int = 3, kind: str = "triton") -> dict:
    tile = {"num_warps": warps, "num_stages": stages, "BLOCK_M": 16, "BLOCK_N": block_n, "USE_TMA": False}
    return {"type": kind, "time": milliseconds, **(tile if kind == "triton" else {}), "kernel_type": "decode", "B": 64, "seq_len_q": 4}


def entry(query_shape: str, *choices: dict, kernel_type: str = "decode") -> dict:
    key = "[1, 8, 40960, 128]"
    return {"query_shape": query_shape, "key_shape": key, "value_shape": key, "kernel_type": kernel_type, "choices": list(choices)}


@pytest.fixture
def log(tmp_path):
    def write(*entries) -> str:
        (path := tmp_path / "log.json").write_text(json.dumps(entries))
        return str(path)

    return write


LOG = [
    entry("[1, 32, 8192, 128]", choice(0.9, 64), kernel_type="forward"),
    entry("[1, 8, 4, 100, 128]", choice(0.01, 16)),  # a prefill of fewer than 128 tokens takes the decode kernel too
    entry("[64, 8, 4, 1, 128]", choice(0.03, 64, 4), choice(0.05, 32), choice(float("inf"), 128), choice(0.04, 64, 2)),
]


def test_shapes():
    assert parse_shape("[64, 8, 4, 1, 128]") == (64, 8, 4, 1, 128)
    assert parse_shape("[s0, 8, 4, Max(1, s1 + 2), 128]") == ("s0", 8, 4, "Max(1, s1 + 2)", 128)
    with pytest.raises(ValueError, match="no shape"):
        parse_shape("64, 8")


def test_the_decode_entry_is_the_one_with_a_single_query(log):
    (chosen,) = decode_entries(read_log(log(*LOG)))
    assert chosen.query_shape == (64, 8, 4, 1, 128) and chosen.query_length == 1
    assert rank_tiles([chosen]) == [
        {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        {"BLOCK_N": 64, "num_warps": 2, "num_stages": 3},
        {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3},
    ]


def test_symbolic_dimensions(log):
    """A symbolic batch says nothing about the queries; a symbolic length counts only if nothing better is there."""
    batch, length = entry("[s0, 8, 4, 1, 128]", choice(0.03, 64)), entry("[64, 8, 4, s27, 128]", choice(0.02, 32))
    assert [e.query_shape[0] for e in decode_entries(read_log(log(length, batch)))] == ["s0"]
    assert [e.query_length for e in decode_entries(read_log(log(LOG[0], length)))] == ["s27"]


def test_a_log_without_decode_is_refused_and_described(log):
    with pytest.raises(ValueError, match=r"forward \[1, 32, 8192, 128\].*decode \[1, 8, 4, 100, 128\]"):
        decode_entries(read_log(log(*LOG[:2])))
    with pytest.raises(ValueError, match="it has nothing"):
        decode_entries(read_log(log()))


@pytest.mark.parametrize("text", ["", "{}", '[{"kernel_type": "decode"}]', "[1]", '{"(64, 8)": [{"type": "cublas"}]}'])
def test_what_is_no_log_is_refused(tmp_path, text):
    (path := tmp_path / "log.json").write_text(text)
    if text == "{}":
        assert read_log(path) == []
        return
    with pytest.raises(ValueError, match="no flex_attention autotune log"):
        read_log(path)


def test_layers_of_two_shapes_are_ranked_by_the_sum_and_the_last_entry_of_a_shape_counts(log):
    """What failed in one of them is out, and an extern kernel is no tile."""
    first = entry("[64, 8, 4, 1, 128]", choice(0.01, 64), choice(0.02, 32), choice(0.001, 16))
    again = entry("[64, 8, 4, 1, 128]", choice(0.03, 64), choice(0.01, 32), choice(0.001, 16), choice(1e-6, 0, kind="extern"))
    other = entry("[64, 1, 8, 1, 512]", choice(0.01, 64), choice(0.02, 32))
    entries = decode_entries(read_log(log(first, other, again)))
    assert len(entries) == 2
    assert [tile["BLOCK_N"] for tile in rank_tiles(entries)] == [32, 64]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 logs no decode kernel")
@pytest.mark.parametrize("group, length", [(4, 1), (1, 1)])
def test_the_log_is_as_torch_writes_it(tmp_path, monkeypatch, group, length):
    """Torch's own writer, on the nodes that the decode kernel is autotuned with."""
    import sympy
    from torch._inductor import select_algorithm as inductor

    class Node:
        def __init__(self, *size):
            self.size = [sympy.Integer(dim) for dim in size]

        def get_size(self):
            return self.size

    def caller(block_n):
        made = object.__new__(inductor.TritonTemplateCaller)
        made.log_info = {"tile_shape": "()", "num_warps": 4, "num_stages": 3, "BLOCK_M": 16, "BLOCK_N": block_n}
        return made

    path = tmp_path / "log.json"
    monkeypatch.setattr(inductor, "get_flex_attention_log_filename", lambda: str(path))
    nodes = [Node(64, 8, group, length, 128), Node(1, 8, 40960, 128), Node(1, 8, 40960, 128)]
    timings = {caller(32): 0.05, caller(64): 0.04}
    inductor.AlgorithmSelectorCache.maybe_log_flex_attention_results("flex_decoding", nodes, timings)
    (chosen,) = decode_entries(read_log(path))
    assert chosen.query_shape == (64, 8, group, length, 128)
    assert [tile["BLOCK_N"] for tile in rank_tiles([chosen])] == [64, 32]


def test_autotuning_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.delenv(LOG_VARIABLE, raising=False)
    monkeypatch.setenv("FLEX_COMPILE_MODE", "default")
    space = config.max_autotune_flex_search_space
    with autotuning(tmp_path / "log.json", exhaustive=True):
        assert os.environ[LOG_VARIABLE].endswith("log.json") and os.environ["FLEX_COMPILE_MODE"].startswith("max-autotune")
        assert config.force_disable_caches and config.max_autotune_flex_search_space == "EXHAUSTIVE"
    assert LOG_VARIABLE not in os.environ and os.environ["FLEX_COMPILE_MODE"] == "default"
    assert not config.force_disable_caches and config.max_autotune_flex_search_space == space


# --- whole steps ------------------------------------------------------------------------------------------------------


def test_the_step_decides_not_the_kernel(log):
    """The tile that is second in the log is first in the step; only --top of them are tried."""
    steps = {None: 5.0, 64: 4.9, 32: 4.0}
    asked = []

    def measure(options):
        asked.append(options)
        return steps[options and options["BLOCK_N"]] + (0.0 if not options else 0.01 * options["num_warps"])

    timings = tune_flex(measure, read_log(log(*LOG)), top=3)
    assert asked[0] is None and len(asked) == 4
    assert choose(timings).options == {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
    assert len(tune_flex(measure, read_log(log(*LOG)), top=1)) == 2


def test_noise_does_not_beat_the_default():
    default, close, better = Timing(None, 4.0), Timing({"BLOCK_N": 32}, 3.99), Timing({"BLOCK_N": 64}, 3.9)
    assert choose([default, close]) is default
    assert choose([default, close, better]) is better


def test_luck_is_measured_again():
    figures = iter([4.0, 3.5, 3.7, 4.0, 4.1])
    timings = measure_all(lambda options: next(figures), [None, {"BLOCK_N": 32}, {"BLOCK_N": 64}])
    asked = []
    assert confirm(lambda options: asked.append(options) or next(figures), timings).options is None
    assert asked == [None, {"BLOCK_N": 32}]
    assert confirm(lambda options: next(figures), timings[:1]) is timings[0]  # nothing to confirm


def test_a_tile_that_does_not_fit_is_a_result():
    def measure(options):
        if options == {"BLOCK_N": 128}:
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        return 4.0

    timings = measure_all(measure, [None, {"BLOCK_N": 128}, {"BLOCK_N": 64}])
    assert [timing.milliseconds for timing in timings] == [4.0, float("inf"), 4.0]
    with pytest.raises(RuntimeError):
        measure_all(lambda options: measure({"BLOCK_N": 128}), [None])  # the default must run


@pytest.mark.parametrize("groups", [False, True])
def test_triton_sweep_finds_an_optimum_stage_by_stage(groups):
    best = DecodeOptions(block_n=32, num_stages=3, ctas_per_sm=6, min_tiles=2, shared_queries=64 if groups else 32)

    def measure(options):
        options = DecodeOptions(**options) if options else DecodeOptions()
        return 4.0 + sum(getattr(options, name) != getattr(best, name) for name in vars(best))

    timings = tune_triton(measure, DecodeOptions(), groups)
    chosen = choose(timings)
    assert DecodeOptions(**chosen.options) == best
    asked = [json.dumps(timing.options, sort_keys=True) for timing in timings]
    assert len(asked) == len(set(asked)) and len(asked) < 30
    assert json_object(json.dumps(chosen.options)) == chosen.options  # what --decode_kernel_options parses


def test_a_step_of_groups_is_timed_and_gives_its_pages_back(one_thread):
    engine = FlexEngine(Qwen3Walker(tiny_models.qwen3()), None, EngineConfig(max_batch_size=5, max_seq_len=120, page_size=16))
    free = engine.cache.pages.num_free
    assert time_decode_step(engine, batch_size=5, context=80, completions=2, prompt_tokens=50, steps=2) > 0
    table = engine.cache.page_table[1:6, :3]
    same = (table[1:] == table[:-1]).all(1).tolist()
    assert same == [True, False, True, False] and (table > 0).all()
    assert engine.cache.pages.num_free == free


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_on_a_gpu(tmp_path, backend):
    """The whole script on a small model, and an engine that takes what it wrote."""
    from flex_autotune_replay import main
    from flex_paged_attention import make_backend

    path = tmp_path / "options.json"
    arguments = ["--load_format", "dummy", "--model_name", "qwen3-0.6b", "--attention_backend", backend, "--batch_size", "4"]
    arguments += ["--context", "200", "--n", "2", "--prompt_tokens", "128", "--search_space", "default", "--top", "2"]
    assert main([*arguments, "--options_path", str(path)]) == 0
    assert make_backend(backend, torch.device("cuda"), json_object(f"@{path}")).name == backend
