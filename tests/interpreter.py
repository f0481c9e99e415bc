"""Triton kernels on a CPU."""

import pytest


@pytest.fixture
def interpreter(monkeypatch):
    """Triton 3.6's interpreter, working on NumPy 2.4, which refuses int() of a one-element array."""
    pytest.importorskip("triton")
    import triton.runtime.interpreter as interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
