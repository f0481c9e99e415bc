"""The backends that cb_vs_vllm_generation.py measures: one class each, the same few methods, token ids in and out.

A backend imports its library only when it is made, so that this module loads where none of them is installed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from embedded_model import embedded_model_path
import flash_attn_fa4_shim
import flex_memory
from flex_cli import engine_config, make_walker, sampling_params
from flex_engine import EngineConfig, EngineStats, FlexEngine, SamplingParams
from flex_models import EMBEDDED, default_device, find_config, load_model, resolve_dtype
from flex_weights import unwrapped
from lora_adapters import load_adapter
from persistent_cb import PersistentCB, batching_config, sampling_config
from prompts import Prompt
from written_walkers import text_model, walker_class_of

# ------------------------------------------------------------------------------------------------------------ the workload


@dataclass(frozen=True)
class Workload:
    """What every backend is given: prompts, how many completions of each, and how long each prompt's completions are."""

    name: str
    prompts: list[Prompt]
    max_tokens: list[int]
    n: int = 1

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def max_seq_len(self) -> int:
        return max(len(prompt.token_ids) + tokens for prompt, tokens in zip(self.prompts, self.max_tokens))

    @property
    def mean_context(self) -> int:
        """Keys that a decode step's row sees, on average over the generated tokens."""
        pairs = [(len(prompt.token_ids), new) for prompt, new in zip(self.prompts, self.max_tokens)]
        return sum(new * (prompt + new // 2) for prompt, new in pairs) // sum(self.max_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two runs exactly if they were given the same token ids, lengths and n."""
        content = json.dumps([[prompt.token_ids for prompt in self.prompts], self.max_tokens, self.n])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass
class Generated:
    """The token ids of every completion, prompt by prompt, and what only some backends can tell."""

    completions: list[list[int]]
    engine: EngineStats | None = None


# ------------------------------------------------------------------------------------------------------------ the contract


class Peer:
    """One backend. Made once per process; `start` comes before each workload's warm-up, `generate` is what is timed."""

    package: str | None = None  # the library it needs besides this project's own requirements
    install: str = ""

    @classmethod
    def refusal(cls, args: argparse.Namespace) -> str | None:
        """Why this backend can't run what is asked, in one line."""
        if cls.package and importlib.util.find_spec(cls.package) is None:
            return f"{cls.package} is not installed in this environment ({cls.install})"
        return None

    def __init__(self, args: argparse.Namespace, config: PreTrainedConfig, workloads: Sequence[Workload]):
        """Loads the model. `workloads` are all that will come, for backends that are sized once."""
        self.args, self.config = args, config
        self.attention = ""
        self.fallbacks: list[str] = []

    def start(self, workload: Workload) -> None:
        """Makes what this workload needs and the timed call does not."""

    def generate(self, workload: Workload, seed: int) -> Generated:
        raise NotImplementedError

    def forget_prompts(self) -> None:
        """Comes before each round: what a cache has kept of the last one's prompts must not speed up this one."""

    def peak_memory(self) -> tuple[float, float] | None:
        """Peak allocated and peak reserved, 10^9 bytes, since `start`; None where there is no GPU."""
        return flex_memory.peak_memory_gb() if torch.cuda.is_available() else None


def release_memory() -> None:
    """What the last workload left goes back to the GPU, and the peaks count anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        flex_memory.reset_peak_memory()


# -------------------------------------------------------------------------------------------------------------------- flex


class Flex(Peer):
    """This project's engine, made anew for each workload, so that it takes no more memory than that one needs."""

    def __init__(self, args: argparse.Namespace, config: PreTrainedConfig, workloads: Sequence[Workload]):
        super().__init__(args, config, workloads)
        model = text_model(load_model(args)[0])
        self.walker = make_walker(with_adapter(model, args), walker_class_of(model), args)
        self.engine: FlexEngine | None = None

    def start(self, workload: Workload) -> None:
        self.engine = None  # its pool and graphs go before the next are made
        release_memory()
        self.engine = FlexEngine(self.walker, None, self._engine_config(workload))
        self.attention, self.fallbacks = self.engine.backend.name, self.engine.fallbacks

    def _engine_config(self, workload: Workload) -> EngineConfig:
        sized = argparse.Namespace(**vars(self.args))
        sized.n, sized.max_new_tokens = workload.n, max(workload.max_tokens)
        sized.max_seq_len = self.args.max_seq_len or workload.max_seq_len
        sized.max_batch_size = min(self.args.max_batch_size, workload.num_sequences)
        return engine_config(sized, workload.prompts, self.config)

    def generate(self, workload: Workload, seed: int) -> Generated:
        self.engine.reset_stats()
        params = [request_params(self.args, workload, tokens, seed) for tokens in workload.max_tokens]
        outputs = self.engine.generate([prompt.token_ids for prompt in workload.prompts], params)
        return Generated([c.token_ids for output in outputs for c in output.outputs], self.engine.stats())


def request_params(args: argparse.Namespace, workload: Workload, max_tokens: int, seed: int) -> SamplingParams:
    """The sampling flags for one prompt, its length forced."""
    params = sampling_params(args)
    params.max_tokens, params.n, params.seed, params.ignore_eos = max_tokens, workload.n, seed, True
    return params


# -------------------------------------------------------------------------------------------------------------------- vllm

CPU_MEMORY_SHARE = 0.3  # vLLM's default share of a GPU, 0.92, is also what it wants of a host's memory


class Vllm(Peer):
    """vLLM's offline `LLM`, one for all workloads. Token ids only: neither side spends time on text.

    It samples from one generator: a seed per request would take it off its fast path. Where requests may share prefixes, the
    cache is emptied before each round, so that no round finds the last one's prompts.
    """

    package = "vllm"
    install = "an environment of its own, see README; --vllm_python names its interpreter"

    def __init__(self, args: argparse.Namespace, config: PreTrainedConfig, workloads: Sequence[Workload]):
        super().__init__(args, config, workloads)
        # A forked engine process can't use CUDA once this one has asked for a device; functions are sent to it pickled.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        device = "cuda" if torch.cuda.is_available() else "cpu"  # asked without a CUDA context in this process
        options = {
            "model": self._model_path(),
            "skip_tokenizer_init": True,
            "load_format": args.load_format,
            "dtype": str(resolve_dtype(args.dtype, torch.device(device))).removeprefix("torch."),
            "max_model_len": max(workload.max_seq_len for workload in workloads),
            "max_num_seqs": args.max_batch_size,
            "enable_prefix_caching": args.prefix_caching,
            "enforce_eager": args.enforce_eager,
            "generation_config": "vllm",  # explicit sampling only, nothing from the model's own file
            "seed": args.seed,
        }
        if args.gpu_memory_utilization is not None:
            options["gpu_memory_utilization"] = args.gpu_memory_utilization
        elif device == "cpu":
            options["gpu_memory_utilization"] = CPU_MEMORY_SHARE
        if args.load_in_4bit:
            options["quantization"] = "bitsandbytes"
        self.lora_request = None
        if args.lora_adapter:
            from vllm.lora.request import LoRARequest

            rank = json.loads((Path(args.lora_adapter) / "adapter_config.json").read_text())["r"]
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm_max_lora_rank(rank)}
            self.lora_request = LoRARequest("adapter", 1, str(Path(args.lora_adapter).resolve()))
        self.llm = LLM(**options)
        self.attention = "vllm"

    @classmethod
    def refusal(cls, args: argparse.Namespace) -> str | None:
        if args.load_in_4bit and args.load_format == "dummy":
            return "vLLM quantizes checkpoints as it loads them: --load_in_4bit needs a real model"
        if args.lora_adapter and not (Path(args.lora_adapter) / "adapter_config.json").is_file():
            return f"--lora_adapter {args.lora_adapter} is no local folder with an adapter, which is what vLLM is given"
        return super().refusal(args)

    def _model_path(self) -> str:
        """What vLLM loads from: for random weights a folder with nothing but the config."""
        if self.args.load_format != "dummy":
            return str(embedded_model_path()) if self.args.model_name == EMBEDDED else self.args.model_name
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-dummy-")
        find_config(self.args.model_name).save_pretrained(self._folder.name)
        return self._folder.name

    def start(self, workload: Workload) -> None:
        """Nothing: the engine was sized for every workload at once."""

    def generate(self, workload: Workload, seed: int) -> Generated:
        from vllm import SamplingParams as VllmParams
        from vllm import TokensPrompt

        args = self.args
        params = [
            VllmParams(
                n=workload.n, max_tokens=tokens, ignore_eos=True, detokenize=False,
                temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
            )
            for tokens in workload.max_tokens
        ]  # fmt: skip
        prompts = [TokensPrompt(prompt_token_ids=prompt.token_ids) for prompt in workload.prompts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self.lora_request)
        return Generated([list(completion.token_ids) for output in outputs for completion in output.outputs])

    def forget_prompts(self) -> None:
        self.llm.reset_prefix_cache()

    def peak_memory(self) -> tuple[float, float] | None:
        return self.llm.collective_rpc(worker_peak_memory)[0]


def worker_peak_memory(worker: object) -> tuple[float, float] | None:
    """Runs in vLLM's engine process, since its start."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9


def vllm_max_lora_rank(rank: int) -> int:
    """vLLM takes only these values of max_lora_rank."""
    return next(allowed for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512) if allowed >= rank)


# ------------------------------------------------------------------------------------------------------------ transformers


class HFNaive(Peer):
    """`model.generate` on left-padded batches of --max_batch_size: a batch runs until its longest completion is done."""

    options: dict[str, object] = {}

    def __init__(self, args: argparse.Namespace, config: PreTrainedConfig, workloads: Sequence[Workload]):
        super().__init__(args, config, workloads)
        self.max_seq_len = max(workload.max_seq_len for workload in workloads)
        self.model = self.load()
        self.attention = self.model.config._attn_implementation
        # What a checkpoint's own file says (penalties, say) must not reach only this backend.
        self.model.generation_config = GenerationConfig()

    def load(self) -> PreTrainedModel:
        model = load_model(self.args)[0]
        if self.args.attn_impl:
            if self.args.attn_impl == flash_attn_fa4_shim.IMPLEMENTATION:
                flash_attn_fa4_shim.install()
            model.set_attn_implementation(self.args.attn_impl)
        return unwrapped(with_adapter(model, self.args))

    def start(self, workload: Workload) -> None:
        release_memory()

    def generate(self, workload: Workload, seed: int) -> Generated:
        torch.manual_seed(seed)
        size = max(1, self.args.max_batch_size // workload.n)
        completions: list[list[int]] = []
        for first in range(0, len(workload.prompts), size):
            chunk = slice(first, first + size)
            completions += self._generate_batch(workload.prompts[chunk], workload.max_tokens[chunk], workload.n)
        return Generated(completions)

    def _generate_batch(self, prompts: list[Prompt], max_tokens: list[int], n: int) -> list[list[int]]:
        width = max(len(prompt.token_ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        args = self.args
        sampling = sampling_config(args.temperature, args.top_k, args.top_p, args.min_p, n).to_diff_dict()
        sampling["eos_token_id"] = None  # a negative one is continuous batching's way to say so
        output = self.model.generate(
            input_ids=ids.to(self.model.device), attention_mask=mask.to(self.model.device),
            max_new_tokens=max(max_tokens), **sampling, **self.options,
        )  # fmt: skip
        rows = output[:, width:].tolist()
        return [row[:limit] for row, limit in zip(rows, (limit for limit in max_tokens for _ in range(n)))]


class HFCompile(HFNaive):
    """`model.generate` with a static cache, for which transformers compiles the decode step by itself."""

    options = {"cache_implementation": "static"}

    def __init__(self, args: argparse.Namespace, config: PreTrainedConfig, workloads: Sequence[Workload]):
        super().__init__(args, config, workloads)
        if self.model.device.type != "cuda":  # transformers compiles by itself on accelerators only
            compile_config = CompileConfig(mode="default")
            compile_config._compile_all_devices = True
            self.options = self.options | {"compile_config": compile_config}

    @classmethod
    def refusal(cls, args: argparse.Namespace) -> str | None:
        if args.load_in_4bit:
            return "transformers does not compile a bitsandbytes model; use hf_naive with --load_in_4bit"
        return super().refusal(args)


class TransformersPaged(HFNaive):
    """transformers' continuous batching, its CUDA graphs on; a new manager in each call unless --persistent_cb."""

    def start(self, workload: Workload) -> None:
        args, prompts = self.args, [prompt.token_ids for prompt in workload.prompts]
        self.model.destroy_cached_continuous_batching_manager()
        release_memory()
        self.batching = PersistentCB(
            self.model,
            sampling_config(args.temperature, args.top_k, args.top_p, args.min_p, workload.n),
            batching_config(self.model.device, prompts, workload.max_tokens, workload.n, args.capture_cudagraph),
            args.persistent_cb,
        )
        self.batching.config.max_requests_per_batch = args.max_batch_size
        self.attention = f"paged|{self.attention.removeprefix('paged|')}"

    def generate(self, workload: Workload, seed: int) -> Generated:
        self.batching.config.seed = seed
        return Generated(self.batching.generate([prompt.token_ids for prompt in workload.prompts], workload.max_tokens))


class Unsloth(HFNaive):
    """Unsloth's own model class, `fast_inference=False` (with it on, Unsloth runs vLLM)."""

    package = "unsloth"
    install = "pip install unsloth, which needs a CUDA GPU"

    @classmethod
    def refusal(cls, args: argparse.Namespace) -> str | None:
        if args.load_format == "dummy":
            return "Unsloth loads checkpoints only: --load_format dummy is not possible"
        return super().refusal(args)

    def load(self) -> PreTrainedModel:
        from unsloth import FastLanguageModel

        args = self.args
        name = str(embedded_model_path()) if args.model_name == EMBEDDED else args.model_name
        model, _ = FastLanguageModel.from_pretrained(
            model_name=name, max_seq_length=self.max_seq_len, dtype=resolve_dtype(args.dtype, default_device()),
            load_in_4bit=args.load_in_4bit, fast_inference=False,
        )  # fmt: skip
        model = with_adapter(model, args)
        FastLanguageModel.for_inference(model)
        return unwrapped(model)


def with_adapter(model: PreTrainedModel, args: argparse.Namespace) -> torch.nn.Module:
    """The model with the adapter's LoRA layers put in, unmerged. Raises ValueError naming a tensor that has no place there."""
    return load_adapter(model, args.lora_adapter) if args.lora_adapter else model


PEERS: dict[str, type[Peer]] = {
    "flex": Flex,
    "vllm": Vllm,
    "tpaged": TransformersPaged,
    "unsloth_fi_false": Unsloth,
    "hf_naive": HFNaive,
    "hf_compile": HFCompile,
}
