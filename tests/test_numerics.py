"""The verification itself: it passes where the engine is right, and fails where it is not."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import numerics
import verify_qwen3_numerics
from flex_engine import EngineConfig, FlexEngine, HFWalker
from numerics import LogitError, Reference, engine_last_logits, first_difference, hf_logits, verify
from qwen3_flex_inference import Qwen3Walker
from tiny_models import qwen3, random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts([1, 17, 40, 64, 70])
NEW = 24


@pytest.fixture(autouse=True)
def fewer_samples(monkeypatch):
    monkeypatch.setattr(numerics, "LOGPROB_SAMPLES", 600)


def set_up(dtype: torch.dtype, walker=Qwen3Walker) -> tuple[FlexEngine, Reference]:
    model = qwen3(seed=1)
    for parameter in model.parameters():  # not the rope's frequencies
        parameter.data = parameter.data.to(dtype)
    reference = Reference.of(model)
    return FlexEngine(walker(model), None, EngineConfig(max_batch_size=4, max_seq_len=160, page_size=16)), reference


@pytest.mark.parametrize("walker", [Qwen3Walker, HFWalker])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_engine_passes(dtype, walker):
    engine, reference = set_up(dtype, walker)
    report = verify(engine, reference, PROMPTS, NEW)
    assert report.passed, str(report)
    assert [gate.name for gate in report.gates] == ["tokens", "logprobs", "variety"]
    assert report.tokens == len(PROMPTS) * NEW
    assert report.logits.argmax_match == 1.0
    if dtype == torch.float32:
        assert report.divergences == [] and report.logits_hf is None
        assert report.logits.max_abs < 1e-4
    else:
        assert report.logits.max_abs < 2 * report.logits_hf.max_abs
        assert str(report).count("PASS") == 3 and "HF bfloat16 - HF float32" in str(report)
    values = json.loads(report.to_json())
    assert values["passed"] is True and values["gates"][0]["name"] == "tokens"
    engine.cache.pages.check()


def corrupt_a_page_index(engine, monkeypatch):
    upload = engine.cache.upload

    def wrong_page():
        upload()
        engine.cache.page_table[2, 0] = engine.cache.page_table[1, 0]

    monkeypatch.setattr(engine.cache, "upload", wrong_page)


def scale_attention(engine, monkeypatch):
    engine.cache.specs = [dataclasses.replace(spec, scale=spec.scale * 1.1) for spec in engine.cache.specs]


def shift_rope(engine, monkeypatch):
    engine.walker.rope = tuple(table.roll(1, 0) for table in engine.walker.rope)
    engine.walker.rope[0][:2] = 1.0  # position 0 alone is shifted against the others


def drop_a_norm(engine, monkeypatch):
    engine.walker.layers[1].k_norm = torch.ones_like(engine.walker.layers[1].k_norm)


@pytest.mark.parametrize("fault", [corrupt_a_page_index, scale_attention, shift_rope, drop_a_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_engine_fails(dtype, fault, monkeypatch):
    engine, reference = set_up(dtype)
    fault(engine, monkeypatch)
    report = verify(engine, reference, PROMPTS, NEW)
    assert not report.passed
    failed = {gate.name for gate in report.gates if not gate.passed}
    assert "logprobs" in failed and "FAIL" in str(report)
    if dtype == torch.float32:
        assert "tokens" in failed
        first = report.divergences[0]
        assert f"first divergence: prompt {first.prompt}, position {first.position}: token {first.token}" in str(report)


def test_wrong_logprobs_alone_fail(monkeypatch):
    """Right tokens with log-probabilities that are off by 3 %."""
    engine, reference = set_up(torch.bfloat16)
    generate = engine.generate

    def shifted(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        for completion in (completion for output in outputs for completion in output.outputs):
            completion.full_logprobs = [1.03 * x for x in completion.full_logprobs]
        return outputs

    monkeypatch.setattr(engine, "generate", shifted)
    report = verify(engine, reference, PROMPTS, NEW)
    assert [gate.name for gate in report.gates if not gate.passed] == ["logprobs"]


def test_a_model_that_repeats_itself_is_called_out():
    model = qwen3(initializer_range=0.02, tie_word_embeddings=True)
    reference = Reference.of(model)
    engine = FlexEngine(Qwen3Walker(model), None, EngineConfig(max_batch_size=4, max_seq_len=160, page_size=16))
    report = verify(engine, reference, PROMPTS, NEW)
    assert [gate.name for gate in report.gates if not gate.passed] == ["variety"]


def test_a_reference_that_shares_storage_is_refused():
    model = qwen3()
    reference = Reference(exact=model, plain=None)
    engine = FlexEngine(Qwen3Walker(model), None, EngineConfig(max_batch_size=4, max_seq_len=160, page_size=16))
    with pytest.raises(AssertionError, match="reference shares weights"):
        verify(engine, reference, PROMPTS, NEW)


def test_last_logits_of_every_length():
    """A lone prompt of one token (nothing to prefill), a full batch, a padded bucket."""
    engine, reference = set_up(torch.float32)
    for prompts in (PROMPTS[:1], PROMPTS[:4], PROMPTS[1:4]):
        expected = torch.cat([hf_logits(reference.exact, prompt, [0]) for prompt in prompts])
        torch.testing.assert_close(engine_last_logits(engine, prompts), expected, atol=1e-4, rtol=1e-4)
        engine.cache.pages.check()


def test_logit_error():
    exact = torch.arange(40.0).view(2, 20)
    actual = exact.clone()
    actual[0, 3] += 0.5
    actual[1] = actual[1].flip(0)
    error = LogitError.between(actual, exact)
    assert error.max_abs == 19.0
    assert error.argmax_match == 0.5
    assert error.top10_overlap == 5.0
    assert error.mean_abs == pytest.approx((0.5 / 20 + 10.0) / 2)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 4]) == 1
    with pytest.raises(ValueError):
        first_difference([1], [1, 2])


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.json"
    qwen3(tie_word_embeddings=True).config.to_json_file(path)
    return path


def test_the_script(config_file, tmp_path, capsys):
    report_file = tmp_path / "out" / "report.json"
    flags = ["--load_format", "dummy", "--model_name", str(config_file), "--n_prompts", "3", "--max_new_tokens", "20"]
    status = verify_qwen3_numerics.main([*flags, "--dtype", "float32", "--json", str(report_file)])
    assert status == 0
    assert "PASS  tokens: 3 of 3" in capsys.readouterr().out
    report = json.loads(report_file.read_text())
    assert report["passed"] and report["context"]["initializer_range"] == 0.2
    assert report["walker"] == "Qwen3Walker" and report["dtype"] == "float32"
    assert verify_qwen3_numerics.main([*flags, "--walker", "hf", "--dtype", "bfloat16"]) == 0
    assert "HFWalker, bfloat16" in capsys.readouterr().out


def test_the_script_fails_with_status_1(config_file, capsys, monkeypatch):
    monkeypatch.setattr(numerics, "FP32_LOGPROB_TOLERANCE", 0.0)
    flags = ["--load_format", "dummy", "--model_name", str(config_file), "--n_prompts", "2", "--max_new_tokens", "20"]
    assert verify_qwen3_numerics.main([*flags, "--dtype", "float32"]) == 1
    assert "FAIL  logprobs" in capsys.readouterr().out


def test_the_script_names_what_is_wrong(config_file):
    flags = ["--load_format", "dummy", "--model_name", str(config_file)]
    with pytest.raises(SystemExit, match="prompt 1: empty"):
        verify_qwen3_numerics.main([*flags, "--prompt", "fine", "--prompt", ""])
    with pytest.raises(SystemExit, match="--json /proc/nowhere"):
        verify_qwen3_numerics.main([*flags, "--json", "/proc/nowhere/report.json"])
