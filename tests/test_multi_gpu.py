"""The multi-GPU benchmark on CPU processes: an engine on each of two ranks, and in each of two actors."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import multi_gpu_bench
import pytest
import tiny_models
from multi_gpu_bench import Rounds, main
from test_ray_rollouts import kill_and_wait
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


def test_a_pool_that_is_lost_is_named_and_its_rounds_stay(tmp_path, monkeypatch):
    @contextmanager
    def all_killed(pool, rounds):
        for member in list(pool.members):
            kill_and_wait(pool, member.number)
        yield

    monkeypatch.setattr(multi_gpu_bench, "RolloutPool", functools.partial(multi_gpu_bench.RolloutPool, max_restarts=0))
    monkeypatch.setattr(multi_gpu_bench, "killed_half_way", all_killed)
    with pytest.raises(SystemExit, match=r"^error: part ray: no actor is left: actor \d was the last .* `ray.kill`; what .*stats.json$"):
        main(flags(tmp_path, "ray"))
    stats = multi_gpu_bench.MultiGPUStats.load(tmp_path / "stats.json")
    assert [len(rounds.seconds) for rounds in stats.rounds] == [1, 1, 1] and len(stats.broadcasts) == 1 and stats.killed is None


@pytest.mark.parametrize(("part", "engine"), [("ranks", "--rank_part"), ("ray", "EngineActor")])
def test_a_run_that_is_killed_leaves_its_rounds_and_no_engine(tmp_path, part, engine):
    """Which would hold a GPU's memory. Of Ray, two agents without an engine stay for a minute or two."""
    given, path = [*flags(tmp_path, part), "--n_rounds", "100000"], tmp_path / "stats.json"
    with subprocess.Popen([sys.executable, multi_gpu_bench.__file__, *given], stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and not path.exists():
            time.sleep(0.1)
        engines = [pid for pid in offspring(run.pid) if engine in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(engines) >= 2
        run.kill()
    deadline = time.time() + 30
    while time.time() < deadline and any(map(is_running, engines)):
        time.sleep(0.1)
    assert not [pid for pid in engines if is_running(pid)]
    assert multi_gpu_bench.MultiGPUStats.load(path).rounds[0].seconds


def offspring(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [grandchild for child in children for grandchild in offspring(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_rank_that_fails_ends_the_run(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="broken.py on 1 ranks ended with exit status"):
        multi_gpu_bench.launch(1, str(script), [])


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--parts", "one,two"])
    assert "no part 'two'; there are one, ranks, ray, grpo" in capsys.readouterr().err
