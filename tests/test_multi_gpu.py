"""The multi-GPU benchmark on CPU processes: an engine on each of two ranks, and in each of two actors."""

from __future__ import annotations

import json

import multi_gpu_bench
import pytest
import tiny_models
from multi_gpu_bench import Rounds, main
from unsloth_grpo_common import GRPOStats

pytestmark = pytest.mark.filterwarnings("ignore")


def flags(tmp_path, parts: str) -> list[str]:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(tiny_models.llama().config.to_dict()))
    given = f"--load_format dummy --model_name {config} --parts {parts} --batch_sizes 2,3 --prompt_tokens 10 --max_new_tokens 5"
    return f"{given} --n_rounds 1 --lora_rank 4 --stats_path {tmp_path / 'stats.json'}".split()


def test_ranks_and_actors(tmp_path, capsys):
    """The same workloads in both; parts that are run one by one share a stats file."""
    assert main(flags(tmp_path, "ranks")) == 0
    assert main(flags(tmp_path, "ray")) == 0
    stats = json.loads((tmp_path / "stats.json").read_text())
    measured = [(rounds["part"], rounds["workload"], rounds["sequences"], rounds["tokens"]) for rounds in stats["rounds"]]
    workloads = [("batch 2", 4, 20), ("batch 3", 6, 30), ("batch 2, the last twice", 6, 30)]
    assert measured == [(part, *workload) for part in ("ranks", "ray") for workload in workloads]
    assert all(len(rounds["engine_seconds"][0]) == 2 for rounds in stats["rounds"][:3])
    assert stats["killed"]["tokens"] == 30
    assert len(stats["broadcasts"]) == 1 and stats["broadcasts"][0]["gigabytes"] > 0
    assert "Adapter broadcast" in capsys.readouterr().out


def test_grpo_part_and_table(tmp_path, monkeypatch, capsys):
    """On one rank and on two; the three first steps stay out of the medians."""
    launched = []

    def launch(ranks: int, script: str, given: list[str]) -> None:
        launched.append((ranks, script.rsplit("/", 1)[-1]))
        stats = GRPOStats("flex", "m", "cpu", {}, {}, 4, 2, 8, 8, step_wall_s=[9.0] * 3 + [2.0 * ranks], finished=True, peak_memory_gb=1.0)
        stats.rollout_wall_s = [5.0] * 3 + [1.0]
        stats.save(given[given.index("--stats_path") + 1])

    monkeypatch.setattr(multi_gpu_bench, "launch", launch)
    given = flags(tmp_path, "grpo")
    path = tmp_path / "stats.json"
    rounds = [Rounds("one", "batch 2", 1, 2, 10, [1.0]), Rounds("ray", "batch 2", 2, 4, 20, [1.0])]
    multi_gpu_bench.MultiGPUStats("m", "cpu", {}, {}, rounds).save(path)
    assert main(given) == 0
    assert launched == [(1, "qwen3_grpo_flex.py"), (2, "qwen3_grpo_flex.py")]
    printed = capsys.readouterr().out
    assert "| ray | 2 | batch 2 | 4 | 20 | 20, 20 | 2.00 x | - |" in printed
    assert "| 2 | 4 | 4.00 | 1.00 | 1.00 | 1.0 |" in printed
    path.write_text("[]")
    with pytest.raises(SystemExit, match="holds something else"):
        main(given)


def test_a_rank_that_fails_ends_the_run(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="broken.py on 1 ranks ended with exit status"):
        multi_gpu_bench.launch(1, str(script), [])


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--parts", "one,two"])
    assert "no part 'two'; there are one, ranks, ray, grpo" in capsys.readouterr().err
