"""Check and time the LoRA and 4-bit products of a decode step at Qwen3-4B's shapes: `python lora_bench.py --json out.json`.

Every projection of all 36 layers runs in one CUDA graph with what follows it (SiLU gate, residual + norm), once with merged
weights, once with active LoRA of rank 32, and over random NF4 codes with and without LoRA. Microseconds are per layer. Also
timed: what `refresh_lora` does in each mode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

import flex_lora_kernels as lora_kernels
import flex_nf4
from flex_cli import dummy_model, find_config
from flex_lora import ActiveProjection
from flex_weights import Product
from kernel_bench import DTYPE, HIDDEN, INTERMEDIATE, LAYERS, QKV, Report, best_of, graph_us
from lora_adapters import fresh_adapter
from qwen3_flex_inference import Qwen3Walker

RANK = 32
# Output features of the parts, input features.
SHAPES = {
    "qkv": ([4096, 1024, 1024], HIDDEN),
    "o": ([HIDDEN], 4096),
    "gate_up": ([INTERMEDIATE, INTERMEDIATE], HIDDEN),
    "down": ([HIDDEN], INTERMEDIATE),
}
assert sum(SHAPES["qkv"][0]) == QKV


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def random_codes(N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes_NW = torch.randint(-(2**31), 2**31 - 1, (N, K // 8), device="cuda").int()
    return codes_NW, torch.rand(K // 64, N, device="cuda") * K**-0.5


# --- checks ----------------------------------------------------------------------------------------------------------


def check_all(report: Report) -> None:
    for T, dtype in product((1, 33, 64, 200, 300), (torch.bfloat16, torch.float16)):
        for sizes, scaled in (([4096, 1024, 1024], False), ([2560], True), ([1000, 936], False)):
            N = sum(sizes)
            y, xa = randn(T, N + len(sizes) * RANK, dtype=dtype).tensor_split([N], dim=1)
            b, scale = randn(RANK, N, scale=RANK**-0.5, dtype=dtype), torch.rand(N, device="cuda") if scaled else None
            name = f"T {T} {sizes} {dtype}"
            expected = lora_kernels.add_low_rank_reference(y, xa, b, sizes, scale)
            report.check(f"add_low_rank {name}", lora_kernels.add_low_rank(y, xa, b, sizes, scale), expected, 1e-2)
            if len(sizes) == 2:
                halves = [N // 2, N // 2]
                y, xa = randn(T, N + 2 * RANK, dtype=dtype).tensor_split([N], dim=1)
                report.check(
                    f"low_rank_silu_mul {name} {halves}", lora_kernels.low_rank_silu_mul(y, xa, b),
                    lora_kernels.low_rank_silu_mul_reference(y, xa, b), 1e-2,
                )  # fmt: skip
            if len(sizes) == 1:
                rest = (b, randn(T, N, dtype=dtype), randn(N, dtype=dtype), 1e-6, scale)
                for splits in (1, 3):
                    both = randn(splits, T, N + RANK, dtype=dtype if splits == 1 else torch.float32)
                    parts = both.tensor_split([N], dim=-1)
                    actual = lora_kernels.low_rank_add_norm(*parts, *rest)
                    expected = lora_kernels.low_rank_add_norm_reference(*parts, *rest)
                    for which, a, e in zip(("norm", "total"), actual, expected):
                        report.check(f"low_rank_add_norm {which}, {splits} splits, {name}", a, e, 1e-2)
    for adapter_dtype in (torch.float32, torch.bfloat16):
        bases = [randn(*shape, scale=0.02) for shape in ((2560, 9728), (1000, 200), (2560, 9728))]
        lefts = [randn(len(base), RANK + i, scale=0.02, dtype=adapter_dtype) for i, base in enumerate(bases)]
        rights = [randn(RANK + i, base.shape[1], scale=0.02, dtype=adapter_dtype) for i, base in enumerate(bases)]
        merged, expected = ([torch.empty_like(base) for base in bases] for _ in range(2))
        lora_kernels.merge_low_rank(merged, bases, lefts, rights, [1.0, 0.5, 2.0])
        lora_kernels.merge_low_rank_reference(expected, bases, lefts, rights, [1.0, 0.5, 2.0])
        for i, (a, e) in enumerate(zip(merged, expected)):
            differing = (a != e).float().mean().item()  # ties of the last bit, where sums differ in their order
            report.check(f"merge_low_rank {adapter_dtype} {i}, {differing:.1e} differ", a, e, 2**-8)
    for dtype in (torch.bfloat16, torch.float16):
        for N, K in ((6144, 2560), (1000, 4096), (2560, 9728)):
            codes_NW, scales_GN = random_codes(N, K)
            weight = flex_nf4.nf4_dequantize_reference(codes_NW, scales_GN, dtype)
            report.check(f"nf4_dequantize {N} x {K} {dtype}", flex_nf4.nf4_dequantize(codes_NW, scales_GN, dtype), weight, 0.0)
            for T in (1, 17, 64, 128, 256):
                x = randn(T, K, dtype=dtype)
                actual = flex_nf4.nf4_linear(x, codes_NW, scales_GN)
                report.check(f"nf4_linear T {T} {N} x {K} {dtype}", actual, x.float() @ weight.float().T, 1e-2)
                again = flex_nf4.nf4_linear(x, codes_NW, scales_GN)
                report.check(f"nf4_linear T {T} {N} x {K} {dtype}, again", again, actual, 0.0)


# --- times -----------------------------------------------------------------------------------------------------------


def run_product(kind: str, op: Product, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor):
    if kind == "qkv":
        return op(x)
    return op.silu_gated(x) if kind == "gate_up" else op.add_norm(x, residual, norm, 1e-6)


def time_products(report: Report, name: str, layers: list[dict[str, Product]], batches: list[int], bytes_each: float) -> None:
    """All products of the layers, kind by kind and then together; `bytes_each` is what a weight takes."""
    residual, norm = randn(max(batches), HIDDEN), randn(HIDDEN)
    inputs = {kind: randn(max(batches), K) for kind, (_, K) in SHAPES.items()}
    for batch in batches:
        total = 0.0

        def step(i: int, kinds: tuple[str, ...] = tuple(SHAPES), batch: int = batch) -> None:
            for kind in kinds:
                run_product(kind, layers[i][kind], inputs[kind][:batch], residual[:batch], norm)

        for kind, (sizes, K) in SHAPES.items():
            moved = bytes_each * sum(sizes) * K
            total += moved
            print(report.add(kind, batch, name, graph_us(lambda i, kind=kind: step(i, (kind,))), moved), flush=True)
        print(report.add("all four", batch, name, graph_us(step), total), flush=True)


def bench_modes(report: Report, batches: list[int]) -> None:
    model = fresh_adapter(dummy_model(find_config("qwen3-4b-base"), DTYPE, torch.device("cuda"), 0), RANK)
    for mode in ("merged", "active"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        walker = Qwen3Walker(model, lora_mode=mode)
        print(f"{mode}: {(torch.cuda.memory_allocated() - before) / 1e9:.2f} GB more", flush=True)
        layers = [{kind: getattr(layer, kind) for kind in SHAPES} for layer in walker.layers]
        time_products(report, mode, layers, batches, 2)
        seconds = []
        for _ in range(7):
            torch.cuda.synchronize()
            started = time.perf_counter()
            walker.refresh()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        moved = 4 * LAYERS * sum(sum(sizes) * K for sizes, K in SHAPES.values()) if mode == "merged" else 0
        print(report.add("refresh", 0, mode, statistics.median(seconds) * 1e6, moved), flush=True)
        del walker, layers
        torch.cuda.empty_cache()


def nf4_variants(N: int) -> Iterator[flex_nf4.NF4Options]:
    for block_n, split_k, num_stages in product((64, 128), (1, 2, 3, 4, 6), (3, 4, 6)):
        if 100 <= N // block_n * split_k <= 700:
            yield flex_nf4.NF4Options(block_n, split_k, num_warps=4, num_stages=num_stages)
            if block_n == 128:
                yield flex_nf4.NF4Options(block_n, split_k, num_warps=8, num_stages=num_stages)


def with_lora(base: flex_nf4.NF4Projection, sizes: list[int], K: int) -> ActiveProjection:
    a_PRK, b_RN = randn(len(sizes), RANK, K, scale=K**-0.5), randn(RANK, sum(sizes), scale=0.02)
    return ActiveProjection(a_PRK, b_RN, sizes, base=base)


def bench_nf4(report: Report, batches: list[int], budget: float) -> None:
    codes = {kind: [random_codes(sum(sizes), K) for _ in range(LAYERS)] for kind, (sizes, K) in SHAPES.items()}
    bytes_each = 0.5 + 4 / flex_nf4.BLOCK
    bases = [
        {kind: flex_nf4.NF4Projection(*codes[kind][i], DTYPE, None) for kind in SHAPES} for i in range(LAYERS)
    ]  # fmt: skip
    time_products(report, "NF4", bases, batches, bytes_each)
    lora = [{kind: with_lora(layer[kind], *SHAPES[kind]) for kind in SHAPES} for layer in bases]
    time_products(report, "NF4 + LoRA", lora, batches, bytes_each)
    for batch, (kind, (sizes, K)) in product(batches, SHAPES.items()):
        x, moved = randn(batch, K), bytes_each * sum(sizes) * K
        deadline = time.monotonic() + budget / len(batches) / len(SHAPES)

        def step(options: flex_nf4.NF4Options, kind: str = kind, x: torch.Tensor = x):
            return lambda i: flex_nf4.nf4_linear_triton(x, *codes[kind][i], None, options)

        best_of(report, f"NF4 {kind} alone", batch, moved, nf4_variants(sum(sizes)), step, deadline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the sweep of NF4 tiles (default: 60)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    report = Report()
    with torch.no_grad():
        check_all(report)
        bench_modes(report, args.batches)
        bench_nf4(report, args.batches, args.budget)
    if args.json:
        figures = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "failures": report.failures}
        figures |= {"errors": report.errors, "rows": [asdict(row) for row in report.rows]}
        args.json.write_text(json.dumps(figures, indent=1))
    print(f"{len(report.failures)} checks failed: {report.failures}" if report.failures else "all checks passed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
