"""Check and time the LoRA and 4-bit products of a decode step at Qwen3-4B's shapes: `python lora_bench.py --json out.json`.

Every projection of all 36 layers runs in one CUDA graph with what follows it (SiLU gate, residual + norm), once with merged
weights, once with active LoRA of rank 32, and over random NF4 codes with and without LoRA. Microseconds are per layer. Also
timed: what `refresh_lora` does in each mode, and PEFT's own merge and unmerge of the same adapter. The last lines are a table of it all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

import flex_lora_kernels as lora_kernels
import flex_nf4
from flex_kernels import rms_norm
from flex_lora import LORA_MODES, ActiveProjection
from flex_models import dummy_model, find_config
from flex_weights import Product
from kernel_bench import DTYPE, HIDDEN, INTERMEDIATE, LAYERS, QKV, Report, best_of, graph_us
from lora_adapters import fresh_adapter
from qwen3_flex_inference import Qwen3Walker

RANK = 32
PEFT_MERGE = "PEFT's merge + unmerge"
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
    check_low_rank(report)
    check_merge(report)
    check_nf4(report)


def check_low_rank(report: Report) -> None:
    for T, dtype in ((1, DTYPE), (64, DTYPE), (64, torch.float16), (300, DTYPE)):
        cases = ([4096, 1024, 1024], 1, False), ([2560], 3, False), ([2560], 1, True), ([1000, 1000], 2, True)
        for sizes, splits, scaled in cases:
            N, P = sum(sizes), len(sizes)
            both = randn(splits, T, N + P * RANK, dtype=dtype if splits == 1 else torch.float32)
            inputs = (*both.tensor_split([N], dim=-1), randn(RANK, N, scale=RANK**-0.5, dtype=dtype))
            scale = torch.rand(N, device="cuda") if scaled else None
            residual = randn(T, N, dtype=dtype) if P == 1 else None
            name = f"T {T} {sizes}, {splits} splits, {dtype}"
            report.check(
                f"add_low_rank {name}", lora_kernels.add_low_rank(*inputs, sizes, scale, residual),
                lora_kernels.add_low_rank_reference(*inputs, sizes, scale, residual), 1e-2,
            )  # fmt: skip
            if P == 2:
                for op in ("low_rank_silu_mul", "low_rank_gelu_mul"):
                    actual, expected = (getattr(lora_kernels, op + suffix)(*inputs, scale) for suffix in ("", "_reference"))
                    report.check(f"{op} {name}", actual, expected, 1e-2)


def check_merge(report: Report) -> None:
    for adapter_dtype, b_std in product((torch.float32, torch.bfloat16), (0.02, 1.0)):
        bases = [randn(*shape, scale=0.02) for shape in ((2560, 9728), (1000, 200), (2560, 9728))]
        ranks = (RANK, 3, RANK)
        lefts = [randn(len(base), rank, scale=b_std, dtype=adapter_dtype) for base, rank in zip(bases, ranks)]
        rights = [randn(rank, base.shape[1], scale=0.02, dtype=adapter_dtype) for base, rank in zip(bases, ranks)]
        merged, expected = ([torch.empty_like(base) for base in bases] for _ in range(2))
        lora_kernels.merge_low_rank(merged, bases, lefts, rights, [1.0, 0.5, 2.0])
        lora_kernels.merge_low_rank_reference(expected, bases, lefts, rights, [1.0, 0.5, 2.0])
        for i, (a, e) in enumerate(zip(merged, expected)):
            ulp = torch.ldexp(torch.ones((), device="cuda"), torch.frexp(torch.maximum(a.abs(), e.abs()).float())[1] - 8)
            # Where the two cancel, fp32's own sums differ by more than the result's last bit.
            apart = ((a.float() - e.float()).abs() / ulp.clamp_min(2**-20 * e.abs().max().float())).max()
            report.check(f"merge_low_rank {adapter_dtype} {b_std} {i}: {apart:.2f} bfloat16 steps", a, e, 2**-7)
            if apart > 1:
                report.failures.append(f"merge_low_rank {adapter_dtype} {b_std} {i}: more than one step")
        rooms, wanted = (torch.zeros(RANK, len(bases[0]), dtype=DTYPE, device="cuda") for _ in range(2))
        lora_kernels.copy_scaled([rooms.T], lefts[:1], [2.0])
        lora_kernels.copy_scaled_reference([wanted.T], lefts[:1], [2.0])
        report.check(f"copy_scaled {adapter_dtype} {b_std}", rooms, wanted, 0.0)


def check_nf4(report: Report) -> None:
    for dtype, (N, K) in product((torch.bfloat16, torch.float16), ((1000, 4096), (2560, 9728))):
        codes_NW, scales_GN = random_codes(N, K)
        weight = flex_nf4.nf4_dequantize_reference(codes_NW, scales_GN, dtype)
        report.check(f"nf4_dequantize {N} x {K} {dtype}", flex_nf4.nf4_dequantize(codes_NW, scales_GN, dtype), weight, 0.0)
        for T in (1, 64, 256) if dtype == DTYPE else (64,):
            x = randn(T, K, dtype=dtype)
            actual = flex_nf4.nf4_linear(x, codes_NW, scales_GN)
            report.check(f"nf4_linear T {T} {N} x {K} {dtype}", actual, x.float() @ weight.float().T, 1e-2)
            again = flex_nf4.nf4_linear(x, codes_NW, scales_GN)
            report.check(f"nf4_linear T {T} {N} x {K} {dtype}, again", again, actual, 0.0)
    for kind, (sizes, K) in SHAPES.items():
        base = flex_nf4.NF4Projection(*random_codes(sum(sizes), K), DTYPE, None)
        lora, x = with_lora(base, sizes, K), randn(64, K)
        weight = flex_nf4.nf4_dequantize_reference(base.codes_NW, base.scales_GN, DTYPE).float()
        parts = zip(lora.b_RN.float().split(sizes, dim=1), lora.a_PRK.float())
        expected = x.float() @ (weight + torch.cat([b_RN.T @ a_RK for b_RN, a_RK in parts])).T
        report.check(f"NF4 + LoRA {kind}", lora(x), expected, 1e-2)


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
    for mode in LORA_MODES:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        walker = Qwen3Walker(model, lora_mode=mode)
        print(f"{mode}: {(torch.cuda.memory_allocated() - before) / 1e9:.2f} GB more", flush=True)
        layers = [{kind: getattr(layer, kind) for kind in SHAPES} for layer in walker.layers]
        time_products(report, mode, layers, batches, 2)
        returned, finished = timed(walker.refresh)
        moved = 4 * LAYERS * sum(sum(sizes) * K for sizes, K in SHAPES.values()) if mode == "merged" else 0
        print(report.add("refresh", 0, mode, finished, moved), flush=True)
        print(report.add("refresh, host", 0, mode, returned, 0), flush=True)
        del walker, layers
        torch.cuda.empty_cache()

    def merge_and_unmerge() -> None:
        model.merge_adapter()
        model.unmerge_adapter()

    for variant, us in zip(("returned", "finished"), timed(merge_and_unmerge)):
        print(report.add(PEFT_MERGE, 0, variant, us, 0), flush=True)


def timed(run: Callable[[], object], times: int = 9) -> tuple[float, float]:
    """Median microseconds until `run` returned, and until the GPU had finished."""
    returned, finished = [], []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        returned.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        finished.append(time.perf_counter() - started)
    return statistics.median(returned) * 1e6, statistics.median(finished) * 1e6


def bench_low_rank(report: Report, batches: list[int]) -> None:
    """What follows o and down, and the merge of one layer's down with different tiles."""
    norm = randn(HIDDEN)
    for batch, splits in product(batches, (1, 3)):
        b_RN, residual = randn(RANK, HIDDEN), randn(batch, HIDDEN)
        both = [randn(splits, batch, HIDDEN + RANK, dtype=DTYPE if splits == 1 else torch.float32) for _ in range(LAYERS)]

        def add(i: int, both=both, b_RN=b_RN, residual=residual) -> torch.Tensor:
            return lora_kernels.add_low_rank(*both[i].tensor_split([HIDDEN], dim=-1), b_RN, [HIDDEN], None, residual)

        print(report.add("add_low_rank", batch, f"{splits} splits", graph_us(add), 0), flush=True)
        print(report.add("and norm", batch, f"{splits} splits", graph_us(lambda i, add=add: rms_norm(add(i), norm, 1e-6)), 0))
    bases, outs = ([randn(HIDDEN, INTERMEDIATE) for _ in range(8)] for _ in range(2))
    lefts = [randn(HIDDEN, RANK, dtype=torch.float32) for _ in range(8)]
    rights = [randn(RANK, INTERMEDIATE, dtype=torch.float32) for _ in range(8)]
    for tile in ((128, 64, 16, 8), (64, 64, 16, 4), (64, 64, 32, 8), (128, 64, 32, 8), (128, 128, 16, 8)):
        lora_kernels.merge_low_rank_triton(outs, bases, lefts, rights, [1.0] * 8, tile)  # its tables are made before the capture
        us = graph_us(lambda i, tile=tile: lora_kernels.merge_low_rank_triton(outs, bases, lefts, rights, [1.0] * 8, tile), calls=4)
        print(report.add("merge, 8 layers", 0, f"down {tile}", us, 8 * 4 * HIDDEN * INTERMEDIATE), flush=True)


