"""transformers' continuous batching with one manager, KV cache and set of graphs for many calls.

`model.generate_batch` makes all three anew in each call; since 5.x it can keep them itself (`persistent_manager=True`), which is
what this wrapper builds on. What it adds is what a rollout needs and `generate_batch` does not offer: a length per request,
and all n completions of a prompt (`generate_batch` returns the first of `num_return_sequences`).

    python scripts/benchmarks/persistent_cb.py          # how much a kept manager saves, call by call
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints


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
        self.model: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
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
    options = {"do_sample": temperature > 0, "num_return_sequences": n, "eos_token_id": -1, "pad_token_id": 0, "top_k": 0}
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
