"""The pool of engines on a local Ray cluster: results, weights and their versions, uneven work, and actors that are lost."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from pathlib import Path

import flex_ray
import flex_ray_rollouts
import pytest
import tiny_models
import torch
from flex_engine import EngineConfig, FlexEngine, InvalidPromptError, SamplingParams
from flex_ray import (
    ActorsLostError,
    OneBuffer,
    RolloutPool,
    adapter_weights,
    attach_ray_rollouts,
    make_groups,
    require_ray,
    start_ray,
    take_over,
)
from flex_ray_rollouts import main
from flex_weights import unwrapped
from lora_adapters import fresh_adapter
from peft import get_peft_model_state_dict
from qwen3_flex_inference import Qwen3Walker
from test_grpo import LOGP_DIFFERENCE, logged, make_trainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

BATCH = 4
PARAMS = SamplingParams(max_tokens=12, n=3, seed=5)


def make_engine(slow_ones: str | None = None, seconds: float = 0.0) -> FlexEngine:
    """A tiny model with an adapter; the first to be built in the folder `slow_ones` takes `seconds` for each decode step."""
    torch.set_num_threads(1)
    model = fresh_adapter(tiny_models.qwen3(), rank=4)
    engine = FlexEngine(Qwen3Walker(model, lora_mode="active"), None, EngineConfig(max_batch_size=BATCH, max_seq_len=96, page_size=16))
    if slow_ones is not None and not any(Path(slow_ones).iterdir()):
        (Path(slow_ones) / "taken").touch()
        decode = engine._decode_step
        engine._decode_step = lambda *args, **kwargs: (time.sleep(seconds), decode(*args, **kwargs))[1]
    return engine


@pytest.fixture(scope="module")
def cluster():
    start_ray(None, num_actors=8)  # as Ray counts CPUs, not as there are
    yield
    require_ray().shutdown()


@pytest.fixture(scope="module")
def pool(cluster):
    pool = RolloutPool(make_engine, num_actors=2)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twelve, of which two are given twice: their completions are another's noise, whoever runs them."""
    distinct = tiny_models.random_prompts([1, 5, 16, 17, 30, 40, 3, 9, 21, 33])
    return [*distinct[:6], distinct[2], *distinct[6:], distinct[2]]


def kill_and_wait(pool: RolloutPool, actor: int) -> None:
    """Until calls fail: Ray kills in its own time, and the actor may answer meanwhile."""
    handle = next(member.handle for member in pool.members if member.number == actor)
    pool.kill(actor)
    with pytest.raises(pool.ray.exceptions.RayActorError):
        while True:
            pool.ray.get(handle.info.remote())


