"""Where a decode step's time goes: its kernels, and the time that memory bandwidth alone would ask for.

The floor counts each weight once and each row's keys and values once, at the bandwidth that a large copy reaches on this
device; no decode step of these bytes runs faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flex_engine import FlexEngine, Prefix, SamplingParams, Sequence
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


def decode_step_bytes(engine: FlexEngine, batch_size: int, context: int) -> int:
    """Bytes that a decode step must read: every weight (of an embedding that is no output matrix, a few rows), and all K and V."""
    model = engine.walker.model
    base = unwrapped(model)
    parameters = {id(p): p for p in base.parameters()}
    for module in base.modules():
        if isinstance(module, nn.Embedding) and module.weight is not base.get_output_embeddings().weight:
            parameters.pop(id(module.weight), None)
    weights = sum(p.numel() * p.element_size() for p in parameters.values())
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
    function that runs one decode step. What the pools hold is random.

    Rows come in groups of `completions` that share the full pages of a prompt of `prompt_tokens`.
    """
    pages, state = engine.cache.pages, engine.state
    shared = prompt_tokens // pages.page_size if completions > 1 else 0
    engine.wake_up()
    engine.cache.flat.normal_()
    start = max(1, context - steps // 2)
    params = SamplingParams(max_tokens=start + steps + 1, ignore_eos=True)
    assert shared * pages.page_size < start, "the shared pages would be written"
    sequences, prefix = [], []
    try:
        for slot in range(1, batch_size + 1):
            sequence = Sequence(slot, 0, [1] * start, params, slot, [], params.max_tokens, Prefix([]))
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

            def step() -> None:
                state.step.zero_()
                graph.replay() if graph is not None else engine._decode_step(bucket, shares_pages, start + steps)

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
    step_bytes = decode_step_bytes(engine, batch_size, context)
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
