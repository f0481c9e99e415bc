"""The peers' harness: refusals, the same tokens from every backend that runs on a CPU, the comparison, and the tpaged helpers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import cb_sync_driver
import cb_vs_vllm_generation as harness
import flash_attn_fa4_shim
import peer_backends
import persistent_cb
from conftest import SCRIPTS
from lora_adapters import save_fresh_adapter
from peer_backends import PEERS, Workload
from persistent_cb import PersistentCB, batching_config, sampling_config
from prompts import Prompt

ON_CPU = ("flex", "hf_naive", "tpaged")
pytestmark = pytest.mark.usefixtures("one_thread")


def arguments(*flags: str):
    args = harness.parse_arguments(["--model_name", "embedded", "--dtype", "float32", *flags])
    args.max_batch_size = 4
    return args


@pytest.fixture(scope="session")
def embedded(embedded_path):
    return AutoConfig.from_pretrained(embedded_path), AutoTokenizer.from_pretrained(embedded_path)


@pytest.fixture(scope="session")
def workload(embedded) -> Workload:
    _, tokenizer = embedded
    texts = ("The capital of France is", "One, two, three, four, five, six,", "Water boils at")
    prompts = [Prompt("test", text, tokenizer.encode(text)) for text in texts]
    return Workload("mixed 3", prompts, max_tokens=[9, 4, 7])


def completions_of(name: str, workload: Workload, config, *flags: str) -> list[list[int]]:
    peer = PEERS[name](arguments("--temperature", "0", *flags), config, [workload])
    peer.start(workload)
    return peer.generate(workload, seed=0).completions


@pytest.fixture(scope="session")
def expected(embedded_path, workload) -> list[list[int]]:
    """Hugging Face greedy, one prompt at a time."""
    return greedy(AutoModelForCausalLM.from_pretrained(embedded_path, dtype=torch.float32), workload)


def greedy(model, workload: Workload) -> list[list[int]]:
    outputs = []
    for prompt, limit in zip(workload.prompts, workload.max_tokens):
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(input_ids=ids, max_new_tokens=limit, do_sample=False, eos_token_id=None, pad_token_id=0)
        outputs.append(output[0, len(prompt.token_ids) :].tolist())
    return outputs


# ---------------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("name", ON_CPU)
def test_every_backend_gives_hugging_faces_tokens(name, workload, embedded, expected):
    assert completions_of(name, workload, embedded[0]) == expected


@pytest.fixture(scope="session")
def adapter(embedded, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("adapter")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(embedded[0])
    save_fresh_adapter(model, path, rank=4)
    weights = path / "adapter_model.safetensors"
    state = load_file(weights)
    save_file({name: 20 * tensor if "lora_B" in name else tensor for name, tensor in state.items()}, weights)
    return str(path)


def test_every_backend_applies_the_adapter(adapter, workload, embedded, embedded_path, expected):
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(embedded_path, dtype=torch.float32)
    adapted = greedy(PeftModel.from_pretrained(base, adapter).get_base_model(), workload)
    assert adapted != expected
    for name in ON_CPU:
        assert completions_of(name, workload, embedded[0], "--lora_adapter", adapter) == adapted, name


def test_four_bit_weights(workload, embedded, expected):
    """In the engine as in transformers; one token of difference would show a weight that was not quantized, or not the same way."""
    flex, naive = (completions_of(name, workload, embedded[0], "--load_in_4bit") for name in ("flex", "hf_naive"))
    assert flex == naive != expected


@pytest.mark.parametrize("name", ON_CPU)
def test_groups_come_prompt_by_prompt_and_differ(name, workload, embedded):
    group = Workload("groups 2x3", workload.prompts[:2], [6, 6], n=3)
    peer = PEERS[name](arguments("--temperature=2"), embedded[0], [group])
    peer.start(group)
    completions = peer.generate(group, seed=1).completions
    assert [len(completion) for completion in completions] == [6] * 6
    assert len({tuple(completion) for completion in completions}) == 6


# ----------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("script", ["cb_vs_vllm_generation", "cb_sync_driver", "persistent_cb"])
def test_help(script, capsys):
    main = {"cb_sync_driver": cb_sync_driver, "persistent_cb": persistent_cb}.get(script, harness).main
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert script in capsys.readouterr().out


MISSING = [name for name in ("vllm", "unsloth_fi_false") if peer_backends.importlib.util.find_spec(PEERS[name].package) is None]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(([f"--backend={name}"], "is not installed") for name in MISSING),
        (["--backend=unsloth_fi_false", "--load_format=dummy"], "checkpoints only"),
        (["--backend=vllm", "--load_format=dummy", "--model_name=qwen3-0.6b", "--load_in_4bit"], "needs a real model"),
        (["--backend=hf_compile", "--load_in_4bit"], "does not compile a bitsandbytes model"),
        (["--backend=hf_naive", "--attn_impl=flash_attention_2"], "--backend hf_naive: "),
        (["--load_in_4bit", "--lora_mode=merged"], "--lora_mode merged"),
        (["--verify_no_drift"], "--verify_no_drift"),
        (["--n=2"], "--groups"),
        (["--stop=x"], "length fixed"),
        (["--prompt= "], "empty"),
        (["--compare", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_a_backend_cannot_do_is_one_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        harness.main(["--model_name=embedded", "--max_new_tokens=2", *flags])
    text = str(stopped.value)
    assert text.startswith("error: ") and message in text and "\n" not in text


@pytest.mark.parametrize("flag", ["--backend=sglang", "--groups=4by2", "--groups=0x2", "--batch_sizes=8,x", "--mixed=0", "--mixed=9x20x10"])
def test_malformed_flags_are_refused_by_name(flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        harness.parse_arguments([flag])
    assert stopped.value.code == 2
    assert flag.partition("=")[0] in capsys.readouterr().err


def test_importing_the_harness_imports_no_peer():
    code = "import cb_vs_vllm_generation, sys; print({'vllm', 'unsloth', 'flash_attn', 'peft', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_a_backend_that_cannot_run_does_not_stop_the_others(tmp_path, monkeypatch):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode=int("vllm" in command))

    monkeypatch.setattr(harness.subprocess, "run", run)
    compared = []
    monkeypatch.setattr(harness, "compare", lambda paths, compare_path: compared.extend(paths))
    flags = ["--backend=vllm,flex", f"--stats_path={tmp_path}/peers.json", "--vllm_python=/other/python"]
    assert harness.main(flags) == 1
    assert [command[0] for command in commands] == ["/other/python", sys.executable]
    assert compared == [f"{tmp_path}/peers_flex.json"]
    for command, name in zip(commands, ("vllm", "flex")):
        assert harness.parse_arguments(command[2:]).backend == [name]


# ---------------------------------------------------------------------------------------------------------------- workloads


def test_workloads_do_not_depend_on_the_backend(embedded):
    config, tokenizer = embedded
    flags = ("--batch_sizes=2,3", "--groups=2x2x5", "--mixed=6", "--prompt_tokens=7", "--max_new_tokens=40")
    made = [harness.make_workloads(arguments(*flags), tokenizer, config) for _ in range(2)]
    assert [w.fingerprint for w in made[0]] == [w.fingerprint for w in made[1]]
    batch, larger, groups, mixed = made[0]
    assert [w.num_sequences for w in made[0]] == [2, 3, 4, 6]
    assert larger.prompts[:2] == batch.prompts and len({w.fingerprint for w in made[0]}) == 4
    assert {len(prompt.token_ids) for prompt in groups.prompts} == {5}
    assert len(set(mixed.max_tokens)) > 1 and all(16 <= tokens <= 40 for tokens in mixed.max_tokens)
    changed = harness.make_workloads(arguments(*flags, "--seed=1"), tokenizer, config)
    assert changed[3].max_tokens != mixed.max_tokens


def test_lognormal_lengths_have_their_median():
    lengths = harness.lognormal_lengths(20_000, 256, 512, seed=0)
    assert sorted(lengths)[10_000] == pytest.approx(256, rel=0.03)
    assert max(lengths) == 512 and min(lengths) >= harness.MIXED_SHORTEST


def test_a_backend_that_stops_early_is_an_error(workload):
    completions = [[1] * tokens for tokens in workload.max_tokens]
    harness.check_lengths(completions, workload)
    with pytest.raises(SystemExit, match=r"wrong lengths at \[1\]"):
        harness.check_lengths([completions[0], [1], completions[2]], workload)


# --------------------------------------------------------------------------------------------------------------- comparison


@pytest.fixture(scope="module")
def stats_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stats") / "flex.json"
    flags = ["--model_name=embedded", "--backend=flex", "--batch_sizes=2", "--max_new_tokens=12", "--temperature=0", "--n_rounds=2"]
    assert harness.main([*flags, f"--stats_path={path}"]) == 0
    return path


def test_stats_are_the_shared_schema(stats_path):
    (run,) = harness.read_runs([str(stats_path)])
    assert (run.backend, run.workload, run.num_sequences) == ("flex", "batch 2", 2)
    assert len(run.rounds) == 2 and all(r.generated_tokens == 24 and r.prefill_seconds > 0 for r in run.rounds)
    assert run.coherent is True and run.accuracy is not None and run.attention_backend == "sdpa"
    assert json.loads(stats_path.read_text())[0]["tps_median"] == run.tps_median > 0


def test_comparison_of_two_backends(stats_path, tmp_path, capsys):
    peer = json.loads(stats_path.read_text())
    for run in peer:
        run["backend"], run["card_gb"] = "vllm", 117.0
        for r in run["rounds"]:
            r["total_seconds"] *= 2
    (tmp_path / "vllm.json").write_text(json.dumps(peer))
    assert harness.main(["--compare", str(stats_path), str(tmp_path / "vllm.json"), f"--compare_path={tmp_path}/out"]) == 0
    table = (tmp_path / "out.md").read_text()
    flex, vllm = (line.split(" | ") for line in table.splitlines()[2:])
    header = table.splitlines()[0].split(" | ")
    percent, card = header.index("% of vLLM"), header.index("on the card GB")
    assert (flex[percent], vllm[percent], vllm[card]) == ("200", "100", "117.0")
    assert table in capsys.readouterr().out
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_percent_of_vllm_needs_the_same_contents_and_lora(stats_path):
    (own,), (rival,) = harness.read_runs([str(stats_path)]), harness.read_runs([str(stats_path)])
    rival.backend = "vllm"
    assert harness.percent_of_vllm(own, [own, rival]) == pytest.approx(100)
    rival.lora = {"adapter": "a", "mode": "unmerged"}
    assert harness.percent_of_vllm(own, [own, rival]) is None
    rival.lora, rival.fingerprint = None, "other prompts"
    assert harness.percent_of_vllm(own, [own, rival]) is None
    assert "batch 2' |" in harness.comparison_table([own, rival])


@pytest.mark.parametrize(
    ("text", "coherent"),
    [
        ("The bakery fills 18 trays, so it has 432 rolls.", True),
        ("4 4 4 4 4 4 4 4", False),
        ("the the the the the the the the", False),
        ("�\x00�\x00 ab � cd �� ef", False),
        ("", False),
    ],
)
def test_coherence(text, coherent):
    assert harness.is_coherent(text) == coherent


# ------------------------------------------------------------------------------------- transformers' continuous batching


@pytest.fixture(scope="module")
def model(embedded_path):
    return AutoModelForCausalLM.from_pretrained(embedded_path, dtype=torch.float32).eval()


def test_a_kept_manager_gives_the_same_tokens_again(model, workload, expected):
    prompts = [prompt.token_ids for prompt in workload.prompts]
    attention = model.config._attn_implementation
    batching = PersistentCB(model, sampling_config(0, 0, 1, 0), batching_config(model.device, prompts, workload.max_tokens))
    for _ in range(2):
        assert batching.generate(prompts, workload.max_tokens) == expected
        assert model.config._attn_implementation == attention
    manager = model._cached_continuous_batching_manager
    assert batching.generate(prompts[:1], [3]) == [expected[0][:3]]
    assert model._cached_continuous_batching_manager is manager
    batching.close()
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_the_sync_driver_drains_its_queue_and_goes_on(model, workload, expected):
    prompts = [prompt.token_ids for prompt in workload.prompts]
    attention = model.config._attn_implementation
    config = batching_config(model.device, prompts, workload.max_tokens)
    driver = cb_sync_driver.SyncDriver(model, config, max(map(len, prompts)), max(workload.max_tokens), len(prompts))
    assert driver.generate(prompts, workload.max_tokens) == expected
    assert driver.drive_until_empty() == {}
    ids = [driver.add(prompts[1], 4), driver.add(prompts[0], 2)]
    assert driver.drive_until_empty() == {ids[0]: expected[1][:4], ids[1]: expected[0][:2]}
    driver.close()
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(("lengths", "captured"), [([1, 1], True), ([1, 5], False), ([7], False)])
def test_only_pure_decode_is_captured(lengths, captured):
    runner = object.__new__(cb_sync_driver.DecodeGraphRunner)
    runner.use_cuda_graph_varlen = runner.use_cuda_graph_decode = True
    runner._compiled_varlen = runner._compiled_decode = lambda *_: None
    runner.inputs_and_outputs = type("Inputs", (), {})()
    runner.inputs_and_outputs.requests_in_batch = [type("Request", (), {"query_length": n})() for n in lengths]
    for use_block_table in (False, True):
        assert runner._get_forward_fn(use_block_table)[1] == captured


# ------------------------------------------------------------------------------------------------------------- the FA4 shim


def fa4_varlen(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, **options):
    """The head of FlashAttention 4's signature."""
    return {"qv": qv, "lengths": (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), **options}


