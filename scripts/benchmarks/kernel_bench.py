"""Check and time every decode kernel at Qwen3-4B's shapes on this GPU: `python kernel_bench.py --json out.json`.

The section `moe` has the shapes of Qwen3-30B-A3B; its floor counts the weights of the experts that were hit.

Each kernel is first compared with its plain reference, then timed inside one CUDA graph of 36 layers whose weights and
KV pools are all different, so that the L2 cache holds none of them when a replay comes round. Microseconds are per
layer; `floor` is the time the same bytes take at the card's measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flex_decode_attention
import flex_kernels
import flex_linear
import flex_moe
import flex_moe_kernels
import flex_sampling
import flex_triton

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 36, 2560, 9728, 32, 8, 128, 151936
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
DTYPE = torch.bfloat16
COPY_BYTES_PER_US = 4.3e6  # device-to-device copy on an H200, bytes read plus bytes written
ROTARY = 4096


@dataclass
class Row:
    op: str
    batch: int
    variant: str
    us: float
    floor_us: float

    def __str__(self) -> str:
        tb_s = self.floor_us * COPY_BYTES_PER_US / self.us / 1e6
        share = self.floor_us / self.us
        return f"{self.op:15} {self.batch:4} {self.us:9.2f} us {tb_s:6.2f} TB/s {share:6.1%}  {self.variant}"


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, op: str, batch: int, variant: str, us: float, bytes_moved: float) -> Row:
        self.rows.append(row := Row(op, batch, variant, us, bytes_moved / COPY_BYTES_PER_US))
        return row

    def check(self, name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        """Largest error relative to the largest expected magnitude."""
        difference = (actual.float() - expected.float()).abs().max().item()
        error = difference / max(expected.float().abs().max().item(), 1e-30)
        self.errors[name] = error
        passed = error <= tolerance  # False for NaN
        if not passed:
            self.failures.append(name)
        print(f"{'ok  ' if passed else 'FAIL'} {name:52} max error {error:.2e}", flush=True)


def graph_us(step: Callable[[int], object], calls: int = LAYERS, replays: int = 7) -> float:
    """Median microseconds of one call of `step(i)`, i = 0 ... calls - 1, replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            step(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:])) * 1e3 / calls


def best_of(report: Report, op: str, batch: int, bytes_moved: float, variants: Iterable, make_step, deadline: float):
    """Time every variant until the deadline; report the fastest three and return the best."""
    rows = []
    for variant in variants:
        if time.monotonic() > deadline and rows:
            break
        try:
            us = graph_us(make_step(variant))
        except (flex_triton.triton.TritonError, RuntimeError) as error:  # a tile that does not fit is a result, not the end
            print(f"{op} {batch}: {variant}: {type(error).__name__}: {str(error)[:120]}")
            continue
        rows.append((us, variant))
    rows.sort(key=lambda row: row[0])
    for us, variant in rows[:3]:
        print(report.add(op, batch, _short(variant), us, bytes_moved), flush=True)
    return rows[0] if rows else (torch.inf, None)


def _short(variant) -> str:
    """What an option differs in from the default."""
    if isinstance(variant, str):
        return variant
    changed = {f.name: getattr(variant, f.name) for f in fields(variant) if getattr(variant, f.name) != f.default}
    values = (f"{name}={_short(value) if is_dataclass(value) else value}" for name, value in changed.items())
    return f"{type(variant).__name__}({', '.join(values)})"


# --- compiling ahead, in parallel ------------------------------------------------------------------------------------


class _CompileOnly:
    """Stands in for Triton's CUDA driver in a worker without a CUDA context: kernels are compiled, never launched."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(job: tuple) -> str | None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    capability, kind, batch, shape, options = job
    torch.set_num_threads(1)
    driver.set_active(_CompileOnly(capability))
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
    try:
        if kind == "attention":
            attention_step(attention_inputs(batch, 1, "cpu"), options)(0)
        elif kind == "shared prefix":
            shared_prefix_step(shared_prefix_inputs(*shape, batch, 1, "cpu"), options, share=True)(0)
        elif kind in ("moe", "nf4"):
            moe_step(shape, moe_inputs(batch, moe_banks(kind, 1, "cpu"), "cpu"), options)(0)
        elif kind == "attention check":
            flex_decode_attention.paged_decode_attention_triton(*attention_case(*shape, "cpu"))
        else:
            linear_step(kind, linear_inputs(kind, batch, 1, "cpu"), options)(0)
    except Exception as error:
        return f"{kind} {batch} {shape} {options}: {type(error).__name__}: {error}"
    finally:
        JITFunction.run = run
    return None


class Compiler:
    """Fills Triton's disk cache on all cores. To be made before there is a CUDA context, which a fork would not survive."""

    def __init__(self):
        self.cores = max(multiprocessing.cpu_count() - 1, 1)
        self.pool = ProcessPoolExecutor(self.cores, mp_context=multiprocessing.get_context("fork"))
        self.pool.submit(int).result()  # forks all workers now

    def __call__(self, jobs: Iterable[tuple]) -> None:
        """Jobs are (kind, batch, shape, options)."""
        major, minor = torch.cuda.get_device_capability()
        capability, started, jobs = 10 * major + minor, time.monotonic(), list(dict.fromkeys(jobs))
        problems = [problem for problem in self.pool.map(_compile, [(capability, *job) for job in jobs]) if problem]
        print(f"compiled {len(jobs)} variants on {self.cores} cores in {time.monotonic() - started:.0f} s", flush=True)
        for problem in problems[:5]:
            print(problem[:300])


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass
class AttentionInputs:
    q_BHD: torch.Tensor
    k_pools: list[torch.Tensor]
    v_pools: list[torch.Tensor]
    page_table_BP: torch.Tensor
    lengths_B: torch.Tensor
    page_size: int

    @property
    def bytes_per_layer(self) -> float:
        return int(self.lengths_B.sum()) * KV_HEADS * HEAD_DIM * 2 * 2


