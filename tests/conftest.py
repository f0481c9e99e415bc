"""Test set-up: scripts importable, no network but where a test says so, GPU tests left out where there is no GPU."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a missing file is an error, not a wait

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run in its interpreter


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)


LEFT_OUT = pytest.StashKey[int]()


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    left_out = config.stash.get(LEFT_OUT, 0)
    return f"no CUDA GPU: {left_out} tests marked gpu are left out" if left_out else None


@pytest.fixture(scope="module")
def one_thread():
    """For tiny matrices: with a thread per core they wait for each other, all the more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter, working on NumPy 2.4, which refuses int() of a one-element array."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """Folder of the embedded model; downloads it on a fresh machine."""
    from embedded_model import embedded_model_path

    return embedded_model_path()
