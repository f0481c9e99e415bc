"""transformers' continuous batching with one manager, KV cache and set of graphs for many calls.

`model.generate_batch` makes all three anew in each call; since 5.x it can keep them itself (`persistent_manager=True`), which is
what this wrapper builds on. What it adds is what a rollout needs and `generate_batch` does not offer: a length per request,
and all n completions of a prompt (`generate_batch` returns the first of `num_return_sequences`).

    python scripts/benchmarks/persistent_cb.py          # how much a kept manager saves, call by call
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from flex_weights import unwrapped


class PersistentCB:
    """Continuous batching that outlives a call; with `persistent=False` each call makes its own, as `generate_batch` does.

    The first call's prompts and lengths size the manager; a later call may be smaller, not larger. A PEFT model runs
    unmerged. The model's attention implementation is as before between calls.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        generation_config: GenerationConfig,
        config: ContinuousBatchingConfig,
        persistent: bool = True,
    ):
        self.model: PreTrainedModel = unwrapped(model)
        self.generation_config, self.config, self.persistent = generation_config, config, persistent

    def generate(self, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
        """Token ids of every completion, prompt by prompt; `num_return_sequences` of each. Raises RuntimeError if one fails."""
        n = self.generation_config.num_return_sequences or 1
        hints = WorkloadHints(max(map(len, prompts)), max(max_tokens), len(prompts) * n)
        with self.model.continuous_batching_context_manager(
            generation_config=self.generation_config,
            continuous_batching_config=self.config,
            persistent_manager=self.persistent,
            workload_hints=hints,
        ) as manager:
            parents = [manager.add_request(prompt, max_new_tokens=limit) for prompt, limit in zip(prompts, max_tokens)]
            if None in parents:
                raise RuntimeError("continuous batching took no more requests; its log says why")
            ids = [request for parent in parents for request in (parent, *(f"{parent}__child#{i}" for i in range(n - 1)))]
            completions = collect(manager, len(ids))
        return [completions[request] for request in ids]

    def close(self) -> None:
        """Gives the cache and the graphs back."""
        self.model.destroy_cached_continuous_batching_manager()


def collect(manager: ContinuousBatchingManager, count: int) -> dict[str, list[int]]:
    """The tokens of `count` finished requests, by request id."""
    completions: dict[str, list[int]] = {}
    while len(completions) < count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"continuous batching stopped with {count - len(completions)} requests unanswered")
            continue
        if result.error is not None:
            raise RuntimeError(f"request {result.request_id} failed: {result.error}")
        if result.is_finished():
            completions[result.request_id] = result.generated_tokens
    return completions


def sampling_config(temperature: float, top_k: int, top_p: float, min_p: float, n: int = 1) -> GenerationConfig:
    """Lengths forced: no id ends a sequence. Filters that are off stay out of the config, as they would cost a pass over the logits."""
    options = {"do_sample": temperature > 0, "num_return_sequences": n, "eos_token_id": -1, "pad_token_id": 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k}
        options |= {"top_p": top_p} if top_p < 1 else {}
        options |= {"min_p": min_p} if min_p > 0 else {}
    return GenerationConfig(**options)


def batching_config(
    device: torch.device, prompts: Sequence[list[int]], max_tokens: Sequence[int], n: int = 1, use_cuda_graph: bool | None = None
) -> ContinuousBatchingConfig:
    """transformers' own sizes on a GPU (nearly all of its memory); on a CPU what the requests need."""
    if device.type == "cuda":
        return ContinuousBatchingConfig(use_cuda_graph=True if use_cuda_graph is None else use_cuda_graph)
    block_size = 32
    blocks = n * sum(-(-(len(prompt) + limit) // block_size) + 1 for prompt, limit in zip(prompts, max_tokens))
    tokens = min(1024, n * sum(map(len, prompts)))
    return ContinuousBatchingConfig(block_size=block_size, num_blocks=blocks, max_batch_tokens=max(tokens, n * len(prompts)))


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    from flex_cli import add_model_arguments, add_prompt_arguments, integer

    add_model_arguments(parser, default_model="unsloth/Qwen3-4B-Base", with_walker=False)
    add_prompt_arguments(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--max_new_tokens", metavar="N", type=integer(1), default=128, help="of every completion")
    group.add_argument("--n_rounds", metavar="N", type=integer(1), default=3, help="calls of each kind, after one to warm up")
    group.add_argument("--seed", metavar="N", type=integer(0), default=0, help="of dummy weights")
    group.add_argument(
        "--capture_cudagraph", action=argparse.BooleanOptionalAction, default=None, help="default: where there is a GPU"
    )


def load_bench(args: argparse.Namespace) -> tuple[PreTrainedModel, list[list[int]]]:
    """The model and the prompts' token ids that the flags ask for."""
    from flex_cli import load_prompts, template_prompts
    from flex_models import load_model

    raw = load_prompts(args)
    model, tokenizer = load_model(args)
    model.generation_config = GenerationConfig()
    prompts = template_prompts(args, raw, model.config, tokenizer)
    return model, [prompt.token_ids for prompt in prompts if prompt.error is None]


def bench(name: str, generate: Callable[[], list[list[int]]], n_rounds: int) -> None:
    """Prints the first call's seconds, with whatever it sets up, and the median rate of the others."""
    started = time.perf_counter()
    generate()
    first, rates = time.perf_counter() - started, []
    for _ in range(n_rounds):
        started = time.perf_counter()
        tokens = sum(map(len, generate()))
        rates.append(tokens / (time.perf_counter() - started))
    print(f"{name:<44}{statistics.median(rates):9.1f} tok/s median of {n_rounds}, first call {first:.1f} s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_bench_arguments(parser)
    args = parser.parse_args(argv)
    model, prompts = load_bench(args)
    lengths = [args.max_new_tokens] * len(prompts)
    config = batching_config(model.device, prompts, lengths, use_cuda_graph=args.capture_cudagraph)
    for name, persistent in (("a manager per call, as generate_batch", False), ("one manager, kept", True)):
        batching = PersistentCB(model, sampling_config(0.0, 0, 1.0, 0.0), config, persistent)
        bench(name, lambda: batching.generate(prompts, lengths), args.n_rounds)
        batching.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
