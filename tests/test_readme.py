"""What the READMEs promise: the Python example runs, and every file and flag that they name exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS

READMES = {"README.md": ROOT / "README.md", "scripts/benchmarks/README.md": SCRIPTS / "README.md"}


def run_example(number: int) -> str:
    examples = re.findall(r"```python\n(.*?)```", READMES["README.md"].read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", examples[number]], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_python_example_runs(embedded_path):
    printed = run_example(0)
    assert printed.count("length -") + printed.count("stop -") == 4, printed


def test_the_trl_example_runs(embedded_path):
    assert "sampling/sampling_logp_difference/mean" in run_example(1)


@pytest.mark.parametrize("readme", READMES)
def test_files_exist(readme):
    text = READMES[readme].read_text()
    for name in set(re.findall(r"[\w/]+\.py\b", text)):
        assert any((folder / name).exists() for folder in (ROOT, SCRIPTS)), name
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (READMES[readme].parent / link).exists(), link


def test_flags_exist():
    for script in ("qwen3_flex_inference.py", "verify_qwen3_numerics.py"):
        section = READMES["scripts/benchmarks/README.md"].read_text().split(f"## {script}")[1].split("\n## ")[0]
        helped = subprocess.run([sys.executable, SCRIPTS / script, "--help"], capture_output=True, text=True, timeout=120).stdout
        flags = set(re.findall(r"--\w[\w-]+", section))
        assert flags and not flags - set(re.findall(r"--\w[\w-]+", helped))
        if script == "qwen3_flex_inference.py":
            assert not set(re.findall(r"--\w[\w-]+", helped)) - flags - {"--help"}, "a flag that the README leaves out"
