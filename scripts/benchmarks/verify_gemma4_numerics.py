"""Is the engine right? Gemma-4 in the engine against plain Hugging Face on the same prompts; exit status 1 if a gate fails.

    python scripts/benchmarks/verify_gemma4_numerics.py          # gemma-4-E2B-it on a GPU, random weights of a tiny one on a CPU
    python scripts/benchmarks/verify_gemma4_numerics.py --model_name path/to/gemma-4 --dtype float32
    python scripts/benchmarks/verify_gemma4_numerics.py --load_format dummy --model_name gemma-4-e2b-it --json report.json

Three models run the same prompts, each with weights of its own or of the one it was taken from: the whole
Gemma4ForConditionalGeneration, its language model alone as a Gemma4ForCausalLM ("text"), and the engine. The gates compare the
engine with the text model, for that is the function which the engine computes; numerics.py says what they ask. The whole model
is reported beside it, on the prompts' last positions. It may differ from the text model, though in transformers 5.17 it does not
on ordinary text:

* It replaces ids of image, audio and video placeholders by padding before both embeddings; the text model embeds them as they are.
* It masks bidirectionally where the config says so and the processor has marked images; the text model is always causal.
* Before the keys of shared layers were passed from layer to layer (`shared_kv_states`), upper layers read them from the cache, and
  a forward without a cache (`use_cache=False`, gradient checkpointing) gave other logits. Every reference here runs with one.

Logits are capped once, by tanh, in all three. A second cap would fail the log-probability gate.
"""

from __future__ import annotations

import sys

from gemma4_flex_inference import DEFAULT_MODEL, TINY_MODEL, Gemma4Walker, require_gemma4, text_model
from numerics import run_verification


def main(argv: list[str] | None = None) -> int:
    require_gemma4()
    return run_verification(__doc__, DEFAULT_MODEL, Gemma4Walker, argv, TINY_MODEL, text_model)


if __name__ == "__main__":
    sys.exit(main())
