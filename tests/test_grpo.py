"""GRPO in TRL: the adapter, the drivers, and what went wrong elsewhere with sampling and log-probabilities inside a trainer."""

import importlib.util
import json
import math
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import compare_grpo_runs
import flex_trl
import tiny_models
import unsloth_grpo_common as common
from conftest import SCRIPTS
from flex_engine import HFWalker, InvalidPromptError, NonFiniteError
from flex_models import byte_tokenizer
from flex_nf4 import quantize_nf4
from flex_trl import attach_flex_rollouts

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

PROMPTS = [f"{a} + {a + 1} =" for a in range(8)]
GENERATIONS, TOKENS = 4, 6


def length_reward(completions, **_):
    return [float(len(completion) % 7) for completion in completions]


def make_trainer(tmp_path, model=None, lora=True, prompts=PROMPTS, trainer_options=None, **options) -> GRPOTrainer:
    model = tiny_models.llama(intermediate_size=128) if model is None else model
    tokenizer = byte_tokenizer(tiny_models.VOCAB, None)
    defaults = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=2 * GENERATIONS, num_generations=GENERATIONS, max_steps=2,
        max_completion_length=TOKENS, learning_rate=1e-2, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to="none",
        logging_steps=1, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return GRPOTrainer(
        model, length_reward, GRPOConfig(**defaults | options), Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
        **trainer_options or {},
    )  # fmt: skip


def logged(trainer: GRPOTrainer, key: str) -> list[float]:
    return [float(logs[key]) for logs in trainer.state.log_history if key in logs]


LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"


def encode(trainer: GRPOTrainer, *texts: str) -> list[list[int]]:
    return trainer.processing_class(list(texts))["input_ids"]


# -------------------------------------------------------------------------------------------------------------- the adapter


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("mode", ["active", "merged", "full", "hf"])
def test_sampler_and_trainer_agree_on_logprobs(tmp_path, mode, temperature):
    """Log-probabilities at temperature other than 1 belong to the scaled logits, and stay the trainer's after each update."""
    trainer = make_trainer(tmp_path, lora=mode != "full", temperature=temperature)
    attach_flex_rollouts(
        trainer, lora_mode="merged" if mode == "merged" else "active", walker_class=HFWalker if mode == "hf" else None
    )
    trainer.train()
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4
    ratios = [*logged(trainer, "sampling/importance_sampling_ratio/min"), *logged(trainer, "sampling/importance_sampling_ratio/max")]
    assert len(ratios) == 4 and all(abs(ratio - 1) < 1e-3 for ratio in ratios)
    assert min(logged(trainer, "grad_norm")) > 0