def test_the_shim_translates_positions_and_windows():
    seen = flash_attn_fa4_shim.adapt(fa4_varlen)("q", "k", "v", 1, 2, 3, 4, causal=True, window_size=(-1, -1))
    assert seen == {"qv": None, "lengths": (1, 2, 3, 4), "causal": True, "window_size": (None, None)}
    seen = flash_attn_fa4_shim.adapt(fa4_varlen)("q", "k", "v", cu_seqlens_q=1, cu_seqlens_k=2, window_size=(127, 0))
    assert seen["lengths"] == (1, 2, None, None) and seen["window_size"] == (127, 0)


def test_the_shim_adapts_version_4_alone(monkeypatch):
    def lazy_imports(implementation, *args, **kwargs):
        return "flash", fa4_varlen, None, "pad", "unpad"

    monkeypatch.setattr(flash_attn_fa4_shim.flash_utils, "_lazy_imports", lazy_imports)
    flash_attn_fa4_shim.install()
    flash_attn_fa4_shim.install()
    load = flash_attn_fa4_shim.flash_utils._lazy_imports
    assert load("flash_attention_2")[1] is fa4_varlen
    flash, varlen, *others = load("paged|flash_attention_4")
    assert varlen.__wrapped__ is fa4_varlen and (flash, others) == ("flash", [None, "pad", "unpad"])
