"""Takes the figures of results/*.md again on this machine: the jobs of a TOML file, each a command in a process of its own.

    python scripts/benchmarks/run_measurements.py --list
    python scripts/benchmarks/run_measurements.py --vllm_python vllm/bin/python          # all of them; again: those not yet done
    python scripts/benchmarks/run_measurements.py --only qwen3_4b,grpo_flex,grpo_naive

Checks run first, side by side as far as the GPU's memory goes; what is timed runs alone, in the file's order. A job that takes longer than
its limit is ended. Logs and stats go to --out. Exit status 1 if a job failed or was left out.

A job is a table of the file, `[name]`:

    command   what is run from the repository's root; {python} is this interpreter, {vllm_python} the flag's, {out} the folder of --out,
              and any other {word} one of the file's table [words]
    limit_s   seconds after which it is ended
    gpu_gb    a check's: what it takes of the GPU at most, in 10^9 bytes; without it the job runs alone
    needs     names of jobs that must have passed
    env       environment variables
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flex_cli import HelpFormatter, integer, number, save_text
from flex_console import fail, note, terminated_as_interrupted

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2
GRACE_S = 10  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Job:
    name: str
    command: str
    limit_s: float
    gpu_gb: float | None = None
    needs: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """`state`: passed, failed (with an exit status), timed out, or left out (with a reason)."""

    state: str
    command: str
    seconds: float = 0.0


# -------------------------------------------------------------------------------------------------------------------- jobs


def read_jobs(path: str) -> dict[str, Job]:
    """Jobs by name, in the file's order. Ends the script with one line that names the job and key that is wrong."""
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        fail(f"--jobs {path}: {error}")
    words = tables.pop("words", {})
    jobs: dict[str, Job] = {}
    for name, table in tables.items():
        try:
            job = Job(name, **table)
        except TypeError as error:
            fail(f"--jobs {path}: [{name}]: {str(error).removeprefix('Job.__init__() ')}")
        job = replace(job, command=expanded(job.command, words))
        unknown = next((other for other in job.needs if other not in jobs), None)
        if unknown is not None:
            fail(f"--jobs {path}: [{name}] needs {unknown}, which is not above it")
        jobs[name] = job
    return jobs


def expanded(command: str, words: Mapping[str, str]) -> str:
    """With words in the place of their {names}, in each other's texts as well."""
    for name, text in reversed(words.items()):
        command = command.replace(f"{{{name}}}", text)
    return command


def chosen(jobs: Mapping[str, Job], only: Sequence[str] | None) -> list[Job]:
    """Those of --only and what they need, in the file's order."""
    if only is None:
        return list(jobs.values())
    unknown = next((name for name in only if name not in jobs), None)
    if unknown is not None:
        fail(f"--only: there is no job {unknown}; --list names them")
    wanted = set(only)
    for job in reversed(jobs.values()):  # what a job needs stands above it
        if job.name in wanted:
            wanted.update(job.needs)
    return [job for job in jobs.values() if job.name in wanted]


# --------------------------------------------------------------------------------------------------------------------- run


class Running:
    """A job's process, with a session of its own, so that what it has started ends with it."""

    def __init__(self, job: Job, command: str, log: Path) -> None:
        self.job, self.command, self.log = job, command, log
        self.started = time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                shlex.split(command), cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1", **job.env}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def outcome(self) -> Outcome | None:
        """None while it runs within its limit."""
        status, seconds = self.process.poll(), time.monotonic() - self.started
        if status is None and seconds <= self.job.limit_s:
            return None
        state = "passed" if status == 0 else f"failed ({status})"
        if status is None:
            state = "timed out"
        self.end()
        return Outcome(state, self.command, seconds)

    def end(self) -> None:
        """Ends whatever is left of the session."""
        for sent, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            try:
                os.killpg(self.process.pid, sent)
            except ProcessLookupError:
                return
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


