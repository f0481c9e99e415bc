"""Many cycles of training, refresh and rollout on a tiny model, and what makes them fail."""

from __future__ import annotations

import dataclasses
import json
import math

import lora_cycles
import pytest
import tiny_models
import torch
from lora_cycles import CycleReport, main
from lora_checks import LogprobError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def flags(tmp_path, build=tiny_models.qwen3) -> list[str]:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(build().config.to_dict()))
    sizes = "--cycles 2 --lora_rank 4 --batch_size 2 --prompt_tokens 6 --max_new_tokens 5 --learning_rate 0.01"
    return f"--load_format dummy --model_name {config} {sizes} --json {tmp_path / 'report.json'}".split()


@pytest.mark.parametrize(("build", "mode"), [(tiny_models.qwen3, "merged"), (tiny_models.qwen3_moe, "active")])
def test_cycles(build, mode, tmp_path, capsys):
    assert main([*flags(tmp_path, build), "--lora_mode", mode]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["lora_mode"] == mode and report["base_unchanged"]
    assert {count: round(share, 3) for count, share in report["merge_keeps"].items()} == {"1": 1.0, "2": 1.0}  # float32 keeps all
    assert report["logprob_errors"].keys() == {"hf_generate", "merged", "active"}
    assert all(error["max_abs"] < 1e-3 for error in report["logprob_errors"].values())
    assert "bit by bit as before" in capsys.readouterr().out


def test_a_base_that_changes_fails(tmp_path, monkeypatch, capsys):
    loss = lora_cycles.rewarded_loss

    def writes_to_the_base(model, outputs):
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "q_proj.base_layer" in name).add_(0.01)
        return loss(model, outputs)

    monkeypatch.setattr(lora_cycles, "rewarded_loss", writes_to_the_base)
    assert main(flags(tmp_path)) == 1
    assert "base weights      CHANGED" in capsys.readouterr().out


def test_what_passes():
    good = CycleReport("m", "cpu", {}, "active", 6, 1e-5, 0.0, base_unchanged=True, memory_bytes=[9, 99, 999, 7, 7, 7])
    grown = dataclasses.replace(good, memory_bytes=[0, 0, 0, 7, 7, 8 + lora_cycles.ALLOWED_GROWTH])
    not_finite = dataclasses.replace(good, logprob_errors={"active": LogprobError(math.nan, math.nan, math.nan, 5)})
    assert [report.passed for report in (good, grown, not_finite)] == [True, False, False]