def print_table(report: Report, batches: list[int]) -> None:
    variants = ("merged", "active", "NF4", "NF4 + LoRA")
    us = {(row.op, row.batch, row.variant): row.us for row in report.rows}
    for batch in batches:
        print(f"\nbatch {batch}, us a layer" + "".join(f"{variant:>12}" for variant in variants))
        for kind in (*SHAPES, "all four"):
            print(f"{kind:24}" + "".join(f"{us[kind, batch, variant]:12.2f}" for variant in variants))
        print(f"{'ms, 36 layers':24}" + "".join(f"{us['all four', batch, v] * LAYERS / 1e3:12.3f}" for v in variants))
    for mode in LORA_MODES:
        print(f"refresh, {mode}: {us['refresh', 0, mode] / 1e3:.2f} ms, of which host {us['refresh, host', 0, mode] / 1e3:.2f}")
    print(f"{PEFT_MERGE}: {us[PEFT_MERGE, 0, 'finished'] / 1e3:.2f} ms")


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
    parser.add_argument("--batches", type=int, nargs="+", default=[64], help="decode rows (default: 64)")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for the sweep of NF4 tiles (default: 8)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    report = Report()
    with torch.no_grad():
        check_all(report)
        bench_low_rank(report, args.batches)
        bench_modes(report, args.batches)
        bench_nf4(report, args.batches, args.budget)
    if args.json:
        figures = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "failures": report.failures}
        figures |= {"errors": report.errors, "rows": [asdict(row) for row in report.rows]}
        args.json.write_text(json.dumps(figures, indent=1))
    print_table(report, args.batches)
    print(f"{len(report.failures)} checks failed: {report.failures}" if report.failures else "all checks passed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
