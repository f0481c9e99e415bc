"""Which GPUs prefill through FlashAttention 4, for every way of asking. No CUDA needed."""

import pytest
import torch

from flex_engine import EngineConfig, FlexEngine, HFWalker
from flex_paged_attention import AttentionSpec, FlexAttention, fa4_prefill_choice, fa4_takes, make_backend
from tiny_models import llama

CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
SUPPORTED = {"sm_90", "sm_100"}
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=1.0)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_on_is_used_where_it_works_and_warned_about_elsewhere(name):
    used, warning = fa4_prefill_choice(True, CAPABILITIES[name])
    assert used == (name in SUPPORTED)
    assert (warning is None) == used
    assert used or name in warning


@pytest.mark.parametrize("name", CAPABILITIES)
def test_auto_is_used_where_it_works_and_silent_elsewhere(name):
    assert fa4_prefill_choice(None, CAPABILITIES[name]) == (name in SUPPORTED, None)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_off_is_off(name):
    assert fa4_prefill_choice(False, CAPABILITIES[name]) == (False, None)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_missing_package_is_named_only_when_it_was_asked_for(name):
    used, warning = fa4_prefill_choice(True, CAPABILITIES[name], installed=False)
    assert not used and "flash-attn-4" in warning
    assert fa4_prefill_choice(None, CAPABILITIES[name], installed=False) == (False, None)


def test_without_a_gpu():
    assert fa4_prefill_choice(None, None) == (False, None)
    assert fa4_prefill_choice(False, None) == (False, None)
    used, warning = fa4_prefill_choice(True, None)
    assert not used and "no CUDA GPU" in warning


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(8, 2, 256, 1.0),
        AttentionSpec(8, 2, 128, 1.0, window=512),
        AttentionSpec(8, 2, 128, 1.0, softcap=50.0),
    ],
)
def test_layers_it_cannot_run_keep_flex_attentions_own_kernel(spec):
    assert fa4_takes(SPEC)
    assert not fa4_takes(spec)


@pytest.mark.parametrize("fa4_prefill", [True, False])
def test_the_choice_reaches_the_kernel_options(monkeypatch, fa4_prefill):
    seen = []

    def compiled_flex(dynamic):
        def call(q, k, v, kernel_options, **_):
            seen.append(kernel_options)
            return torch.zeros_like(q)

        return call

    monkeypatch.setattr("flex_paged_attention._compiled_flex", compiled_flex)
    backend = make_backend("flex", torch.device("cpu"), fa4_prefill=fa4_prefill, prefill_options={"BLOCK_N": 64})
    assert isinstance(backend, FlexAttention)
    q_THD, kv_THD = torch.zeros(128, 8, 128), torch.zeros(128, 2, 128)
    backend.prefill(q_THD, kv_THD, kv_THD, SPEC, lambda window: None)
    assert seen == [{"BACKEND": "FLASH", "BLOCK_N": 64} if fa4_prefill else {"BLOCK_N": 64}]


def test_the_engine_falls_back_once_and_says_so():
    with pytest.warns(UserWarning, match="--fa4_prefill: there is no CUDA GPU"):
        engine = FlexEngine(HFWalker(llama()), config=EngineConfig(max_batch_size=2, max_seq_len=64, fa4_prefill=True))
    assert any("--fa4_prefill" in note for note in engine.stats().fallbacks)
