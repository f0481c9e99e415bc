"""Train, refresh, rollout, many times over: does anything drift or grow, and how much of the adapter does a merge carry?

    python scripts/benchmarks/lora_cycles.py                                                   # embedded model on a CPU
    python scripts/benchmarks/lora_cycles.py --load_format dummy --model_name qwen3-4b-base --cycles 50

A fresh adapter (B is zero) is trained on the engine's own completions, half of them rewarded, by AdamW at --learning_rate. After each
step the engine refreshes and samples again. At the end: the base's hash, the memory that was in use after each cycle, the share of the
delta that a merge keeps after 1, 10, ... updates, and the log-probabilities of both LoRA modes, and of Hugging Face's generate, against
the trainer's forward. Exit status 1 if the base has changed, memory has grown, or a log-probability is not finite.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from peft import get_peft_model
from torch import Tensor, nn
from tqdm import tqdm

from flex_cli import HelpFormatter, add_model_arguments, check_writable, device_name, integer, library_versions, number
from flex_console import fail
from flex_engine import EngineConfig, FlexEngine, RequestOutput, SamplingParams
from flex_lora import LORA_MODES, active_tensors
from flex_models import load_model
from lora_adapters import lora_config
from lora_checks import LogprobError, fingerprint, merge_rounding, mode_errors
from written_walkers import text_model, walker_class_of

MILESTONES = (1, 10, 50, 100)  # updates after which the merge's rounding is reported
SETTLED = 3  # cycles after which memory must not grow any more
ALLOWED_GROWTH = 16 * 2**20  # bytes


@dataclass
class CycleReport:
    model_name: str
    device: str
    versions: dict[str, str]
    lora_mode: str
    cycles: int
    learning_rate: float
    refresh_seconds: float
    """Median of one refresh."""
    base_unchanged: bool = False
    memory_bytes: list[int] = field(default_factory=list)
    """In use after each cycle; empty without a GPU."""
    merge_keeps: dict[int, float] = field(default_factory=dict)
    """Share of the delta, by number of updates."""
    logprob_errors: dict[str, LogprobError] = field(default_factory=dict)

    @property
    def growth_bytes(self) -> int:
        settled = self.memory_bytes[SETTLED:]
        return max(settled) - settled[0] if settled else 0

    @property
    def passed(self) -> bool:
        finite = all(math.isfinite(error.max_abs) for error in self.logprob_errors.values())
        return self.base_unchanged and self.growth_bytes <= ALLOWED_GROWTH and finite

    def __str__(self) -> str:
        lines = [
            f"{self.cycles} cycles of {self.model_name}, LoRA {self.lora_mode}, learning rate {self.learning_rate:g}, on {self.device}",
            f"base weights      {'bit by bit as before' if self.base_unchanged else 'CHANGED'}",
            f"refresh           {1e3 * self.refresh_seconds:.1f} ms, the median",
        ]
        if self.memory_bytes:
            lines.append(f"memory            {self.growth_bytes / 2**20:.1f} MiB more at most than after cycle {SETTLED + 1}")
        kept = ", ".join(f"{share:.1%} after {count}" for count, share in self.merge_keeps.items())
        lines.append(f"a merge keeps     {kept} updates")
        for name, error in self.logprob_errors.items():
            lines.append(f"{name:<17} log-probabilities off by {error.mean_abs:.2g} mean, {error.max_abs:.2g} at most; KL {error.kl:.2g}")
        return "\n".join(lines)


def rewarded_loss(model: nn.Module, outputs: list[RequestOutput]) -> Tensor:
    """Policy gradient with a reward of 1 for every other completion: any adapter may be trained, it need not get better. Prompts are
    of one length, and so are completions."""
    ids_BT = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids for output in outputs], device=model.device)
    first = len(outputs[0].prompt_token_ids)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, first - 1 : -1].float()
    logprobs_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, first:, None])[..., 0]
    sign_B = 1.0 - 2.0 * (torch.arange(len(outputs), device=model.device) % 2)
    return (logprobs_BT.mean(1) * sign_B).mean()


def run_cycles(model: nn.Module, args: argparse.Namespace) -> CycleReport:
    on_gpu = model.device.type == "cuda"
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.batch_size, args.prompt_tokens)
    prompts = torch.randint(model.get_input_embeddings().num_embeddings, shape, generator=generator).tolist()
    config = EngineConfig(max_batch_size=args.batch_size, max_seq_len=args.prompt_tokens + args.max_new_tokens)
    walker_class = walker_class_of(model)
    adapted = get_peft_model(model, lora_config(model, args.lora_rank))
    adapter = {id(parameter) for _, parameter, _ in active_tensors(adapted)}
    engine = FlexEngine(walker_class(adapted, lora_mode=args.lora_mode), config=config)
    base = [(name, parameter) for name, parameter in adapted.named_parameters() if id(parameter) not in adapter]
    before = fingerprint(base)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=args.learning_rate)
    report = CycleReport(
        args.model_name, device_name(model.device), library_versions(), args.lora_mode, args.cycles, args.learning_rate, 0.0
    )
    refresh_seconds = []
    for cycle in tqdm(range(args.cycles), "cycles", disable=None):
        outputs = engine.generate(prompts, SamplingParams(max_tokens=args.max_new_tokens, ignore_eos=True, seed=args.seed + cycle))
        engine.sleep()
        adapted.train()
        rewarded_loss(adapted, outputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        adapted.eval()
        started = time.perf_counter()
        engine.refresh_lora()
        refresh_seconds.append(time.perf_counter() - started)
        if on_gpu:
            report.memory_bytes.append(torch.cuda.memory_allocated(model.device))
        if cycle + 1 in MILESTONES or cycle + 1 == args.cycles:
            report.merge_keeps[cycle + 1] = merge_rounding(adapted).share
    report.refresh_seconds = statistics.median(refresh_seconds)
    report.base_unchanged = fingerprint(base) == before
    del engine
    report.logprob_errors = mode_errors(walker_class, adapted, prompts, args.max_new_tokens, seed=args.seed)
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_model_arguments(parser, "unsloth/Qwen3-4B-Base", with_walker=False)
    group = parser.add_argument_group("cycles")
    group.add_argument("--cycles", metavar="N", type=integer(1), default=50 if torch.cuda.is_available() else 5, help="optimizer steps")
    group.add_argument("--lora_mode", choices=LORA_MODES, default="active", help="of the engine that samples")
    group.add_argument("--lora_rank", metavar="R", type=integer(1), default=32, help="of the adapter")
    group.add_argument("--learning_rate", metavar="X", type=number(0, 1), default=5e-6, help="constant")
    group.add_argument("--batch_size", metavar="N", type=integer(1), default=8, help="prompts, of random token ids")
    group.add_argument("--prompt_tokens", metavar="N", type=integer(1), default=32, help="of each prompt")
    group.add_argument("--max_new_tokens", metavar="N", type=integer(1), default=32, help="of each completion")
    group.add_argument("--seed", metavar="N", type=integer(0), default=0, help="of prompts, sampling and dummy weights")
    group.add_argument("--json", metavar="FILE", help="where the report goes as well")
    args = parser.parse_args(argv)
    if args.json:
        check_writable(args.json, "--json")
    try:
        report = run_cycles(text_model(load_model(args)[0]), args)
    except ValueError as error:
        fail(str(error))
    print(report)
    if args.json:
        Path(args.json).write_text(json.dumps(asdict(report) | {"passed": report.passed}, indent=1) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
