"""The runner of measurements, on jobs that take no GPU; and its file, every command of which must be one that its script takes."""

import argparse
import json
import os
import runpy
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import run_measurements

JOBS = Path(run_measurements.__file__).with_name("measurements.toml")


def run(tmp_path, text: str, *flags: str) -> tuple[int, dict[str, str]]:
    """Exit status, and what became of each job."""
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(text)
    status = run_measurements.main(["--jobs", str(jobs), "--out", str(tmp_path / "out"), "--gpu_gb", "10", *flags])
    outcomes = json.loads((tmp_path / "out" / "summary.json").read_text())
    return status, {name: outcome["state"] for name, outcome in outcomes.items()}


def job(name: str, code: str, *lines: str) -> str:
    return f"[{name}]\ncommand = '''{{python}} -c {shlex.quote(code)}'''\n" + "\n".join(lines or ("limit_s = 60",)) + "\n"


@pytest.mark.parametrize("measurement", run_measurements.read_jobs(str(JOBS)).values(), ids=lambda measurement: measurement.name)
def test_every_measurement_is_a_command_that_its_script_takes(measurement, monkeypatch):
    class Parsed(Exception):
        pass

    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(self, *args, **kwargs):
        parse_args(self, *args, **kwargs)
        raise Parsed

    assert "{out}" in measurement.command or "pytest" in measurement.command
    python, script, *flags = shlex.split(measurement.command)
    assert python in ("{python}", "{vllm_python}")
    if script == "-m":
        assert flags == ["pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
        return
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(Parsed):
        runpy.run_path(str(run_measurements.ROOT / script), run_name="__main__")


def test_jobs_pass_fail_and_are_left_out(tmp_path, capfd):
    text = (
        job("good", "print('a figure')")
        + job("bad", "raise SystemExit('the reason')")
        + job("after_good", "import os; assert os.environ['SHAPE'] == '4b'", "limit_s = 60", 'needs = ["good"]', 'env = { SHAPE = "4b" }')
        + job("after_bad", "", "limit_s = 60", 'needs = ["bad"]')
        + "[peer]\ncommand = '{vllm_python} -c pass'\nlimit_s = 60\n"
    )
    status, states = run(tmp_path, text)
    assert status == 1
    assert states == {
        "good": "passed",
        "bad": "failed (1)",
        "after_good": "passed",
        "after_bad": "left out: bad did not pass",
        "peer": "left out: no --vllm_python",
    }
    output = capfd.readouterr()
    assert "the reason" in output.err and "left out: no --vllm_python" in output.out

    status, states = run(tmp_path, text, "--only", "peer", "--vllm_python", sys.executable)
    assert status == 0 and states["peer"] == "passed"


def test_what_has_passed_is_not_run_again(tmp_path):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    for flags in ((), (), ("--again",)):
        assert run(tmp_path, job("once", code), *flags)[0] == 0
    assert count.read_text() == "xx"
    assert run(tmp_path, job("once", code + "; pass"))[0] == 0  # another command is another measurement
    assert count.read_text() == "xxx"


def test_checks_share_the_gpu_and_what_is_timed_runs_alone(tmp_path):
    log = tmp_path / "log"
    code = "import time; f = open({!r}, 'ab', 0); f.write(b'+{}'); time.sleep(0.6); f.write(b'-{}')"
    text = "".join(
        job(name, code.format(str(log), name, name), "limit_s = 60", *([f"gpu_gb = {gpu_gb}"] if gpu_gb else []))
        for name, gpu_gb in (("t", None), ("a", 6), ("b", 6), ("c", 4))
    )
    assert run(tmp_path, text)[0] == 0
    running, together = set(), set()
    events = log.read_text()
    for sign, name in zip(events[::2], events[1::2]):
        (running.add if sign == "+" else running.remove)(name)
        together.add("".join(sorted(running)))
    assert "ac" in together or "bc" in together
    assert not any("t" in names and names != "t" or {"a", "b"} <= set(names) for names in together)
    assert events.endswith("+t-t")


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except OSError:
        return False


def test_a_job_past_its_limit_is_ended_with_its_children(tmp_path):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    status, states = run(tmp_path, job("long", code, "limit_s = 3"))
    assert status == 1 and states == {"long": "timed out"}
    deadline = time.monotonic() + 5
    while is_running(pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid.read_text())


def test_sigterm_keeps_what_has_passed(tmp_path, capsys):
    text = job("first", "") + job("second", "import time; time.sleep(600)")
    started = tmp_path / "out" / "second.log"

    def terminate():
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    status, states = run(tmp_path, text)
    assert status == 1 and states == {"first": "passed"}
    assert "second  not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\ncommand = 'x'\n", "[a]: missing 1 required positional argument: 'limit_s'"),
        ("[a]\ncommand = 'x'\nlimit_s = 1\nlimits = 2\n", "[a]: got an unexpected keyword argument 'limits'"),
        ("[a]\ncommand = 'x'\nlimit_s = 1\nneeds = ['b']\n", "[a] needs b, which is not above it"),
        ("[a\n", "jobs.toml"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(tmp_path, text, message):
    with pytest.raises(SystemExit, match="error: ") as caught:
        run(tmp_path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_names_that_do_not_exist_and_a_machine_without_a_gpu(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="--only: there is no job nothing"):
        run(tmp_path, job("good", ""), "--only", "nothing")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is none"):
        run_measurements.main(["--only", "kernels", "--out", str(tmp_path)])
    assert run_measurements.main(["--list", "--only", "lora_active"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["lora_qwen3_4b", "lora_active"]