def test_a_missed_sync_would_show(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    generation = attach_flex_rollouts(trainer)
    monkeypatch.setattr(generation.engine, "refresh_lora", lambda: None)
    trainer.train()
    first, second = logged(trainer, LOGP_DIFFERENCE)
    assert first < 1e-4 < second


def test_gradient_checkpointing_and_a_pretrained_adapter(tmp_path):
    """With a KL term TRL copies a pretrained adapter to one named `ref` and switches to it and back in every step."""
    model = get_peft_model(tiny_models.llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    trainer = make_trainer(tmp_path, model, lora=False, beta=0.1, gradient_checkpointing=True)
    attach_flex_rollouts(trainer)
    trainer.train()
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4
    first, second = logged(trainer, "kl")
    assert first == 0 < second


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(tmp_path, lora):
    def losses(folder, **options):
        resume = options.pop("resume", None)
        trainer = make_trainer(tmp_path / folder, lora=lora, lr_scheduler_type="constant", **options)
        attach_flex_rollouts(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4
        return logged(trainer, "reward"), logged(trainer, "grad_norm")

    whole = losses("whole", max_steps=3)
    losses("cut", max_steps=2, save_strategy="steps", save_steps=2)
    resumed = losses("cut", max_steps=3, resume=str(tmp_path / "cut" / "checkpoint-2"))
    assert resumed[0] == whole[0]
    assert resumed[1] == pytest.approx(whole[1], rel=1e-3)


def test_one_sync_per_optimizer_step(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, per_device_train_batch_size=GENERATIONS, gradient_accumulation_steps=2, max_steps=3)
    generation = attach_flex_rollouts(trainer)
    syncs, rollouts = [], []
    refresh, generate = generation.engine.refresh_lora, generation.engine.generate
    monkeypatch.setattr(generation.engine, "refresh_lora", lambda: (syncs.append(trainer.state.global_step), refresh()))
    monkeypatch.setattr(generation.engine, "generate", lambda *a, **k: (rollouts.append(len(a[0])), generate(*a, **k))[1])
    trainer.train()
    assert syncs == [0, 1, 2]
    assert rollouts == [2 * GENERATIONS] * 3


@pytest.mark.parametrize("steps", [1, 2])
def test_a_second_train_starts_from_current_weights(tmp_path, steps):
    """TRL compares step numbers: after a run of one step, the next begins at the step that it synced at last."""
    trainer = make_trainer(tmp_path, max_steps=steps)
    attach_flex_rollouts(trainer)
    trainer.train()
    trainer.train()
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4


@pytest.mark.parametrize("walker_class", [None, HFWalker])
@pytest.mark.parametrize("lora", [False, True])
def test_fp32_parameters_under_autocast_are_sampled_in_bfloat16(tmp_path, lora, walker_class):
    trainer = make_trainer(tmp_path, lora=lora, bf16=True)
    generation = attach_flex_rollouts(trainer, walker_class=walker_class)
    assert generation.engine.walker.dtype == torch.bfloat16
    trainer.train()
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 0.1
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


def test_bfloat16_parameters_are_read_in_place(tmp_path):
    model = tiny_models.llama().to(torch.bfloat16)
    trainer = make_trainer(tmp_path, model, lora=False)
    generation = attach_flex_rollouts(trainer)
    layer, weight = generation.engine.walker.layers[0], model.model.layers[0].self_attn.q_proj.weight
    assert weight.data_ptr() == layer.qkv.weight.data_ptr()
    before = weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, weight)
    assert weight.data_ptr() == layer.qkv.weight.data_ptr()


def test_four_bit_base(tmp_path):
    model = quantize_nf4(tiny_models.llama(hidden_size=192, intermediate_size=128), torch.bfloat16)
    trainer = make_trainer(tmp_path, model, bf16=True)
    attach_flex_rollouts(trainer)
    trainer.train()
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 0.1
    assert min(logged(trainer, "grad_norm")) > 0


def test_four_bit_base_that_computes_in_float32(tmp_path):
    """TRL makes the adapter bfloat16, which says nothing about the base."""
    model = quantize_nf4(tiny_models.llama(hidden_size=192, intermediate_size=128), torch.float32)
    trainer = make_trainer(tmp_path, model)
    attach_flex_rollouts(trainer)
    trainer.train()
    first, second = logged(trainer, LOGP_DIFFERENCE)  # B is zero at first, and its product is rounded then
    assert first < 1e-4 and second < 0.02


def test_fp32_lm_head_says_nothing_about_the_layers(tmp_path):
    model = tiny_models.llama(tie_word_embeddings=True).to(torch.bfloat16)
    trainer = make_trainer(tmp_path, model, lora=False, cast_lm_head_to_fp32=True)
    assert attach_flex_rollouts(trainer).engine.walker.dtype == torch.bfloat16


def test_equal_prompts_are_computed_once(tmp_path):
    trainer = make_trainer(tmp_path)
    generation = attach_flex_rollouts(trainer)
    first, second = encode(trainer, "1 + 3 =", "5 + 5")
    _, completions, logprobs, ids = generation.generate([first] * GENERATIONS + [second] * GENERATIONS, None, GENERATIONS)
    stats = generation.engine.stats()
    assert stats.prefill_tokens == len(first) + len(second)
    assert [[token for [token] in tokens] for tokens in ids] == completions
    assert [len(sequence) for sequence in logprobs] == [len(sequence) for sequence in completions]


# Items 25 to 28 and 31 of the list of what went wrong elsewhere.


def test_generation_config_of_the_model_is_not_asked(tmp_path):
    def completions(**generation_config):
        model = tiny_models.llama()
        model.generation_config.update(**generation_config)
        trainer = make_trainer(tmp_path, model)
        generation = attach_flex_rollouts(trainer)
        return generation.generate(encode(trainer, *PROMPTS), None, 1)[1]

    assert completions() == completions(do_sample=True, temperature=0.01, top_k=1, top_p=0.1, max_new_tokens=2)


def test_filters_that_are_off_mean_the_same(tmp_path):
    def completions(**sampling):
        trainer = make_trainer(tmp_path, **sampling)
        return attach_flex_rollouts(trainer).generate(encode(trainer, *PROMPTS), None, 1)[1]

    off = completions()
    assert completions(top_k=0, top_p=1.0, min_p=None) == completions(top_k=-1, min_p=0.0) == off
    assert completions(top_k=1) != off


def test_a_group_differs_and_a_run_repeats(tmp_path):
    def rollouts(seed):
        trainer = make_trainer(tmp_path, seed=seed, temperature=2.0)
        generation = attach_flex_rollouts(trainer)
        [prompt] = encode(trainer, PROMPTS[0])
        return [generation.generate([prompt] * 8, None, 8)[1] for _ in range(2)]

    first, second = rollouts(seed=3)
    assert len({tuple(completion) for completion in [*first, *second]}) == 16
    assert rollouts(seed=3) == [first, second]
    assert rollouts(seed=4)[0] != first


def test_which_logprobs_go_to_the_correction(tmp_path):
    def ratios(**options):
        trainer = make_trainer(tmp_path, max_steps=1, temperature=1.2, top_k=5, min_p=0.05, vllm_importance_sampling_mode="token_truncate")
        attach_flex_rollouts(trainer, **options)
        trainer.train()
        return [logged(trainer, f"sampling/importance_sampling_ratio/{name}")[0] for name in ("min", "max")]

    assert all(abs(ratio - 1) < 1e-3 for ratio in ratios())
    low, high = ratios(correct_truncation=True)
    assert 0 < low < 0.9 and high < 1 + 1e-3  # each token's kept mass


MASKED = dict(vllm_importance_sampling_clip_min=0.99, vllm_importance_sampling_clip_max=1.05)
SAMPLING_METRICS = [f"sampling/{name}" for name in (
    "sampling_logp_difference/mean", "sampling_logp_difference/max", "importance_sampling_ratio/min", "importance_sampling_ratio/mean",
    "importance_sampling_ratio/max",
)]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        dict(vllm_importance_sampling_mode="sequence_mask", **MASKED),
        dict(vllm_importance_sampling_mode="token_mask", loss_type="vespo", **MASKED),
        dict(vllm_importance_sampling_mode="token_truncate", beta=0.1),
        dict(vllm_importance_sampling_mode="sequence_truncate", loss_type="grpo", mask_truncated_completions=True),
        dict(num_iterations=2),
        dict(steps_per_generation=4),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_correction_needs_no_forward_of_its_own(tmp_path, monkeypatch, options):
    """Taken in the loss's forward it is what TRL computes beforehand, in training and evaluation; where a rollout outlives an update,
    it is left to TRL."""
    dataset = Dataset.from_dict({"prompt": PROMPTS[:2]})

    def run(folder, in_loss: bool):
        monkeypatch.setattr(flex_trl, "CorrectionInLoss", CORRECTION if in_loss else lambda trainer: None)
        batches = dict(per_device_train_batch_size=GENERATIONS, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2)
        sampling = dict(temperature=1.2, top_k=5, per_device_eval_batch_size=GENERATIONS)
        trainer = make_trainer(tmp_path / folder, trainer_options={"eval_dataset": dataset}, **batches | sampling | options)
        attach_flex_rollouts(trainer, correct_truncation=True)  # ratios that are far from 1
        forwards = []
        trainer.model.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
        trainer.train()
        keys = ["loss", "grad_norm", "reward", *SAMPLING_METRICS]
        keys += [f"eval_{key}" for key in ("loss", *SAMPLING_METRICS)]
        return {key: logged(trainer, key) for key in keys}, forwards

    before, forwards_before = run("before", in_loss=False)
    now, forwards_now = run("now", in_loss=True)
    for key, values in before.items():
        assert values and now[key] == pytest.approx(values, rel=1e-3, abs=1e-6), key
    assert forwards_now.count(True) == forwards_before.count(True)
    used_up = "num_iterations" not in options and "steps_per_generation" not in options
    assert (len(forwards_now) < len(forwards_before)) == used_up


CORRECTION = flex_trl.CorrectionInLoss


def test_a_call_returns_its_own_requests_and_leaves_the_model_as_it_was(tmp_path):
    trainer = make_trainer(tmp_path)
    generation = attach_flex_rollouts(trainer, walker_class=HFWalker)
    model, implementation = trainer.model, trainer.model.config._attn_implementation
    model.train()
    training = [module.training for module in model.modules()]
    first, second = encode(trainer, "1 + 2 =", "7 + 8")
    assert generation.generate([first], None, 1)[0] == [first]
    assert generation.generate([second], None, 1)[0] == [second]
    assert model.config._attn_implementation == implementation
    assert [module.training for module in model.modules()] == training


def test_every_completion_has_a_token_and_ends_where_trl_says(tmp_path):
    """TRL raises on an empty completion; every id that the model declares as an end is one."""
    model = tiny_models.llama()
    model.generation_config.eos_token_id = list(range(1, 8))  # and the tokenizer's
    trainer = make_trainer(tmp_path, model, max_completion_length=32, temperature=3.0)
    generation = attach_flex_rollouts(trainer)
    completions = generation.generate(encode(trainer, *PROMPTS) * 8, None, 8)[1]
    ends = set(trainer.eos_token_ids)
    assert len(ends) == 8
    assert min(map(len, completions)) >= 1
    assert any(completion[-1] in ends for completion in completions)
    assert not any(token in ends for completion in completions for token in completion[:-1])


# ----------------------------------------------------------------------------------------------------- evaluation and tools


def test_evaluation_loop(tmp_path):
    dataset = Dataset.from_dict({"prompt": PROMPTS[:4]})
    trainer = make_trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2 * GENERATIONS, trainer_options={"eval_dataset": dataset}
    )
    generation = attach_flex_rollouts(trainer)
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 2
    assert max(logged(trainer, f"eval_{LOGP_DIFFERENCE}")) < 1e-4
    assert "eval_reward" in trainer.evaluate()
    assert generation.llm.llm_engine.model_config.max_model_len == generation.engine.config.max_seq_len


TOOL_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_two_turns_with_a_tool(tmp_path, monkeypatch):
    """The second turn's prompt is the first's conversation and the tool's answer; log-probabilities stay aligned."""
    asked = []

    def lookup(key: int) -> str:
        """Looks a number up.

        Args:
            key: Which.
        """
        asked.append(key)
        return "42"

    def parse(tokenizer, ids, prefix=None, tools=None):
        first_turn = b"42" not in bytes(token for token in prefix if token < 256)
        calls = [{"type": "function", "function": {"name": "lookup", "arguments": {"key": 7}}}] if first_turn else []
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": calls}

    from trl.trainer import grpo_trainer

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    tokenizer = byte_tokenizer(tiny_models.VOCAB, None)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = {}
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    config = dict(max_completion_length=200, max_steps=1, max_tool_calling_iterations=1, generation_kwargs={"stop": ["<"]})
    monkeypatch.setattr(sys.modules[__name__], "byte_tokenizer", lambda *_: tokenizer)
    trainer = make_trainer(tmp_path, prompts=conversations, trainer_options={"tools": [lookup]}, **config)
    attach_flex_rollouts(trainer)
    trainer.train()
    assert len(asked) == 2 * GENERATIONS
    assert logged(trainer, "tools/call_frequency") == [1.0]
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4


# ---------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"num_beams": 1}}, "generation_kwargs\\['num_beams'\\]"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"loss_type": "vespo"}, "loss_type='vespo' with vllm_importance_sampling_mode"),
    ],
)
def test_options_without_meaning_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        attach_flex_rollouts(make_trainer(tmp_path, **options))


