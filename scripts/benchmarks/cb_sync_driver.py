"""transformers' continuous batching driven from the caller's own thread, with graphs for pure decode steps only.

transformers runs its loop in a background thread and hands results over a queue. `SyncDriver` runs the same parts in line: no second
thread that competes for the interpreter, an exception where it happens, and a call that returns when the work is done. With
CUDA graphs on, transformers captures one for each padded size of mixed prefill and decode batches too; here a batch with a
prefill in it runs eagerly, and only decode steps, which repeat, are captured. Greedy.

    python scripts/benchmarks/cb_sync_driver.py          # against transformers' own thread, on the same prompts
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Callable, Sequence

import torch
from transformers import CompileConfig, ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import WorkloadHints

from persistent_cb import PersistentCB, add_bench_arguments, batching_config, bench, load_bench, sampling_config

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


class DecodeGraphRunner(ModelRunner):
    """Captures and replays only batches in which every request has one token to compute."""

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable, bool]:
        forward, use_graph = super()._get_forward_fn(use_block_table)
        pure_decode = all(request.query_length == 1 for request in self.inputs_and_outputs.requests_in_batch)
        return forward, use_graph and pure_decode


class SyncDriver:
    """One manager without its thread; add requests at any time, then drive.

    The model's attention implementation is transformers' paged one until `close`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ContinuousBatchingConfig,
        max_prompt_length: int,
        max_new_tokens: int,
        max_requests: int,
        compile_mode: str | None = None,
    ):
        config.use_async_batching = False  # its double buffering needs the thread
        if compile_mode is not None:
            config.varlen_compile_config = config.decode_compile_config = CompileConfig(mode=compile_mode, dynamic=True)
        self.model = model
        with torch.no_grad():
            self.manager = model.init_continuous_batching(
                sampling_config(0.0, 0, 1.0, 0.0), config, WorkloadHints(max_prompt_length, max_new_tokens, max_requests)
            )
            self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        runner = self.processor.model_runner
        self.processor.model_runner = DecodeGraphRunner(
            runner.logit_processor, runner.cb_config, runner.inputs_and_outputs, runner.cache, runner.do_sample, runner.return_logprobs
        )

    def add(self, prompt: list[int], max_new_tokens: int) -> str:
        return self.manager.add_request(prompt, max_new_tokens=max_new_tokens)

    @torch.no_grad()
    def drive_until_empty(self) -> dict[str, list[int]]:
        """Runs every request that is queued, or comes while it runs. Returns the tokens by request id; raises RuntimeError naming
        a request that failed. The driver can be used again afterwards."""
        completions: dict[str, list[int]] = {}
        while self.processor.prepare_next_batch():
            self.processor._generation_step(self.model)
            self.processor.update_batch()
            self._collect(completions)
        self._collect(completions)  # requests that were refused without a step
        return completions

    def _collect(self, completions: dict[str, list[int]]) -> None:
        while True:
            try:
                result = self.manager.output_router.output_queue.get_nowait()
            except queue.Empty:
                return
            if result.error is not None:
                raise RuntimeError(f"request {result.request_id} failed: {result.error}")
            completions[result.request_id] = result.generated_tokens

    def generate(self, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
        ids = [self.add(prompt, limit) for prompt, limit in zip(prompts, max_tokens)]
        completions = self.drive_until_empty()
        return [completions[request] for request in ids]

    def close(self) -> None:
        """Gives the cache and the graphs back, and the model its attention implementation."""
        self.processor = self.manager.batch_processor = None
        if self.manager._original_attn_impl is not None:
            self.model.set_attn_implementation(self.manager._original_attn_impl)
        self.manager.destroy()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_bench_arguments(parser)
    parser.add_argument("--compile_mode", choices=COMPILE_MODES, help="compile the model's forward (default: eager)")
    args = parser.parse_args(argv)
    model, prompts = load_bench(args)
    lengths = [args.max_new_tokens] * len(prompts)

    def config() -> ContinuousBatchingConfig:
        return batching_config(model.device, prompts, lengths, use_cuda_graph=args.capture_cudagraph)

    thread = PersistentCB(model, sampling_config(0.0, 0, 1.0, 0.0), config())
    bench("transformers' thread, kept", lambda: thread.generate(prompts, lengths), args.n_rounds)
    thread.close()
    driver = SyncDriver(model, config(), max(map(len, prompts)), args.max_new_tokens, len(prompts), args.compile_mode)
    bench("sync driver", lambda: driver.generate(prompts, lengths), args.n_rounds)
    driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