class Measurements:
    """Runs jobs and keeps what became of them in `out`/summary.json, from which a later run goes on."""

    def __init__(self, out: Path, vllm_python: str | None, gpu_gb: float, lines: int) -> None:
        self.out, self.vllm_python, self.gpu_gb, self.lines = out, vllm_python, gpu_gb, lines
        self.summary = out / "summary.json"
        self.outcomes: dict[str, Outcome] = {}
        if self.summary.exists():
            self.outcomes = {name: Outcome(**given) for name, given in json.loads(self.summary.read_text()).items()}
        self.running: list[Running] = []

    def command(self, job: Job) -> str:
        words = {"python": sys.executable, "vllm_python": self.vllm_python or "", "out": str(self.out)}
        return expanded(job.command, {name: shlex.quote(text) for name, text in words.items()})

    def is_done(self, job: Job) -> bool:
        outcome = self.outcomes.get(job.name)
        return outcome is not None and outcome.state == "passed" and outcome.command == self.command(job)

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = sorted(jobs, key=lambda job: job.gpu_gb is None)  # stable: checks first, each kind in the file's order
        try:
            while waiting or self.running:
                ahead = {job.name for job in waiting} | {run.job.name for run in self.running}
                job = next((job for job in waiting if self._fits(job) and ahead.isdisjoint(job.needs)), None)
                if job is not None:
                    waiting.remove(job)
                    self._start(job)
                    continue
                time.sleep(POLL_S)
                self._collect()
        finally:
            for run in self.running:
                run.end()

    def _fits(self, job: Job) -> bool:
        taken = [run.job.gpu_gb for run in self.running]
        return not taken or None not in (job.gpu_gb, *taken) and sum(taken) + job.gpu_gb <= self.gpu_gb

    def _collect(self) -> None:
        for run in list(self.running):
            if (outcome := run.outcome()) is not None:
                self.running.remove(run)
                self._record(run.job, outcome)
                for line in run.log.read_text(errors="replace").splitlines()[-self.lines :] if self.lines else []:
                    note(f"    {line}")

    def _start(self, job: Job) -> None:
        command = self.command(job)
        missing = next((need for need in job.needs if self.outcomes[need].state != "passed"), None)
        if missing is not None:
            return self._record(job, Outcome(f"left out: {missing} did not pass", command))
        if "{vllm_python}" in job.command and self.vllm_python is None:
            return self._record(job, Outcome("left out: no --vllm_python", command))
        note(f"{job.name}: {command}")
        self.running.append(Running(job, command, self.out / f"{job.name}.log"))

    def _record(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.name] = outcome
        save_text(json.dumps({name: asdict(given) for name, given in self.outcomes.items()}, indent=2) + "\n", str(self.summary))
        note(f"{job.name}: {outcome.state}, {outcome.seconds:.0f} s")


# -------------------------------------------------------------------------------------------------------------------- main


def gpu_memory_gb() -> float:
    import torch

    if not torch.cuda.is_available():
        fail("the jobs measure a GPU, and there is none: --gpu_gb says what checks may take together")
    return torch.cuda.mem_get_info()[0] / 1e9


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("--jobs", metavar="FILE", default=str(Path(__file__).with_name("measurements.toml")), help="default: measurements.toml")
    parser.add_argument("--only", metavar="NAMES", type=lambda text: text.split(","), help="comma separated; what they need runs too")
    parser.add_argument("--list", action="store_true", help="name the jobs and their commands; nothing is run")
    parser.add_argument("--again", action="store_true", help="also those that have passed before")
    parser.add_argument("--vllm_python", metavar="FILE", help="interpreter of the environment that vLLM is installed in")
    parser.add_argument("--gpu_gb", metavar="X", type=number(0, math.inf, open_low=True), help="what checks take together (default: what is free)")
    parser.add_argument("--lines", metavar="N", type=integer(0), default=12, help="of its log, shown when a job ends")
    parser.add_argument("--out", metavar="FOLDER", default="outputs/measurements", help="logs, stats and summary.json")
    args = parser.parse_args(argv)
    jobs = chosen(read_jobs(args.jobs), args.only)
    if args.list:
        for job in jobs:
            print(f"{job.name}: {' '.join(f'{name}={value}' for name, value in job.env.items())}{' ' if job.env else ''}{job.command}")
        return 0

    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    measurements = Measurements(out, args.vllm_python, args.gpu_gb or gpu_memory_gb(), args.lines)
    todo = [job for job in jobs if args.again or not measurements.is_done(job)]
    try:
        with terminated_as_interrupted():
            measurements.run(todo)
    except KeyboardInterrupt:
        note("interrupted: what has passed is kept, and another run goes on from there")
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        outcome = measurements.outcomes.get(job.name)
        print(f"{job.name:{width}}  {'not run' if outcome is None else f'{outcome.seconds:5.0f} s  {outcome.state}'}")
    return 0 if all(map(measurements.is_done, jobs)) else 1


if __name__ == "__main__":
    sys.exit(main())