def attention_inputs(batch: int, layers: int, device: str, page_size: int = 64, longest: int = 640) -> AttentionInputs:
    """Lengths uniform in 128 ... 640 (mean 384), pages shuffled, one pool per layer."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(128, longest + 1, (batch,), generator=generator)
    pages = longest // page_size
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages) + 1
    slots = (batch * pages + 1) * page_size
    pools = [
        torch.randn(KV_HEADS, slots, HEAD_DIM, dtype=DTYPE, device=device)
        if device != "cpu"
        else torch.empty(KV_HEADS, slots, HEAD_DIM, dtype=DTYPE)
        for _ in range(2 * layers)
    ]
    q_BHD = torch.zeros(batch, HEADS, HEAD_DIM, dtype=DTYPE, device=device).normal_()
    return AttentionInputs(
        q_BHD, pools[::2], pools[1::2], table.int().to(device), lengths_B.int().to(device), page_size
    )


def attention_step(inputs: AttentionInputs, options: flex_decode_attention.DecodeOptions) -> Callable[[int], torch.Tensor]:
    plan = flex_decode_attention.decode_attention_plan_triton(inputs.lengths_B, KV_HEADS, HEAD_DIM, DTYPE, None, options)
    return lambda i: flex_decode_attention.paged_decode_attention_triton(
        inputs.q_BHD, inputs.k_pools[i], inputs.v_pools[i], inputs.page_table_BP, inputs.lengths_B, inputs.page_size,
        HEAD_DIM**-0.5, plan=plan,
    )


ATTENTION_TILES = [
    flex_decode_attention.DecodeOptions(block_n, num_warps, num_stages)
    for block_n, num_warps, num_stages in (
        (64, 4, 3), (64, 4, 2), (64, 4, 4), (64, 8, 3), (32, 4, 3), (32, 4, 4), (32, 4, 6), (128, 4, 2), (128, 8, 2),
        (128, 8, 3), (32, 2, 4), (16, 1, 6),
    )
]  # fmt: skip
ATTENTION_SPLITS = [(c, m) for c in (2, 3, 4, 6, 8, 12) for m in (1, 2, 4)]


def bench_attention(report: Report, batches: list[int], budget: float) -> None:
    for batch in batches:
        deadline = time.monotonic() + budget / len(batches)
        inputs = attention_inputs(batch, LAYERS, "cuda")
        moved = inputs.bytes_per_layer

        def step(options):
            return attention_step(inputs, options)

        _, tile = best_of(report, "attention", batch, moved, ATTENTION_TILES, step, deadline)
        splits = [replace(tile, ctas_per_sm=c, min_tiles=m) for c, m in ATTENTION_SPLITS]
        best_of(report, "attention", batch, moved, splits, step, deadline + budget / len(batches) / 2)
        plan_us = graph_us(lambda i: flex_decode_attention.decode_attention_plan_triton(inputs.lengths_B, KV_HEADS, HEAD_DIM, DTYPE))
        print(report.add("plan", batch, "once per step", plan_us, 0), flush=True)
        del inputs
        torch.cuda.empty_cache()


# --- completions that share their prompt's pages ----------------------------------------------------------------------

SHARED_PROMPTS, COMPLETIONS, NEW_TOKENS = (512, 2048), 8, 512
SHARED_TILES = [
    flex_decode_attention.DecodeOptions(block_n, 4, num_stages, ctas_per_sm, shared_queries=queries)
    for block_n, num_stages, ctas_per_sm, queries in (
        (32, 3, 8, 32), (64, 2, 4, 32), (32, 3, 8, 64), (64, 2, 4, 64), (64, 3, 4, 32), (64, 3, 4, 64), (32, 4, 8, 32),
        (32, 3, 8, 16), (32, 3, 4, 32), (64, 2, 8, 32), (32, 3, 12, 32),
    )
]  # fmt: skip


def shared_prefix_inputs(prompt: int, completions: int, batch: int, layers: int, device: str) -> AttentionInputs:
    """`batch` rows, `completions` of each prompt, with 1 ... NEW_TOKENS keys of their own; pages shuffled."""
    inputs = attention_inputs(batch, 0, device)
    page, generator = inputs.page_size, torch.Generator().manual_seed(0)
    prefix, own = prompt // page, NEW_TOKENS // page
    groups = batch // completions
    pages = torch.randperm(groups * prefix + batch * own, generator=generator) + 1
    table_BP = torch.zeros(batch, flex_triton.cdiv(prefix + own, 16) * 16, dtype=torch.long)
    table_BP[:, :prefix] = pages[: groups * prefix].view(groups, 1, prefix).expand(-1, completions, -1).flatten(0, 1)
    table_BP[:, prefix : prefix + own] = pages[groups * prefix :].view(batch, own)
    lengths_B = prompt + torch.randint(1, NEW_TOKENS + 1, (batch,), generator=generator)
    shape = (KV_HEADS, (len(pages) + 1) * page, HEAD_DIM)
    pools = [torch.empty(shape, dtype=DTYPE, device=device) for _ in range(2 * layers)]
    for pool in pools if device != "cpu" else ():
        pool.normal_()
    return replace(
        inputs, k_pools=pools[::2], v_pools=pools[1::2], page_table_BP=table_BP.int().to(device),
        lengths_B=lengths_B.int().to(device),
    )  # fmt: skip


def shared_prefix_plan(inputs: AttentionInputs, options, share: bool) -> flex_decode_attention.DecodePlan:
    shared = flex_decode_attention.SharedPages(inputs.page_table_BP, inputs.page_size, HEADS) if share else None
    return flex_decode_attention.decode_attention_plan_triton(inputs.lengths_B, KV_HEADS, HEAD_DIM, DTYPE, None, options, shared)


def shared_prefix_step(inputs: AttentionInputs, options, share: bool) -> Callable[[int], torch.Tensor]:
    plan = shared_prefix_plan(inputs, options, share)
    return lambda i: flex_decode_attention.paged_decode_attention_triton(
        inputs.q_BHD, inputs.k_pools[i], inputs.v_pools[i], inputs.page_table_BP, inputs.lengths_B, inputs.page_size,
        HEAD_DIM**-0.5, plan=plan,
    )


def bench_shared_prefix(report: Report, batches: list[int], budget: float) -> None:
    """Off, and on in every tile: floors count each row's keys with sharing off, each page once with sharing on."""
    for prompt in SHARED_PROMPTS:
        for batch in batches:
            inputs = shared_prefix_inputs(prompt, COMPLETIONS, batch, LAYERS, "cuda")
            key_bytes = KV_HEADS * HEAD_DIM * 2 * 2
            once = inputs.bytes_per_layer - prompt * (batch - batch // COMPLETIONS) * key_bytes
            off, on = (shared_prefix_step(inputs, None, share) for share in (False, True))
            name = f"shared prefix {prompt} batch {batch}"
            unshared = off(0)
            report.check(name, on(0), unshared, 1e-2)
            again = torch.stack([on(0) for _ in range(20)])
            report.check(f"{name} repeats", again, again[:1], 0.0)
            op = f"prompt {prompt} x{COMPLETIONS}"
            print(report.add(op, batch, "off", graph_us(off), inputs.bytes_per_layer), flush=True)
            print(report.add(op, batch, "on, default tiles", graph_us(on), once), flush=True)
            plan_us = graph_us(lambda i: shared_prefix_plan(inputs, None, share=True))
            print(report.add("plan, shared", batch, "once per step", plan_us, 0), flush=True)
            deadline = time.monotonic() + budget / len(batches) / len(SHARED_PROMPTS)
            best_of(report, op, batch, once, SHARED_TILES, lambda o: shared_prefix_step(inputs, o, True), deadline)
            del inputs, off, on
            torch.cuda.empty_cache()


# --- matrix products -------------------------------------------------------------------------------------------------

SHAPES = {  # rows of the weight, K; the first word of a name says what follows the product (linear_product)
    "qwen3-4b": {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM), "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)},
    "llama-3.2-3b": {"qkv": (5120, 3072), "o": (3072, 3072), "gate_up": (16384, 3072), "down": (3072, 8192)},
    "gemma-4-e2b": {
        "qkv sliding": (2560, 1536), "qkv full": (5120, 1536), "qkv sliding, q alone": (2048, 1536), "qkv full, q alone": (4096, 1536),
        "o sliding": (1536, 2048), "o full": (1536, 4096), "gate_up": (12288, 1536), "gate_up wide": (24576, 1536),
        "down": (1536, 6144), "down wide": (1536, 12288), "qkv layer input": (256, 1536), "o layer input": (1536, 256),
    },
    # With the A of a rank-32 adapter beneath each part, as active LoRA runs them; the gate is then a kernel of its own.
    "llama-3.2-3b-lora": {"qkv": (5216, 3072), "o": (3104, 3072), "qkv of gate_up": (16448, 3072), "o of down": (3104, 8192)},
    "qwen3-4b-lora-a": {"qkv a": (96, HIDDEN), "qkv a of o": (32, HEADS * HEAD_DIM), "qkv a of gate_up": (64, HIDDEN), "qkv a of down": (32, INTERMEDIATE)},
}  # fmt: skip
LINEAR_SHAPES = SHAPES["qwen3-4b"]


@dataclass
class LinearInputs:
    x_TK: torch.Tensor
    weights: list[torch.Tensor]
    residual_TN: torch.Tensor
    norm_weight_N: torch.Tensor


def linear_inputs(kind: str, batch: int, layers: int, device: str) -> LinearInputs:
    N, K = LINEAR_SHAPES[kind]

    def values(*shape):
        return torch.empty(shape, dtype=DTYPE) if device == "cpu" else torch.randn(shape, dtype=DTYPE, device=device)

    weights = [values(N, K).mul_(K**-0.5) if device != "cpu" else values(N, K) for _ in range(layers)]
    return LinearInputs(values(batch, K), weights, values(batch, N), values(N))


def linear_step(kind: str, inputs: LinearInputs, options: flex_linear.LinearOptions | None) -> Callable[[int], object]:
    """The product with what follows it in the layer: SiLU * up behind gate_up, residual and norm behind o and down.

    Without options the product is cuBLAS's.
    """
    return lambda i: linear_product(kind, inputs.x_TK, inputs.weights[i], options, inputs.residual_TN, inputs.norm_weight_N)


def is_gated(kind: str) -> bool:
    return kind.startswith("gate_up")


def linear_product(kind, x_TK, weight_NK, options, residual_TN, norm_weight_N):
    kind = kind.split()[0]
    if kind == "qkv":
        return F.linear(x_TK, weight_NK) if options is None else flex_linear.linear_triton(x_TK, weight_NK, options=options)
    if kind == "gate_up":
        if options is None:
            return flex_kernels.silu_mul_triton(F.linear(x_TK, weight_NK))
        return flex_linear.gate_up_silu_triton(x_TK, weight_NK, options)
    if options is None:
        return flex_kernels.rms_norm_triton(F.linear(x_TK, weight_NK), norm_weight_N, 1e-6, residual_TN)
    return flex_linear.linear_add_norm_triton(x_TK, weight_NK, residual_TN, norm_weight_N, 1e-6, options)


def rule_variants(kind: str, batch: int) -> list[flex_linear.LinearOptions]:
    """Tiles for any shape: programs for one, two or three rounds of the SMs, as many stages as fit."""
    N, K = LINEAR_SHAPES[kind]
    halves = 2 if is_gated(kind) else 1
    variants = []
    for block_n, block_k in ((64, 64), (64, 128), (32, 128), (128, 64), (32, 64), (16, 256)):
        tiles = flex_triton.cdiv(N // halves, block_n)
        rows = block_n * halves + max(flex_triton.next_power_of_2(batch), 16)
        stages = min(200 * 1024 // (rows * block_k * 2), 6)
        if stages < 2:
            continue
        for programs in (132, 264, 396):
            split_k = max(1, min(round(programs / tiles), K // block_k // 2, 1 if halves == 2 else 24))
            variants.append(flex_linear.LinearOptions(block_n, block_k, split_k, 4 if block_n * batch <= 8192 else 8, stages))
    if batch > 32 and N >= 2048 and K % 64 == 0:
        by_copy = flex_linear._wide_options(batch, N, halves == 2)
        variants += [by_copy, replace(by_copy, tma=not by_copy.tma)]
    return list(dict.fromkeys(variants))


def linear_variants(kind: str, batch: int) -> list[flex_linear.LinearOptions]:
    """Tiles to try, most promising first."""
    if LINEAR_SHAPES is not SHAPES["qwen3-4b"]:
        return rule_variants(kind, batch)

    def skinny(*tiles: tuple[int, ...]) -> list[flex_linear.LinearOptions]:
        """(block_n, block_k, split_k, num_warps, num_stages)"""
        return [flex_linear.LinearOptions(*tile) for tile in tiles]

    def wide(*tiles: tuple[int, ...]) -> list[flex_linear.LinearOptions]:
        """(block_n, tail_n, split_k, num_stages), by the copy engine and by the threads"""
        return [
            flex_linear.LinearOptions(n, 64, split, 4 if batch <= 64 else 8, stages, wide=True, tail_n=tail, tma=tma)
            for n, tail, split, stages in tiles
            for tma in ((True, False) if batch > 32 else (True,))
        ]

    # Stages: what fits beside each other in 227 KiB. A wide tile's rows are chosen so that its programs just fill 132 SMs.
    if kind == "gate_up":
        if batch <= 64:
            by_copy = wide((64, 16, 1, 7))[0]
            more = [by_copy, replace(by_copy, block_k=128, num_stages=3), replace(by_copy, num_warps=8)]
            rest = skinny((64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (64, 64, 1, 4, 6), (128, 64, 1, 8, 4))
            return wide((64, 16, 1, 6)) + more + rest
        if batch <= 128:
            by_copy = replace(wide((64, 16, 1, 5))[0], num_warps=4)
            return wide((64, 16, 1, 5), (128, 0, 1, 3), (64, 0, 1, 3)) + [by_copy] + skinny((128, 64, 1, 8, 4))
        return wide((64, 16, 1, 4), (64, 0, 1, 4), (32, 8, 1, 5))
    if kind == "qkv":
        if batch <= 64:
            return wide((32, 16, 1, 8)) + skinny((64, 64, 1, 4, 6), (64, 64, 2, 4, 6), (64, 128, 2, 4, 4), (128, 64, 3, 4, 4))
        return wide((32, 16, 1, 7 if batch <= 128 else 4), (64, 0, 1, 6 if batch <= 128 else 4))
    if batch <= 64:
        return skinny(
            (64, 64, 3, 4, 6), (64, 128, 4, 4, 4), (64, 64, 4, 4, 6), (64, 128, 3, 4, 4), (128, 64, 6, 4, 5)
        ) + wide((64, 16, 4, 6), (128, 0, 6, 5))  # fmt: skip
    if batch <= 128:
        return wide((64, 16, 4, 6), (64, 0, 3, 6), (128, 0, 6, 5)) + skinny((64, 64, 3, 8, 6))
    return wide((64, 0, 3, 4), (64, 16, 4, 4), (128, 0, 6, 4))


Choice = dict[str, flex_linear.LinearOptions | None]  # an op's tile, None for cuBLAS


def bench_linear(report: Report, batches: list[int], budget: float) -> dict[int, Choice]:
    """cuBLAS and every tile; per batch, the fastest for each product."""
    choices: dict[int, Choice] = {batch: {} for batch in batches}
    for kind, (N, K) in LINEAR_SHAPES.items():
        inputs = linear_inputs(kind, max(batches), LAYERS, "cuda")
        for batch in batches:
            deadline = time.monotonic() + budget / len(batches) / len(LINEAR_SHAPES)
            part = replace(inputs, x_TK=inputs.x_TK[:batch], residual_TN=inputs.residual_TN[:batch])
            outputs = N // 2 if is_gated(kind) else N
            moved = 2 * (N * K + batch * (K + outputs))
            cublas = linear_step(kind, part, None)
            expected, cublas_us = cublas(0), graph_us(cublas)
            print(report.add(kind, batch, "cuBLAS", cublas_us, moved), flush=True)
            variants = (
                options
                for options in linear_variants(kind, batch)
                if check_linear(report, f"{kind} {batch} {_short(options)}", linear_step(kind, part, options), expected)
            )
            us, options = best_of(report, kind, batch, moved, variants, lambda o: linear_step(kind, part, o), deadline)
            choices[batch][kind] = options if us < cublas_us else None
        del inputs, part
        torch.cuda.empty_cache()
    return choices


def check_linear(report: Report, name: str, step: Callable[[int], object], expected) -> bool:
    """One output, or (normed, total), against cuBLAS's and against a second run; quiet unless it fails."""
    try:
        outputs = [out if isinstance(out, tuple) else (out,) for out in (step(0), step(0), expected)]
    except (flex_triton.triton.TritonError, RuntimeError) as error:  # a tile that does not fit is a result, not the end
        print(f"{name}: {type(error).__name__}: {str(error)[:120]}")
        return False
    passed = True
    for first, second, wanted in zip(*outputs):
        error = (first.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        report.errors[name] = error.item()
        if not error <= 2e-2 or not torch.equal(first, second):
            passed = False
            report.failures.append(name)
            print(f"FAIL {name}: error {error:.2e}, repeats {torch.equal(first, second)}", flush=True)
    return passed


def print_tuned(choices: dict[int, Choice]) -> None:
    """A dictionary to paste into flex_linear.py."""
    print("TUNED_LINEAR: dict[tuple[int, int, int], LinearOptions | None] = {")
    for kind, (N, K) in LINEAR_SHAPES.items():
        for batch, choice in sorted(choices.items()):
            print(f"    ({N}, {K}, {batch}): {_short(choice[kind]) if choice[kind] else None},")
    print("}", flush=True)


# --- mixture of experts ----------------------------------------------------------------------------------------------

MOE_LAYERS, MOE_EXPERTS, MOE_TOP_K, MOE_HIDDEN, MOE_INTERMEDIATE, MOE_RANK = 9, 128, 8, 2048, 768, 32
MOE_BATCHES = [16, 32, 48, 64, 128, 256, 4096]
MOE_PREFILL = 1024  # from here on products are bound by arithmetic
MOE_TILES = {  # block_n, block_k, num_warps, num_stages, tma
    ("moe", "gate_up"): (
        (64, 64, 4, 4, False), (64, 64, 4, 4, True), (32, 64, 4, 6, False), (32, 64, 4, 6, True), (64, 64, 4, 3, False),
        (64, 64, 4, 3, True), (32, 128, 4, 4, True), (64, 128, 4, 3, True), (64, 64, 4, 6, True), (32, 128, 4, 3, False),
        (128, 64, 8, 4, True), (64, 128, 8, 3, True), (32, 64, 4, 4, False), (64, 64, 8, 4, False), (128, 64, 8, 3, True),
    ),
    ("moe", "down"): (
        (64, 64, 4, 6, False), (64, 64, 4, 6, True), (128, 64, 4, 4, False), (128, 64, 4, 4, True), (64, 64, 4, 4, False),
        (64, 64, 4, 4, True), (64, 128, 4, 4, True), (128, 128, 4, 3, True), (64, 128, 4, 3, False), (128, 64, 4, 3, True),
        (256, 64, 8, 4, True), (128, 64, 8, 6, True), (64, 128, 4, 6, True), (256, 64, 8, 3, True),
    ),
    ("nf4", "gate_up"): ((32, 64, 4, 4), (64, 64, 4, 4), (32, 64, 4, 6), (64, 64, 8, 4), (32, 64, 4, 3), (128, 64, 8, 4)),
    ("nf4", "down"): ((64, 64, 4, 4), (128, 64, 4, 4), (64, 64, 4, 6), (128, 64, 8, 4), (64, 64, 4, 3), (256, 64, 8, 4)),
}  # fmt: skip
MOE_PREFILL_TILES = {
    ("moe", "gate_up"): (
        (64, 64, 8, 3, False), (64, 64, 8, 4, True), (128, 64, 8, 4, True), (64, 64, 4, 4, True), (64, 128, 8, 2, True),
        (64, 64, 8, 4, False),
    ),
    ("moe", "down"): (
        (128, 64, 8, 3, False), (128, 64, 8, 4, True), (256, 64, 8, 4, True), (128, 64, 4, 4, True), (128, 128, 8, 2, True),
        (128, 64, 8, 4, False),
    ),
    ("nf4", "gate_up"): ((32, 64, 8, 4), (64, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
    ("nf4", "down"): ((64, 64, 8, 4), (128, 64, 8, 3), (256, 64, 8, 3), (128, 64, 4, 3)),
}  # fmt: skip


@dataclass
class MoEInputs:
    x_TC: torch.Tensor
    norm_C: torch.Tensor
    logits: list[torch.Tensor]  # of each layer's router
    routed: list[tuple[torch.Tensor, torch.Tensor]]
    banks: list[flex_moe.Experts]

    def bytes_of(self, *weights: str) -> float:
        """Of the experts that were hit, mean over the layers."""
        hit = statistics.mean(len(experts_TK.unique()) for _, experts_TK in self.routed)
        return hit * sum(getattr(self.banks[0], weight).nbytes for weight in weights) / MOE_EXPERTS


def moe_banks(kind: str, layers: int, device: str) -> list[flex_moe.Experts]:
    """`moe` in bfloat16, or `nf4`: random weights; on a CPU, which only compiles, memory that nobody touches."""
    E, C, I = MOE_EXPERTS, MOE_HIDDEN, MOE_INTERMEDIATE

    def weight(N: int, K: int) -> flex_moe.Weight:
        if kind == "nf4":
            codes_EGNW = torch.empty((E, K // 64, N, 8), dtype=torch.int32, device=device)
            scales_EGN = torch.empty((E, K // 64, N), device=device)
            if device != "cpu":
                codes_EGNW.random_(-(2**31), 2**31)
                scales_EGN.uniform_(0.5, 1.5).mul_(K**-0.5)  # not all the same, so that a wrong one is seen
            return flex_moe_kernels.NF4Weight(codes_EGNW, scales_EGN, DTYPE)
        weight_ENK = torch.empty((E, N, K), dtype=DTYPE, device=device)
        return weight_ENK if device == "cpu" else weight_ENK.normal_(std=K**-0.5)

    return [flex_moe.Experts(weight(2 * I, C), weight(C, I)) for _ in range(layers)]


def with_lora(bank: flex_moe.Experts) -> flex_moe.ActiveExperts:
    E, C, I, R = MOE_EXPERTS, MOE_HIDDEN, MOE_INTERMEDIATE, MOE_RANK
    shapes = (E, R, C), (E, R, 2 * I), (E, R, I), (E, R, C)
    factors = [torch.zeros(shape, dtype=DTYPE, device="cuda").normal_(std=shape[2] ** -0.5) for shape in shapes]
    return flex_moe.ActiveExperts(bank, *factors)


def moe_inputs(batch: int, banks: list[flex_moe.Experts], device: str) -> MoEInputs:
    """Every layer has a routing of its own, by random logits: each expert is as likely as another."""

    def values(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=DTYPE, device=device).normal_()

    logits = [values(batch, MOE_EXPERTS) for _ in banks]
    routed = [flex_moe.route(logits_TE, MOE_TOP_K, True) for logits_TE in logits]
    return MoEInputs(values(batch, MOE_HIDDEN), values(MOE_HIDDEN), logits, routed, banks)


def moe_step(part: str, inputs: MoEInputs, options: flex_moe.MoEOptions | None) -> Callable[[int], object]:
    """One product, or the layer from the router's logits to the next norm."""
    layers = len(inputs.banks)
    if part == "layer":

        def layer(i):
            bank = inputs.banks[i % layers]
            bank.options = options
            routed = flex_moe_kernels.route_triton(inputs.logits[i % layers], MOE_TOP_K, True)
            y_KTC = flex_moe.experts_triton(bank, inputs.x_TC, *routed)
            return flex_linear.add_norm_triton(y_KTC, inputs.x_TC, inputs.norm_C, 1e-6)

        return layer
    plans = [flex_moe_kernels.plan_experts_triton(experts, MOE_EXPERTS, options.block_m) for _, experts in inputs.routed]
    if part == "gate_up":
        return lambda i: flex_moe_kernels.experts_gate_up_triton(
            inputs.x_TC, inputs.banks[i % layers].gate_up_EIC, plans[i % layers], options.gate_up
        )
    hidden_PI = inputs.x_TC.new_zeros(plans[0].pairs_MB.numel(), MOE_INTERMEDIATE).normal_()
    return lambda i: flex_moe_kernels.experts_down_triton(
        hidden_PI, inputs.banks[i % layers].down_ECI, inputs.routed[i % layers][0], plans[i % layers], options.down
    )


def moe_variants(kind: str, part: str, batch: int, block_m: int) -> list[flex_moe.MoEOptions]:
    tiles = MOE_TILES if batch < MOE_PREFILL else MOE_PREFILL_TILES
    tiles = [flex_moe_kernels.GroupedOptions(*tile) for tile in tiles[kind, part]]
    return [replace(flex_moe.MoEOptions(block_m), **{part: tile}) for tile in tiles]


def moe_blocks(batch: int) -> tuple[int, ...]:
    return (16, 32) if batch <= 64 else (16, 32, 64) if batch < MOE_PREFILL else (64, 128)


def bench_moe(report: Report, batches: list[int], budget: float) -> None:
    """In bfloat16, then in NF4: each product in every tile, and the layer with flex_moe.py's tiles and the best found, without and
    with dependent launch, then with LoRA."""
    shipped_rows = flex_triton.PDL_ROWS
    for kind in ("moe", "nf4"):
        banks = moe_banks(kind, MOE_LAYERS, "cuda")
        adapted = [with_lora(bank) for bank in banks]
        for batch in batches:
            inputs = moe_inputs(batch, banks, "cuda")
            for name, bank in ((f"{kind} experts", banks[0]), (f"{kind} experts + LoRA", adapted[0])):
                bank.options = None
                args = (bank, inputs.x_TC, *inputs.routed[0])
                y_KTC = flex_moe.experts_triton(*args)
                report.check(f"{name} {batch}", y_KTC, flex_moe.experts_reference(*args), 2e-2)
                again = torch.stack([flex_moe.experts_triton(*args) for _ in range(10)])
                report.check(f"{name} {batch} repeats", again, y_KTC[None], 0.0)

            us = graph_us(lambda i: flex_moe_kernels.route_triton(inputs.logits[i % MOE_LAYERS], MOE_TOP_K, True))
            print(report.add("moe route", batch, "", us, 0), flush=True)
            us = graph_us(lambda i: flex_moe_kernels.plan_experts_triton(inputs.routed[0][1], MOE_EXPERTS, 16))
            print(report.add("moe plan", batch, "", us, 0), flush=True)
            best: list[tuple[float, flex_moe.MoEOptions]] = []
            deadline, share = time.monotonic(), budget / len(batches) / len(moe_blocks(batch)) / len(MOE_TILES)
            for block_m in moe_blocks(batch):
                total_us, found = 0.0, flex_moe.MoEOptions(block_m)
                for part, weight in (("gate_up", "gate_up_EIC"), ("down", "down_ECI")):
                    deadline += share
                    variants, moved = moe_variants(kind, part, batch, block_m), inputs.bytes_of(weight)
                    us, options = best_of(
                        report, f"{kind} {part}", batch, moved, variants, lambda o: moe_step(part, inputs, o), deadline
                    )
                    total_us += us
                    found = replace(found, **{part: getattr(options, part)})
                best.append((total_us, found))

            rule = flex_moe.moe_options(batch * MOE_TOP_K, banks[0])
            rows = [("flex_moe.py's", rule), ("best", min(best, key=lambda row: row[0])[1])]
            banks[0].options = rows[1][1]
            args = (banks[0], inputs.x_TC, *inputs.routed[0])
            report.check(f"{kind} experts {batch}, best tiles", flex_moe.experts_triton(*args), flex_moe.experts_reference(*args), 2e-2)
            banks[0].options = None
            moved = inputs.bytes_of("gate_up_EIC", "down_ECI")
            for dependent_rows, suffix in ((range(0), ""), (range(batch, batch + 1), ", dependent launch")):
                flex_triton.PDL_ROWS = dependent_rows
                for name, options in rows:
                    for lora, used in (("", banks), (" + LoRA", adapted)):
                        us = graph_us(moe_step("layer", replace(inputs, banks=used), options))
                        variant = f"{name}{suffix} {_short(options)}"
                        print(report.add(f"{kind} layer{lora}", batch, variant, us, moved), flush=True)
            flex_triton.PDL_ROWS = shipped_rows
        del banks, adapted, inputs, bank, args
        torch.cuda.empty_cache()


# --- the small kernels -----------------------------------------------------------------------------------------------


def rope_tables(device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.arange(ROTARY, device=device)[:, None] * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def sampling_inputs(batch: int, dtype: torch.dtype, filters: bool) -> tuple[torch.Tensor, ...]:
    logits = (torch.randn(batch, VOCAB, device="cuda") * 2).to(dtype)
    ones = torch.ones(batch, device="cuda")
    ids = torch.arange(batch, device="cuda")
    top_k = torch.full((batch,), 50 if filters else 0, dtype=torch.int32, device="cuda")
    return logits, ones, top_k, ones * (0.95 if filters else 1.0), ones * (0.02 if filters else 0.0), ids, ids + 100


def bench_small(report: Report, batches: list[int]) -> None:
    cos, sin = rope_tables()
    norm = torch.randn(HIDDEN, device="cuda", dtype=DTYPE)
    for batch in batches:
        x = torch.randn(batch, HIDDEN, device="cuda", dtype=DTYPE)
        us = graph_us(lambda i: flex_kernels.rms_norm_triton(x, norm, 1e-6, x))
        print(report.add("rms_norm", batch, "", us, 8 * batch * HIDDEN))
        gate_up = torch.randn(batch, 2 * INTERMEDIATE, device="cuda", dtype=DTYPE)
        us = graph_us(lambda i: flex_kernels.silu_mul_triton(gate_up))
        print(report.add("silu_mul", batch, "", us, 6 * batch * INTERMEDIATE))
        qkv = torch.randn(batch, QKV, device="cuda", dtype=DTYPE)
        pools = torch.zeros(2, KV_HEADS, 64 * 1024, HEAD_DIM, device="cuda", dtype=DTYPE)
        positions = torch.arange(batch, device="cuda") * 7
        slots = torch.randperm(64 * 1024, device="cuda")[:batch]
        us = graph_us(
            lambda i: flex_kernels.qk_norm_rope_store_triton(
                qkv, norm[:HEAD_DIM], norm[:HEAD_DIM], 1e-6, cos, sin, positions, slots, pools[0], pools[1], HEADS
            )
        )
        print(report.add("norm_rope_store", batch, "", us, 4 * batch * QKV))
        for dtype in (DTYPE, torch.float32):
            for name, filters in (("plain", False), ("top_k 50 + top_p 0.95 + min_p 0.02", True)):
                args = sampling_inputs(batch, dtype, filters)
                us = graph_us(lambda i: flex_sampling.sample_triton(*args), calls=4)
                print(report.add("sample", batch, f"{name} {dtype}", us, args[0].nbytes), flush=True)
        top_p_only = list(sampling_inputs(batch, DTYPE, True))
        top_p_only[2], top_p_only[4] = torch.zeros_like(top_p_only[2]), torch.zeros_like(top_p_only[4])
        for name in ("top_p 0.95 alone, half of the vocabulary kept", "top_p 0.95 alone, peaked"):
            us = graph_us(lambda i: flex_sampling.sample_triton(*top_p_only), calls=4)
            print(report.add("sample", batch, name, us, top_p_only[0].nbytes), flush=True)
            top_p_only[0] = top_p_only[0] * 3


# --- a whole step without the language model head --------------------------------------------------------------------


def bench_step(report: Report, batches: list[int], choices: dict[int, Choice]) -> None:
    """36 layers in a row: cuBLAS alone, the tiles of flex_linear.py and the best found now, each without and with dependent launch."""
    shipped_rows = flex_triton.PDL_ROWS
    cos, sin = rope_tables()
    weights = {kind: linear_inputs(kind, 1, LAYERS, "cuda").weights for kind in LINEAR_SHAPES}
    norm = torch.ones(HIDDEN, device="cuda", dtype=DTYPE)
    head_norm = norm[:HEAD_DIM]
    for batch in batches:
        inputs = attention_inputs(batch, LAYERS, "cuda")
        hidden = torch.randn(batch, HIDDEN, device="cuda", dtype=DTYPE)
        positions = inputs.lengths_B.long() - 1
        pages = inputs.page_table_BP.gather(1, (positions // inputs.page_size)[:, None])[:, 0].long()
        slots = pages * inputs.page_size + positions % inputs.page_size

        def product(choice: Choice, kind: str, i: int, x, total=None):
            return linear_product(kind, x, weights[kind][i], choice[kind], total, norm)

        def step(choice: Choice):
            plan = flex_decode_attention.decode_attention_plan_triton(inputs.lengths_B, KV_HEADS, HEAD_DIM, DTYPE)
            total = hidden
            normed, _ = flex_kernels.rms_norm_triton(hidden, norm, 1e-6)
            for i in range(LAYERS):
                qkv = product(choice, "qkv", i, normed)
                q = flex_kernels.qk_norm_rope_store_triton(
                    qkv, head_norm, head_norm, 1e-6, cos, sin, positions, slots, inputs.k_pools[i], inputs.v_pools[i],
                    HEADS,
                )
                o = flex_decode_attention.paged_decode_attention_triton(
                    q, inputs.k_pools[i], inputs.v_pools[i], inputs.page_table_BP, inputs.lengths_B, inputs.page_size,
                    HEAD_DIM**-0.5, plan=plan,
                ).view(batch, -1)  # fmt: skip
                normed, total = product(choice, "o", i, o, total)
                normed, total = product(choice, "down", i, product(choice, "gate_up", i, normed), total)
            return normed

        moved = LAYERS * (inputs.bytes_per_layer + sum(2 * n * k for n, k in LINEAR_SHAPES.values()))
        tuned = {kind: flex_linear.linear_options(batch, N, K, is_gated(kind)) for kind, (N, K) in LINEAR_SHAPES.items()}
        rows = [("cuBLAS", dict.fromkeys(LINEAR_SHAPES)), ("tiles of flex_linear.py", tuned)]
        if batch in choices:
            rows.append(("best tiles", choices[batch]))
        for dependent_rows, suffix in ((range(0), ""), (range(batch, batch + 1), ", dependent launch")):
            flex_triton.PDL_ROWS = dependent_rows
            for name, choice in rows:
                us = graph_us(lambda i: step(choice), calls=1)
                print(report.add("36 layers", batch, name + suffix, us, moved), flush=True)
        flex_triton.PDL_ROWS = shipped_rows
        del inputs
        torch.cuda.empty_cache()


# --- correctness -----------------------------------------------------------------------------------------------------


ATTENTION_CHECKS = [  # heads, KV heads, head size, window, soft cap
    (32, 8, 128, None, None), (24, 8, 128, None, None), (9, 3, 64, None, None), (8, 1, 256, 512, None),
    (8, 1, 512, None, 30.0),
]  # fmt: skip


def attention_case(heads, kv_heads, head_dim, window, softcap, dtype, device) -> tuple:
    lengths_B = torch.tensor([1, 64, 65, 2000, 333, 511, 512, 513], dtype=torch.int32, device=device)
    pools = [torch.zeros(kv_heads, 256 * 64, head_dim, device=device, dtype=dtype).normal_() for _ in range(2)]
    table_BP = torch.randperm(256, device=device).int().view(8, 32)
    q_BHD = torch.zeros(8, heads, head_dim, device=device, dtype=dtype).normal_()
    return q_BHD, *pools, table_BP, lengths_B, 64, head_dim**-0.5, window, softcap


def check_all(report: Report) -> None:
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (DTYPE, 1e-2)):
        x, residual = (torch.randn(64, HIDDEN, device="cuda").to(dtype) for _ in range(2))
        weight = torch.randn(HIDDEN, device="cuda").to(dtype)
        for name, a, b in zip(
            ("normed", "total"),
            flex_kernels.rms_norm_triton(x, weight, 1e-6, residual),
            flex_kernels.rms_norm_reference(x, weight, 1e-6, residual),
        ):
            report.check(f"rms_norm {name} {dtype}", a, b, tolerance)
        gate_up = torch.randn(64, 2 * INTERMEDIATE, device="cuda").to(dtype)
        report.check(f"silu_mul {dtype}", flex_kernels.silu_mul_triton(gate_up), flex_kernels.silu_mul_reference(gate_up), tolerance)

        cos, sin = rope_tables()
        qkv = torch.randn(64, QKV, device="cuda").to(dtype)
        positions, slots = torch.arange(64, device="cuda") * 31, torch.randperm(1024, device="cuda")[:64]
        pools = [torch.zeros(KV_HEADS, 1024, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(4)]
        args = (qkv, weight[:HEAD_DIM], weight[:HEAD_DIM], 1e-6, cos, sin, positions, slots)
        q = flex_kernels.qk_norm_rope_store_triton(*args, *pools[:2], HEADS)
        q_reference = flex_kernels.qk_norm_rope_store_reference(*args, *pools[2:], HEADS)
        for name, a, b in (("q", q, q_reference), ("k", pools[0], pools[2]), ("v", pools[1], pools[3])):
            report.check(f"qk_norm_rope_store {name} {dtype}", a, b, tolerance)

        for shape in ATTENTION_CHECKS:
            args = attention_case(*shape, dtype, "cuda")
            name = f"attention {shape} {dtype}"
            expected = flex_decode_attention.paged_decode_attention_reference(*args)
            report.check(name, flex_decode_attention.paged_decode_attention_triton(*args), expected, tolerance)
            again = torch.stack([flex_decode_attention.paged_decode_attention_triton(*args) for _ in range(20)])
            report.check(f"{name} repeats", again, again[:1], 0.0)

    for kind in LINEAR_SHAPES:
        for batch in (1, 8, 63, 128):
            inputs = linear_inputs(kind, batch, 1, "cuda")
            expected = linear_step(kind, inputs, None)(0)
            for options in linear_variants(kind, batch)[:4]:
                check_linear(report, f"linear {kind} {batch} {_short(options)}", linear_step(kind, inputs, options), expected)

    for dtype in (torch.float32, DTYPE, torch.float16):
        for filters in (False, True):
            args = sampling_inputs(16, dtype, filters)
            (tokens, *logprobs), (expected, *expected_logprobs) = flex_sampling.sample_triton(*args), flex_sampling.sample_reference(*args)
            name = f"sample {'filtered' if filters else 'plain'} {dtype}"
            same = tokens == expected  # the two logarithms differ in the last bit: a tie of noisy logits may break apart
            report.check(f"{name} share of same tokens", same.float().mean(), torch.ones((), device="cuda"), 0.1)
            for which, a, b in zip(("logprobs", "full_logprobs"), logprobs, expected_logprobs):
                report.check(f"{name} {which}", a[same], b[same], 1e-4)


SECTIONS = ("checks", "small", "attention", "shared", "linear", "step", "moe")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 64, 128, 256])
    parser.add_argument("--moe_batches", type=int, nargs="+", default=MOE_BATCHES, help="those of the section moe")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each sweep of a section (default: 40)")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-4b", help="whose products the section linear tunes (default: qwen3-4b)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to run (default: everything)")
    args = parser.parse_args()
    global LINEAR_SHAPES
    LINEAR_SHAPES = SHAPES[args.model]
    if args.model != "qwen3-4b" and set(args.sections) != {"linear"}:
        parser.error("--model goes with --sections linear; the other sections have Qwen3-4B's shapes")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    compile_ahead = Compiler()
    jobs = []
    if "attention" in args.sections:
        jobs += [("attention", args.batches[0], None, options) for options in ATTENTION_TILES]
    if "shared" in args.sections:
        jobs += [
            ("shared prefix", args.batches[-1], (prompt, COMPLETIONS), options)
            for prompt in SHARED_PROMPTS[:1]
            for options in SHARED_TILES
        ]
    if "checks" in args.sections:
        for dtype in (DTYPE, torch.float32):
            jobs += [("attention check", 8, (*case, dtype), None) for case in ATTENTION_CHECKS]
        jobs += [
            (kind, batch, None, options)
            for batch in (1, 8, 63, 128)
            for kind in LINEAR_SHAPES
            for options in linear_variants(kind, batch)[:4]
        ]
    if "linear" in args.sections:
        jobs += [
            (kind, batch, None, options)
            for batch in args.batches
            for kind in LINEAR_SHAPES
            for options in linear_variants(kind, batch)
        ]
    if "moe" in args.sections:
        jobs += [
            (kind, batch, part, options)
            for batch in args.moe_batches
            for kind, part in MOE_TILES
            for block_m in moe_blocks(batch)
            for options in moe_variants(kind, part, batch, block_m)
        ]
    compile_ahead(jobs)
    report = Report()
    choices = {}
    if "checks" in args.sections:
        check_all(report)
    if "small" in args.sections:
        bench_small(report, args.batches)
    if "attention" in args.sections:
        bench_attention(report, args.batches, args.budget)
    if "shared" in args.sections:
        bench_shared_prefix(report, args.batches, args.budget)
    if "linear" in args.sections:
        choices = bench_linear(report, args.batches, args.budget)
    if "step" in args.sections:
        bench_step(report, args.batches, choices)
    if "moe" in args.sections:
        bench_moe(report, args.moe_batches, args.budget)
    if choices:
        print_tuned(choices)
    compile_ahead.pool.shutdown()
    if args.json:
        device = torch.cuda.get_device_properties(0)
        args.json.write_text(
            json.dumps(
                {
                    "gpu": device.name, "torch": torch.__version__, "triton": flex_triton.triton.__version__,
                    "errors": report.errors, "failures": report.failures, "rows": [asdict(row) for row in report.rows],
                },
                indent=1,
            )
        )  # fmt: skip
    print(f"{len(report.failures)} checks failed: {report.failures}" if report.failures else "all checks passed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
