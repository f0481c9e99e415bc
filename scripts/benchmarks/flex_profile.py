"""Where a decode step's time goes: its kernels, and the time that memory bandwidth alone would ask for.

The floor counts each weight once (of experts those that are hit) and each row's keys and values once, at the bandwidth that a
large copy reaches on this device; no decode step of these bytes runs faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flex_engine import FlexEngine, SamplingParams
from flex_lora import EXPERT_PARAMETERS, is_lora, num_experts
from flex_moe import NF4Experts, record_expert_reads
from flex_paged_attention import Attend, DecodeBatch, PrefillBatch
from flex_scheduler import Prefix, Sequence
from flex_weights import unwrapped


@dataclass
class KernelTime:
    name: str
    count: int
    milliseconds: float


@dataclass
class StepProfile:
    """One decode step of `batch_size` rows at `context` keys each. Milliseconds; bandwidths in 10^12 bytes per second."""

    batch_size: int
    context: int
    milliseconds: float
    floor_milliseconds: float
    step_bytes: int
    copy_bandwidth_tbs: float
    kernels: list[KernelTime]

    @property
    def floor_share(self) -> float:
        return self.floor_milliseconds / self.milliseconds

    @property
    def achieved_tbs(self) -> float:
        return self.step_bytes / self.milliseconds / 1e9


@contextmanager
def prefilled(engine: FlexEngine, prompts: SequenceOf[list[int]]) -> Iterator[Callable[[], Tensor]]:
    """Packed prefill of the prompts but for their last tokens, and a function that runs these through one decode step: logits
    `[rows, vocab]`, of which the first rows are the prompts'. Walker, cache and attention backend are the engine's, which must be
    idle; at most `max_batch_size` prompts."""
    cache, device = engine.cache, engine.device
    rows = next(bucket for bucket in engine.buckets if bucket >= len(prompts))
    pages = [cache.pages.allocate(cache.pages.pages_for(len(prompt))) for prompt in prompts]
    try:
        for slot, own in enumerate(pages, start=1):
            cache.assign(slot, own)
        cache.upload()
        starts = [prompt[:-1] for prompt in prompts]
        lengths = [len(start) for start in starts]
        padding = [0] * (engine.backend.padded_prefill_length(sum(lengths)) - sum(lengths))
        token_slots = [int(i) for own, length in zip(pages, lengths) for i in cache.token_slots(own, length)]
        tokens_T, positions_T, slots_T = (
            torch.tensor([*values, *padding], device=device, dtype=torch.long)
            for values in (
                [token for start in starts for token in start],
                [position for length in lengths for position in range(length)],
                token_slots,
            )
        )
        padded = [0] * (rows - len(prompts))
        last_B = torch.tensor([*(prompt[-1] for prompt in prompts), *padded], device=device)
        positions_B = torch.tensor([*lengths, *padded], device=device)
        slots_B = torch.tensor([*range(1, len(prompts) + 1), *padded], device=device)
        with torch.no_grad(), engine.walker.session():
            if sum(lengths):
                engine.walker.forward(
                    tokens_T, positions_T, Attend(cache, PrefillBatch(positions_T, slots_T, lengths), engine.backend)
                )
            decode = DecodeBatch.of(positions_B, cache.page_table[slots_B], cache.page_size)
            yield lambda: engine.walker.forward(last_B, positions_B, Attend(cache, decode, engine.backend))
    finally:
        for own in pages:
            cache.pages.release(own)


def engine_last_logits(engine: FlexEngine, prompts: SequenceOf[list[int]]) -> Tensor:
    """The engine's logits after each prompt, fp32 `[len(prompts), vocab]`."""
    with prefilled(engine, prompts) as step:
        return step()[: len(prompts)].float()


def expert_reads_of(engine: FlexEngine, sequences: SequenceOf[list[int]]) -> list[int]:
    """For each layer with experts, the bytes of those that the sequences' last tokens hit together, as one decode step."""
    if not any(map(holds_experts, unwrapped(engine.walker.model).modules())):
        return []
    with prefilled(engine, sequences) as step, record_expert_reads() as reads:
        step()
    return reads


def holds_experts(module: nn.Module) -> bool:
    """Whether the module is a stack of experts, or what PEFT or 4-bit quantization have made of one."""
    stack = EXPERT_PARAMETERS[0] in module._parameters or isinstance(module, NF4Experts)
    return stack or (is_lora(module) and num_experts(module) > 1)


def decode_step_bytes(engine: FlexEngine, batch_size: int, context: int, expert_reads: SequenceOf[int] = ()) -> int:
    """Bytes that a decode step must read: every weight (of an embedding that is no output matrix, a few rows), and all K and V.

    Of stacked experts only those that are hit: `expert_reads` are the bytes of these, layer by layer, as `expert_reads_of` counts
    them; without any, all experts are taken for hit.
    """
    base = unwrapped(engine.walker.model)
    parameters = {id(p): p for p in base.parameters()}
    for module in base.modules():
        if isinstance(module, nn.Embedding) and module.weight is not base.get_output_embeddings().weight:
            parameters.pop(id(module.weight), None)
        if expert_reads and holds_experts(module):
            for parameter in module.parameters():
                parameters.pop(id(parameter), None)
    weights = sum(p.numel() * p.element_size() for p in parameters.values()) + sum(expert_reads)
    per_token = sum(
        2 * spec.num_kv_heads * spec.head_dim * engine.walker.dtype.itemsize * min(context, spec.window or context)
        for spec in engine.walker.specs
    )
    return weights + batch_size * per_token