def completions(outputs) -> list[list[tuple]]:
    return [[(c.index, c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


def perturbed(seed: int, build=make_engine) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = adapter_weights(build().walker.model)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in weights.items()}


def with_adapter(weights: dict[str, torch.Tensor], build=make_engine) -> FlexEngine:
    engine = build()
    with torch.no_grad():
        take_over(weights, engine.walker.model)
    engine.refresh_lora()
    return engine


# ------------------------------------------------------------------------------------------------------- without a cluster


def test_packed_weights_come_back():
    weights = {
        "a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randint(9, (2, 1, 3)), "d": torch.tensor(2.0),
        "e": torch.randn(4, 6).T, "f": torch.empty(0, 3),
    }  # fmt: skip
    unpacked = OneBuffer.of(weights).tensors(torch.device("cpu"))
    assert unpacked.keys() == weights.keys()
    for name, tensor in weights.items():
        assert unpacked[name].dtype == tensor.dtype and torch.equal(unpacked[name], tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights | {"strange": torch.zeros(1)}, "strange is not in the actor's model"),
        (lambda weights: dict(list(weights.items())[1:]), "is not among them"),
        (lambda weights: weights | {next(iter(weights)): torch.zeros(2, 2)}, r"is \(2, 2\), here"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    model = make_engine().walker.model
    with pytest.raises(ValueError, match=message):
        take_over(change(adapter_weights(model)), model)


def test_without_an_adapter_every_parameter_is_broadcast():
    model = tiny_models.qwen3()
    assert adapter_weights(model).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("build", [tiny_models.qwen3, tiny_models.qwen3_moe])
def test_a_broadcast_carries_the_adapter_alone(build):
    """Under PEFT's own names, whether the model is asked that PEFT made or the one inside; experts' tensors too."""
    model = fresh_adapter(build(), rank=4)
    weights, inside = adapter_weights(model), adapter_weights(unwrapped(model))
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert weights.keys() == inside.keys() == expected.keys()
    assert all(weights[name].data_ptr() == inside[name].data_ptr() == expected[name].data_ptr() for name in expected)
    with torch.no_grad():
        take_over({name: tensor + 1 for name, tensor in weights.items()}, unwrapped(model))
    before = adapter_weights(fresh_adapter(build(), rank=4))
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in weights.items())


def test_equal_prompts_are_one_group():
    groups = make_groups([[1, 2], "text", (1, 2), [3]], [SamplingParams(max_tokens=m, n=2) for m in (4, 5, 6, 7)])
    assert [group.requests for group in groups] == [[0, 2], [1], [3]]
    assert [(group.sequences, group.tokens) for group in groups] == [(4, 20), (2, 10), (2, 14)]
    assert all(params.seed is not None for group in groups for params in group.params)


def test_without_ray_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: rollouts on several actors need Ray.*pip install ray==[\d.]+$"):
        main(["--stats_path", str(tmp_path / "stats.json")])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port"])
def test_a_cluster_that_is_not_there_is_named(address, monkeypatch):
    monkeypatch.setattr(require_ray(), "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=f"no Ray cluster at {address}: ."):
        start_ray(address, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--profile", "--profile looks into one engine"), ("--verify_no_drift", "--verify_no_drift looks into one engine")],
)
def test_flags_without_meaning_are_refused(flags, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        main([flags, "--stats_path", str(tmp_path / "stats.json")])


# ------------------------------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize("seed", [5, 6])
def test_completions_are_one_engines(pool, prompts, seed):
    """In order, with every field, however many actors there are: one engine in this process is the reference."""
    params = SamplingParams(max_tokens=12, n=3, seed=seed)
    expected = make_engine().generate(prompts, params)
    rollouts = pool.generate(prompts, params)
    assert completions(rollouts) == completions(expected)
    assert [rollout.index for rollout in rollouts] == list(range(len(prompts)))
    assert [rollout.prompt_token_ids for rollout in rollouts] == prompts
    first = rollouts[0].outputs[0]
    assert first.logprobs == pytest.approx(expected[0].outputs[0].logprobs, abs=1e-4) and len(first.full_logprobs) == 12
    assert {rollout.actor for rollout in rollouts} == {0, 1}
    assert rollouts[2].actor == rollouts[6].actor  # equal prompts go together


def test_as_trl_asks(pool, prompts):
    """A prompt as often as it wants completions, one of each."""
    params = [SamplingParams(max_tokens=3 + index, seed=9) for index in range(3)] * 4
    repeated = [prompt for prompt in prompts[:4] for _ in range(3)]
    assert completions(pool.generate(repeated, params)) == completions(make_engine().generate(repeated, params))


def test_a_seed_that_is_not_given_is_drawn(pool, prompts):
    params = SamplingParams(max_tokens=12)
    assert completions(pool.generate(prompts, params)) != completions(pool.generate(prompts, params))
    assert pool.generate([]) == []


def test_invalid_prompts_are_named_and_the_others_unharmed(pool, prompts):
    given = [prompts[0], [], prompts[1], [10**6]]
    with pytest.raises(InvalidPromptError, match="prompt 1: empty; prompt 3: token id 1000000 is outside"):
        pool.generate(given, PARAMS)
    rollouts = pool.generate(given, PARAMS, skip_invalid=True)
    assert [rollout.error is None for rollout in rollouts] == [True, False, True, False]
    assert completions(rollouts)[::2] == completions(make_engine().generate(prompts[:2], PARAMS))


def test_a_call_that_was_interrupted_leaves_the_actors_usable(pool, prompts):
    def interrupt(ended, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.generate(prompts, SamplingParams(max_tokens=50, n=3, seed=1), on_group=interrupt)
    assert completions(pool.generate(prompts, PARAMS)) == completions(make_engine().generate(prompts, PARAMS))
    assert not pool.lost


def test_each_result_says_which_weights_sampled_it(pool, prompts):
    base = pool.version
    for number, seed in enumerate((1, 2), 1):
        weights = perturbed(seed)
        assert pool.load_weights(weights) == base + number
        rollouts = pool.generate(prompts, PARAMS)
        assert {rollout.weights_version for rollout in rollouts} == {base + number}
        assert completions(rollouts) == completions(with_adapter(weights).generate(prompts, PARAMS))
    broadcast = pool.stats().broadcasts[-1]
    assert broadcast.version == base + 2 and len(broadcast.load_seconds) == 2
    assert 0 < broadcast.store_seconds < broadcast.seconds
    assert broadcast.gigabytes * 1e9 >= sum(tensor.nbytes for tensor in perturbed(1).values())


def test_weights_that_are_not_numbers_are_named(pool, prompts):
    weights = perturbed(1)
    name = next(name for name in weights if "lora_B" in name and ".0." in name and "v_proj" in name)
    pool.load_weights(weights | {name: torch.full_like(weights[name], math.nan)})
    with pytest.raises(Exception, match=r"layers.0.self_attn.v_proj.lora_B.default.weight"):
        pool.generate(prompts, PARAMS)
    pool.load_weights(weights)
    assert completions(pool.generate(prompts, PARAMS)) == completions(with_adapter(weights).generate(prompts, PARAMS))


@pytest.mark.parametrize("lora", [True, False])
def test_in_trl(cluster, pool, tmp_path, lora):
    """Each step samples from the weights of the update before it, with the trainer's own log-probabilities."""
    if not lora:
        pool = RolloutPool(make_full_engine, num_actors=1)
    model = fresh_adapter(tiny_models.qwen3(), rank=4) if lora else tiny_models.qwen3()
    trainer = make_trainer(tmp_path, model, lora=False, max_steps=3)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad = not lora or "lora_" in name
    generation = attach_ray_rollouts(trainer, pool)
    before = pool.version
    trainer.train()
    assert pool.version == before + 3
    assert generation.engine.config.max_seq_len == 96
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4 and min(logged(trainer, "grad_norm")) > 0
    if not lora:
        pool.shutdown()


def make_full_engine() -> FlexEngine:
    torch.set_num_threads(1)
    return FlexEngine(Qwen3Walker(tiny_models.qwen3()), None, EngineConfig(max_batch_size=BATCH, max_seq_len=96, page_size=16))


# ---------------------------------------------------------------------------------------------- uneven work, and losses


def test_a_slow_actor_does_not_hold_the_rest_and_a_lost_one_is_replaced(cluster, prompts, tmp_path):
    pool = RolloutPool(functools.partial(make_engine, str(tmp_path), 0.15), num_actors=2, max_restarts=1)
    expected = completions(make_engine().generate(prompts, PARAMS))
    assert completions(pool.generate(prompts, PARAMS)) == expected
    slow, fast = sorted(range(2), key=lambda actor: pool.tokens[actor])
    assert pool.tokens[fast] >= 2 * pool.tokens[slow] > 0

    weights = perturbed(3)
    version = pool.load_weights(weights)
    changed = completions(with_adapter(weights).generate(prompts, PARAMS))

    def generate_and_kill(actor):
        def kill(ended, total):
            if ended == 4:
                pool.kill(actor)

        return pool.generate(prompts, PARAMS, kill)

    for restarted in (True, False):  # the replacement is given the weights of now
        rollouts = generate_and_kill(slow)
        assert completions(rollouts) == changed
        assert {rollout.weights_version for rollout in rollouts} == {version}
        assert pool.lost[-1].restarted == restarted and pool.lost[-1].actor == slow and pool.lost[-1].cause
        if restarted:
            assert pool.lost[-1].prompts_run_again > 0
            pool.load_weights(weights)  # waits for the replacement
            version += 1
    assert [member.number for member in pool.members] == [fast]
    for call in (generate_and_kill, lambda actor: pool.generate(prompts, PARAMS), lambda actor: pool.load_weights(weights)):
        with pytest.raises(ActorsLostError, match=f"no actor is left: actor {fast} was the last to be lost: it was killed by `ray.kill`"):
            call(fast)
    pool.shutdown()


def test_an_actor_lost_between_calls_is_left_out_of_the_reports(cluster):
    pool = RolloutPool(make_engine, num_actors=2, max_restarts=0)
    kill_and_wait(pool, 0)
    assert len(pool.reports()) == 1
    assert [(loss.actor, loss.prompts_run_again, loss.restarted) for loss in pool.lost] == [(0, 0, False)]
    pool.shutdown()


def test_a_prompt_that_kills_every_actor_is_named(cluster, prompts, monkeypatch):
    monkeypatch.setattr(flex_ray, "MAX_ATTEMPTS", 2)
    pool = RolloutPool(make_deadly_engine, num_actors=1, max_restarts=10)
    with pytest.raises(ActorsLostError, match=r"2 actors were lost while they ran prompts \[.*1"):
        pool.generate([prompts[0], [7, 7, 7], prompts[1]], SamplingParams(max_tokens=2, seed=0))
    pool.shutdown()


def make_deadly_engine() -> FlexEngine:
    engine = make_engine()
    prefill = engine._prefill

    def deadly(batch):
        if any(tokens[:2] == [7, 7] for tokens, _ in batch):
            os._exit(1)
        prefill(batch)

    engine._prefill = deadly
    return engine


def test_what_can_not_start_says_why(cluster, monkeypatch):
    monkeypatch.setattr(flex_ray, "RESOURCES_TIMEOUT", 0)
    with pytest.raises(ValueError, match="need 64 GPU together, and 0 are free"):
        RolloutPool(make_engine, num_actors=1, gpus_per_actor=64)
    monkeypatch.setattr(require_ray(), "cluster_resources", lambda: {"GPU": 2.0})
    with pytest.raises(ValueError, match="3 actors of 0.6 GPU: 2 GPUs in the cluster hold 1 each"):
        RolloutPool(make_engine, num_actors=3, gpus_per_actor=0.6)
    with pytest.raises(ValueError, match="actor 0 could not start: .*no such weights"):
        RolloutPool(broken_engine, num_actors=1)


def broken_engine() -> FlexEngine:
    raise SystemExit("error: no such weights")


@pytest.mark.gpu
def test_two_actors_share_a_gpu(cluster, prompts):
    """Graphs are captured in the actor's own thread; a broadcast reaches them at the addresses that they hold."""
    pool = RolloutPool(make_engine_on_gpu, num_actors=2, gpus_per_actor=0.5)
    expected = make_engine_on_gpu().generate(prompts, PARAMS)
    rollouts = pool.generate(prompts, PARAMS)
    assert {rollout.actor for rollout in rollouts} == {0, 1}
    assert completions(rollouts) == completions(expected)
    weights = perturbed(1, make_engine_on_gpu)
    pool.load_weights(weights)
    changed = completions(with_adapter(weights, make_engine_on_gpu).generate(prompts, PARAMS))
    assert completions(pool.generate(prompts, PARAMS)) == changed != completions(rollouts)
    pool.shutdown()


def make_engine_on_gpu() -> FlexEngine:
    torch.set_float32_matmul_precision("highest")
    model = fresh_adapter(tiny_models.qwen3(head_dim=64).to("cuda"), rank=4)
    config = EngineConfig(max_batch_size=8, max_seq_len=96, page_size=16, kv_memory_gb=0.1)
    return FlexEngine(Qwen3Walker(model, lora_mode="active"), None, config)


def tiny_flags(tmp_path, flags: str) -> list[str]:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(tiny_models.qwen3().config.to_dict()))
    given = f"--load_format dummy --model_name {config} --n_prompts 6 --prompt_tokens 20 --n 2 --max_new_tokens 6 --ignore_eos"
    return f"{given} --max_batch_size 2 --stats_path {tmp_path / 'stats.json'} {flags}".split()


def test_main(cluster, tmp_path, capsys):
    fresh_adapter(tiny_models.qwen3(), rank=4).save_pretrained(str(tmp_path / "adapter"))
    assert main(tiny_flags(tmp_path, f"--num_actors 2 --lora_adapter {tmp_path / 'adapter'} --lora_mode active --kill_one")) == 0
    written = json.loads((tmp_path / "stats.json").read_text())
    assert [round["generated_tokens"] for round in written["rounds"]] == [6 * 2 * 6] * 2
    assert written["killed"]["generated_tokens"] == 6 * 2 * 6
    assert len(written["pool"]["broadcasts"]) == 2 and len(written["pool"]["lost"]) == 1
    assert sum(written["pool"]["tokens"]) == 4 * 6 * 2 * 6
    assert "an actor killed" in capsys.readouterr().out


def test_a_benchmark_that_loses_every_actor_says_which_and_keeps_its_rounds(cluster, tmp_path, monkeypatch):
    """In one line, and a file that an earlier run left is not touched before there is something to put in its place."""
    measure = flex_ray_rollouts.run_round

    def run_round_and_kill(pool, inputs, params):
        if pool.call == rounds_before:
            kill_and_wait(pool, 0)
        return measure(pool, inputs, params)

    monkeypatch.setattr(flex_ray_rollouts, "run_round", run_round_and_kill)
    flags, stats = tiny_flags(tmp_path, "--num_actors 1 --max_restarts 0 --n_rounds 3"), tmp_path / "stats.json"
    for rounds_before, measured in ((3, "the rounds before, 2, are in .*stats.json"), (0, "nothing was measured")):
        with pytest.raises(SystemExit, match=f"^error: no actor is left: actor 0 was the last to be lost: it was killed by `ray.kill`; {measured}$"):
            main(flags)
        assert len(json.loads(stats.read_text())["rounds"]) == 2