def test_unknown_trl_is_refused_in_one_line(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(flex_trl.trl, "__version__", "2.3.0")
    with pytest.raises(ValueError, match="^trl 2.3.0 was not tried.*install trl 1.16$"):
        attach_flex_rollouts(trainer)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_training_is_refused_by_name(tmp_path, kind):
    trainer = make_trainer(tmp_path)
    trainer.accelerator.state.distributed_type = flex_trl.DistributedType[kind]
    try:
        with pytest.raises(ValueError, match="FSDP is not|DeepSpeed .ZeRO-3"):
            attach_flex_rollouts(trainer)
    finally:
        trainer.accelerator.state.distributed_type = flex_trl.DistributedType.NO


def test_a_longer_prompt_names_the_way_out(tmp_path):
    trainer = make_trainer(tmp_path)
    generation = attach_flex_rollouts(trainer, max_prompt_length=4)
    with pytest.raises(InvalidPromptError, match="prompt 0") as caught:
        trainer.train()
    assert "max_prompt_length" in caught.value.__notes__[0]
    assert generation.engine._scheduler is None


def test_a_stream_of_prompts_needs_a_length(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(ValueError, match="max_prompt_length"):
        attach_flex_rollouts(trainer)
    attach_flex_rollouts(trainer, max_prompt_length=32)


# --------------------------------------------------------------------------------------------------------------- long runs


def test_an_interrupted_rollout_leaves_the_trainer_usable(tmp_path, monkeypatch):
    """Ctrl-C and SIGTERM arrive as exceptions in the middle of a decode step."""
    trainer = make_trainer(tmp_path)
    generation = attach_flex_rollouts(trainer)
    engine = generation.engine
    decode, steps = engine._decode_step, iter(range(100))

    def interrupted(*args, **kwargs):
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return decode(*args, **kwargs)

    monkeypatch.setattr(engine, "_decode_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert engine.cache.pages.num_used == 0
    trainer.train()
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("lora_mode", ["active", "merged"])
def test_on_a_gpu(tmp_path, monkeypatch, lora_mode):
    """CUDA graphs over weights that change, the pool's memory lent to each training step, and a rollout that is interrupted."""
    model = tiny_models.qwen3(hidden_size=256, intermediate_size=512, head_dim=64).to(torch.bfloat16)
    options = dict(use_cpu=False, bf16=True, max_steps=3, max_completion_length=40, gradient_checkpointing=True)
    trainer = make_trainer(tmp_path, model, **options)
    generation = attach_flex_rollouts(trainer, lora_mode=lora_mode)
    engine = generation.engine
    mapped = []
    loss = trainer.compute_loss
    monkeypatch.setattr(trainer, "compute_loss", lambda *a, **k: (mapped.append(engine.cache.memory.mapped), loss(*a, **k))[1])
    look, looks = engine._look, iter(range(100))

    def interrupted(*args):
        if next(looks) == 4:
            raise KeyboardInterrupt
        return look(*args)

    monkeypatch.setattr(engine, "_look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not engine.cache.memory.mapped
    trainer.train()
    assert engine.graphs and not any(mapped)
    assert max(logged(trainer, LOGP_DIFFERENCE)) < 0.1
    assert min(logged(trainer, "grad_norm")) > 0


def test_weights_that_are_not_numbers_are_named(tmp_path):
    class Poison(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.get_base_model().model.layers[1].self_attn.v_proj.lora_B["default"].weight.data[0, 0] = math.nan

    trainer = make_trainer(tmp_path, trainer_options={"callbacks": [Poison()]})
    attach_flex_rollouts(trainer)
    with pytest.raises(NonFiniteError, match="layers.1.self_attn.v_proj.lora_B.default.weight"):
        trainer.train()


def test_data_parallel_ranks_have_engines_of_their_own(tmp_path):
    """Two processes over gloo: groups span the ranks, noise differs, gradients are shared, and a rank with more work than the other
    keeps nobody from going on: no collective is called inside generate."""
    script = tmp_path / "train.py"
    script.write_text(DATA_PARALLEL)
    paths = f"{SCRIPTS}:{os.path.dirname(__file__)}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", str(script), str(tmp_path),
    ]  # fmt: skip
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["prompt"] == ranks[1]["prompt"]  # one group, half of it on each rank
    assert ranks[0]["completions"] != ranks[1]["completions"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["difference"] < 1e-4
    assert ranks[1]["steps"] == 2 * ranks[0]["steps"]


DATA_PARALLEL = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from test_grpo import LOGP_DIFFERENCE, logged, make_trainer
from flex_trl import attach_flex_rollouts
folder = Path(sys.argv[1])
trainer = make_trainer(folder, prompts=["1 + 1 =", "1 + 2 + 3 + 4 + 5 + 6 =" * 3], per_device_train_batch_size=2)
rank = trainer.accelerator.process_index
generation = attach_flex_rollouts(trainer, **({"max_batch_size": 1} if rank else {}))
assert trainer.accelerator.num_processes == 2
calls, generate = [], generation.engine.generate
def alone(*args, **kwargs):
    collectives = {name: getattr(torch.distributed, name) for name in
                   ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list", "barrier")}
    def refuse(*args, **kwargs):
        raise AssertionError("a collective inside generate")
    for name in collectives:
        setattr(torch.distributed, name, refuse)
    try:
        calls.append(generate(*args, **kwargs))
        return calls[-1]
    finally:
        for name, function in collectives.items():
            setattr(torch.distributed, name, function)
generation.engine.generate = alone
trainer.train()
weights = sum(p.double().abs().sum().item() for p in trainer.model.parameters() if p.requires_grad)
differences = logged(trainer, LOGP_DIFFERENCE)
folder.joinpath(f"rank{rank}.json").write_text(json.dumps({
    "prompt": calls[0][0].prompt_token_ids, "completions": [o.outputs[0].token_ids for o in calls[0]], "weights": weights,
    "difference": max(differences), "steps": generation.engine.stats().decode_steps,
}))
"""


# --------------------------------------------------------------------------------------------------------------- drivers

DRIVERS = ("qwen3_grpo_flex", "qwen3_grpo_naive", "qwen3_grpo_tpaged", "qwen3_grpo_vllm", "qwen3_moe_grpo")


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    config = tiny_models.llama(hidden_size=192, intermediate_size=128).config.to_dict() | {"eos_token_id": 319}
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(config))
    return path


def run_driver(name: str, *argv: str) -> int:
    module = runpy.run_path(str(SCRIPTS / f"{name}.py"))
    return module["main"](list(argv))


@pytest.mark.parametrize("name", DRIVERS)
def test_driver_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        run_driver(name, "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--max_steps", "--stats_path", "--num_generations", "--task"))
    assert ("--compile_mode" in text) == (name in ("qwen3_grpo_naive", "qwen3_grpo_tpaged"))


MOE_TINY = "qwen3-moe-tiny"


def two_steps(name, tiny_config, tmp_path, *flags) -> common.GRPOStats:
    path = tmp_path / f"{name}.json"
    common_flags = "--load_format dummy --task sums --max_steps 2 --n_prompts 2 --num_generations 4 --lora_rank 4 --learning_rate 1e-2"
    assert run_driver(name, *common_flags.split(), "--model_name", str(tiny_config), "--stats_path", str(path), *flags) == 0
    return common.GRPOStats.load(path)


@pytest.mark.parametrize("backend", ["flex", "naive", "tpaged"])
def test_two_steps_of_a_driver(backend, tiny_config, tmp_path):
    flags = ["--persistent_cb"] if backend == "tpaged" else []
    stats = two_steps(f"qwen3_grpo_{backend}", tiny_config, tmp_path, *flags)
    assert stats.finished and stats.backend == backend
    for values in (stats.step_wall_s, stats.rollout_wall_s, stats.losses, stats.rewards, stats.kl, stats.grad_norm):
        assert len(values) == 2 and all(math.isfinite(value) for value in values)
    assert all(rollout < step for rollout, step in zip(stats.rollout_wall_s, stats.step_wall_s))
    assert (stats.logp_difference[0] is not None) == (backend == "flex")
    assert stats.max_completion_length == common.SUM_TOKENS and stats.max_prompt_length == 17


@pytest.mark.parametrize(
    "flags",
    [
        "--lora_rank 0 --beta 0.1 --no-importance_sampling",
        "--load_in_4bit --dtype bfloat16 --bf16",
        "--walker hf --gradient_checkpointing",
        "--lora_mode merged --temperature 0.1 --top_p 0.97 --min_p 0.5 --top_k 5",
        "--model_name gemma-4-tiny --no-sleep --max_batch_size 4",
        "--task word_problems --chat_template grpo --max_completion_length 5",
    ],
)
def test_flags_of_the_flex_driver(flags, tiny_config, tmp_path):
    stats = two_steps("qwen3_grpo_flex", tiny_config, tmp_path, *flags.split())
    if "--no-importance_sampling" in flags:
        assert stats.finished and stats.logp_difference == [None, None]
    else:
        assert stats.finished and max(stats.logp_difference) < 0.1


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--backend naive",
        "--load_in_4bit",
        "--lora_targets all --compile_walker walker_fullgraph --num_generations 2",
        "--lora_targets experts --lora_mode merged",
    ],
)
def test_two_steps_with_a_mixture_of_experts(flags, tmp_path):
    """Random weights of the real class; without a GPU its tiny shapes are the default."""
    stats = two_steps("qwen3_moe_grpo", MOE_TINY, tmp_path, *flags.split())
    assert stats.finished and all(map(math.isfinite, (*stats.losses, *stats.kl))) and min(stats.grad_norm) > 0
    if "naive" not in flags:
        assert stats.backend == "flex" and max(stats.logp_difference) < (0.02 if "4bit" in flags else 1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--walker hf --compile_walker walker", "--compile_walker compiles a written walker"),
        ("--backend naive --no-sleep --lora_mode merged", "--backend naive has no engine for --lora_mode, --sleep"),
        ("--lora_rank 0 --lora_targets experts", "--lora_targets experts is of an adapter, and --lora_rank 0 trains every weight"),
        ("--load_in_4bit --lora_targets experts", "no stacked experts for an adapter to target .those in 4 bits"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        run_driver("qwen3_moe_grpo", *flags.split(), "--stats_path", str(tmp_path / "stats.json"))


def test_vllm_driver_says_what_is_missing(monkeypatch, tiny_config, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs vLLM"):
        run_driver("qwen3_grpo_vllm", "--stats_path", str(tmp_path / "stats.json"))


def find_vllm(monkeypatch):
    """As in an environment that has vLLM."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: True if name == "vllm" else find_spec(name, *rest))


def test_two_steps_of_the_vllm_driver(monkeypatch, tiny_config, tmp_path):
    """Everything but vLLM itself: what it is started with, the checkpoint it finds, and one weight sync a step."""
    engines = []

    class Engine:
        def __init__(self, model, **settings):
            files = {file.name for file in Path(model.name_or_path).iterdir()}
            assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
            loaded = type(model.get_base_model()).from_pretrained(model.name_or_path)
            weights = {name.replace(".base_layer", ""): value for name, value in model.get_base_model().state_dict().items()}
            assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
            self.settings, self.syncs = settings, 0
            engines.append(self)

        def sync_weights(self):
            self.syncs += 1

        def generate(self, prompts, **_):
            return prompts, [[7, 8, 9]] * len(prompts), [[[-5.5]] * 3] * len(prompts), None

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    find_vllm(monkeypatch)
    stats = two_steps("qwen3_grpo_vllm", tiny_config, tmp_path, "--gpu_memory_utilization", "0.2")
    assert stats.finished and stats.backend == "vllm" and None not in stats.logp_difference
    [engine] = engines
    assert engine.syncs == 2
    wanted = dict(mode="colocate", gpu_memory_utilization=0.2, max_model_length=17 + common.SUM_TOKENS, max_num_seqs=8)
    assert {name: engine.settings[name] for name in wanted} == wanted and not engine.settings["enable_sleep_mode"]


def test_what_vllm_raises_while_it_starts_is_told_whole(monkeypatch, tiny_config, tmp_path):
    def broken(*args, **kwargs):
        raise ValueError("1 validation error for VllmConfig\n  the fault itself")

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", broken)
    find_vllm(monkeypatch)
    with pytest.raises(ValueError, match="the fault itself"):
        two_steps("qwen3_grpo_vllm", tiny_config, tmp_path)


def test_a_run_terminated_before_its_first_step_leaves_no_checkpoint(monkeypatch, tiny_config, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    find_vllm(monkeypatch)
    written = []

    def terminated(*args, **kwargs):
        written.extend(tmp_path.glob("grpo-*/model/*.safetensors"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        two_steps("qwen3_grpo_vllm", tiny_config, tmp_path)
    assert written and not list(tmp_path.glob("grpo-*")) and signal.getsignal(signal.SIGTERM) is before


def test_a_compiler_that_fails_leaves_the_run_going(monkeypatch, tiny_config, tmp_path):
    def broken(function, **_):
        def fails(*args, **kwargs):
            raise RuntimeError("no kernel")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    stats = two_steps("qwen3_grpo_naive", tiny_config, tmp_path, "--compile_mode", "default")
    assert stats.finished and stats.extras["compile_failures"] == ["RuntimeError: no kernel"]


def test_a_run_that_fails_says_why_in_its_stats(monkeypatch, tiny_config, tmp_path):
    """As where a compiler fails in the backward, out of the forward's reach."""

    def broken(self, *args, **kwargs):
        raise RuntimeError("no kernel for this\nbackward")

    monkeypatch.setattr(GRPOTrainer, "training_step", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        two_steps("qwen3_grpo_naive", tiny_config, tmp_path)
    stats = common.GRPOStats.load(tmp_path / "qwen3_grpo_naive.json")
    assert not stats.finished and stats.error == "RuntimeError: no kernel for this"
    assert compare_grpo_runs.problems(stats, 0.5)[0] == "ended after 0 of 2 steps (RuntimeError: no kernel for this)"


def test_a_terminated_run_writes_its_stats(monkeypatch, tiny_config, tmp_path):
    decode = common.StepTimer.on_step_end

    def terminated(self, *args, **kwargs):
        decode(self, *args, **kwargs)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(common.StepTimer, "on_step_end", terminated)
    path = tmp_path / "stats.json"
    flags = "--load_format dummy --task sums --max_steps 4 --n_prompts 2 --num_generations 4 --lora_rank 4".split()
    assert run_driver("qwen3_grpo_flex", *flags, "--model_name", str(tiny_config), "--stats_path", str(path)) == 130
    stats = common.GRPOStats.load(path)
    assert not stats.finished and len(stats.step_wall_s) == 1


# ------------------------------------------------------------------------------------------------------- tasks and rewards


def test_rewards():
    completions = [" 12", " 12 13", [{"role": "assistant", "content": "so <SOLUTION>12</SOLUTION>"}], "none"]
    assert common.right_answer(completions, [12] * 4) == [1, 0, 1, 0]
    assert common.right_first_line([" 12\n1", "12 and", "", "1"], [12] * 4) == [1, 0, 0, 0]
    good = "two and two<end_working_out><SOLUTION>4</SOLUTION>"
    assert common.follows_format([good, good + good, "4", good.replace("</SOLUTION>", "")]) == [0.5, 0, 0, 0]


@pytest.mark.parametrize("name", common.GENERATED_TASKS)
def test_reasoning_gym_tasks(name):
    pytest.importorskip("reasoning_gym")
    task = common.reasoning_gym_task(name, 4, seed=0)
    assert len(task.problems) == 4
    assert task.rewards[0](completions=[str(answer) for answer in task.answers], answer=task.answers) == [1.0] * 4
    assert max(task.rewards[0](completions=["none"] * 4, answer=task.answers)) < 0.1


def test_own_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "2 + 2?", "answer": 4}\n{"prompt": "?"}\n')
    with pytest.raises(SystemExit, match="problems.jsonl:2: has no answer"):
        common.task_from_file(str(path), 4)


# -------------------------------------------------------------------------------------------------------------- comparison


def fake_run(tmp_path, name, **values):
    steps = 6
    defaults = dict(
        finished=True, step_wall_s=[9.0] * 3 + [1.0] * 3, rollout_wall_s=[0.5] * steps, losses=[0.1] * steps, rewards=[0.5] * steps,
        kl=[0.01] * steps, grad_norm=[1.0] * steps, logp_difference=[None] * steps,
    )  # fmt: skip
    stats = common.GRPOStats(name, "m", "cpu", {}, {}, steps, 4, 8, 8)
    for key, value in (defaults | values).items():
        setattr(stats, key, value)
    path = tmp_path / f"{name}.json"
    stats.save(path)
    return str(path)


def test_comparison(tmp_path, capsys):
    paths = [fake_run(tmp_path, "flex"), fake_run(tmp_path, "naive", rewards=[0.5, 0.7, 0.5, 0.5, 0.5, 0.5], step_wall_s=[4.0] * 6)]
    out = ["--compare_path", str(tmp_path / "grpo")]
    assert compare_grpo_runs.main([*paths, *out]) == 0
    text = capsys.readouterr().out
    assert "| flex, naive | reward | 0.2 | 0.03333 | 0.5 and 0.5 |" in text
    assert "| flex, naive | step time (s) | 5 | 4 | 1 and 4 |" in text
    assert (tmp_path / "grpo.png").exists() and (tmp_path / "grpo.md").exists()
    vllm = fake_run(tmp_path, "vllm", step_wall_s=[9.0] * 3 + [4.0] * 3, rollout_wall_s=[2.0] * 6)
    extras = {"graph_breaks": 3, "graph_break_reasons": ["a | call\nmore"], "compile_failures": []}
    tpaged = fake_run(tmp_path, "tpaged", config={"compile_mode": "default"}, extras=extras)
    assert compare_grpo_runs.main([paths[0], vllm, tpaged, *out]) == 0
    text = capsys.readouterr().out
    assert "| flex | 0 | 1 | 25 | 0.5 | 25 |" in text and "| vllm | 0 | 4 | 100 | 2 | 100 |" in text
    assert "| tpaged | default | 3 | a / call | - |" in text
    assert compare_grpo_runs.main([paths[0], fake_run(tmp_path, "drifting", kl=[0.1] * 4 + [1.9, 1.9]), *out]) == 1
    assert "KL 0.82 up to step 6 is outside" in capsys.readouterr().out
    assert compare_grpo_runs.main([paths[0], fake_run(tmp_path, "broken", losses=[0.1, math.nan]), *out]) == 1
    assert "losses not finite in step 2" in capsys.readouterr().out