def copy_bandwidth(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Bytes read and written per second by a large copy on the device."""
    on_gpu = device.type == "cuda"
    source = torch.empty(num_bytes if on_gpu else num_bytes >> 3, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source), device, rounds=7)
    return 2 * source.numel() / seconds


def _median_seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(rounds))


@contextmanager
def steady_batch(
    engine: FlexEngine, batch_size: int, context: int, steps: int, completions: int = 1, prompt_tokens: int = 0
) -> Iterator[Callable[[], None]]:
    """Occupies `batch_size` slots with rows around `context` tokens long, that none of the coming `steps` ends, and yields a
    function that runs one decode step (`eager`: not its graph). What the pools hold is random, and so are the rows' tokens.

    Rows come in groups of `completions` that share the full pages of a prompt of `prompt_tokens`.
    """
    pages, state = engine.cache.pages, engine.state
    shared = prompt_tokens // pages.page_size if completions > 1 else 0
    engine.wake_up()
    engine.cache.flat.normal_()
    start = max(1, context - steps // 2)
    params = SamplingParams(max_tokens=start + steps + 1, ignore_eos=True)
    assert shared * pages.page_size < start, "the shared pages would be written"
    tokens = torch.randint(engine.walker.vocab_size, (batch_size,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences, prefix = [], []
    try:
        for slot, token in enumerate(tokens, start=1):
            prompt = [1] * (start - 1) + [token]
            sequence = Sequence(slot, 0, prompt, params, slot, [], params.max_tokens, Prefix([]))
            sequences.append(sequence)
            prefix = pages.allocate(shared) if slot % completions == 1 % completions else pages.share(prefix)
            sequence.slot, sequence.pages = slot, prefix + pages.allocate(pages.pages_for(start + steps) - shared)
            engine.cache.assign(slot, sequence.pages)
        with torch.no_grad(), engine.walker.session():
            bucket = next(size for size in engine.buckets if size >= batch_size)
            shares_pages = engine.shared_prefix and shared > 0
            graph = engine._graph(bucket, shares_pages) if engine.use_graphs else None
            state.admit(sequences)
            engine.cache.upload()
            state.row_slot.zero_()
            state.row_slot[:batch_size] = torch.arange(1, batch_size + 1, device=engine.device)

            def step(eager: bool = False) -> None:
                state.step.zero_()
                if graph is None or eager:
                    engine._decode_step(bucket, shares_pages, start + steps)
                else:
                    graph.replay()

            yield step
    finally:
        for sequence in sequences:
            pages.release(sequence.pages)


def time_decode_step(
    engine: FlexEngine, batch_size: int, context: int, completions: int = 1, prompt_tokens: int = 0, steps: int = 20
) -> float:
    """Milliseconds of one decode step, the median of several rounds of `steps` back to back."""
    rounds = 5
    with steady_batch(engine, batch_size, context, steps * (rounds + 1), completions, prompt_tokens) as step:
        return _median_seconds(lambda: [step() for _ in range(steps)], engine.device, rounds) / steps * 1e3


def profile_decode_step(engine: FlexEngine, batch_size: int, context: int, steps: int = 20) -> StepProfile:
    """Times `steps` decode steps back to back, then lists the kernels of a few more."""
    traced = 4
    on_gpu = engine.device.type == "cuda"
    with steady_batch(engine, batch_size, context, steps * 4 + traced + 4) as step:
        with record_expert_reads() as reads:
            step(eager=True)
        seconds = _median_seconds(lambda: [step() for _ in range(steps)], engine.device, rounds=3) / steps
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=activities) as trace:
            for _ in range(traced):
                step()
            engine._synchronize()
    kernels = []
    for event in trace.key_averages():
        total_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        is_kernel = not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA
        if is_kernel and total_us:
            kernels.append(KernelTime(event.key, round(event.count / traced), total_us / traced / 1e3))
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    bandwidth = copy_bandwidth(engine.device)
    step_bytes = decode_step_bytes(engine, batch_size, context, reads)
    return StepProfile(
        batch_size, context, seconds * 1e3, step_bytes / bandwidth * 1e3, step_bytes, bandwidth / 1e12, kernels
    )


def format_profile(result: StepProfile, rows: int = 20) -> str:
    lines = [
        f"decode step, batch {result.batch_size}, context {result.context}: {result.milliseconds:.3f} ms, "
        f"{result.achieved_tbs:.2f} TB/s; floor {result.floor_milliseconds:.3f} ms at {result.copy_bandwidth_tbs:.2f} TB/s "
        f"({100 * result.floor_share:.1f} % of it reached)",
        f"{'ms':>8} {'count':>6}  kernel",
    ]
    lines += [f"{kernel.milliseconds:8.3f} {kernel.count:6d}  {kernel.name[:100]}" for kernel in result.kernels[:rows]]
    rest = result.kernels[rows:]
    if rest:
        lines.append(f"{sum(k.milliseconds for k in rest):8.3f} {sum(k.count for k in rest):6d}  {len(rest)} more")
    return "\n".join(lines)


def plot_profile(result: StepProfile, path: str, rows: int = 12) -> None:
    """A bar for each of the largest kernels, and the floor as a line, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kernels = result.kernels[:rows]
    figure, axes = plt.subplots(figsize=(9, 0.38 * len(kernels) + 1.6))
    axes.barh([k.name[:60] for k in kernels][::-1], [k.milliseconds for k in kernels][::-1], color="#4477aa")
    axes.set_xlabel("ms per decode step")
    axes.set_title(
        f"batch {result.batch_size}, context {result.context}: {result.milliseconds:.2f} ms, "
        f"floor {result.floor_milliseconds:.2f} ms ({100 * result.floor_share:.0f} %)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
