"""A GPU's asynchrony on a CPU, at its worst: what an engine gives its device waits in one queue until somebody waits for an event. A host
buffer that is overwritten too early, or a page or slot that is used again in another order than the stream's, then shows in the tokens."""

from __future__ import annotations

import torch
from flex_engine import FlexEngine
from torch import Tensor


class LateTensor(Tensor):
    """Of the device: writes to it, and copies of it to the host, join the queue. Python's operators and views do not."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        in_place = name == "__setitem__" or name.endswith("_") and not name.startswith("__")
        device = next((x.late_device for x in args if hasattr(x, "late_device")), None)
        if in_place and device is not None:
            device.give(function, *args, **(kwargs or {}))
            return args[0]
        result = super().__torch_function__(function, types, args, kwargs or {})
        if device is not None and isinstance(result, LateTensor):
            result.late_device = device
        return result


class LateEvent:
    def __init__(self, device: LateDevice):
        self.device, self.place = device, len(device.queue)

    def synchronize(self) -> None:
        self.device.run(self.place)

    def elapsed_time(self, end: LateEvent) -> float:
        assert self.place <= end.place <= self.device.done
        return 1000.0  # ms


class LateDevice:
    def __init__(self, engine: FlexEngine):
        self.queue, self.done = [], 0
        state, cache = engine.state, engine.cache
        for owner, names in ((state, "ints floats row_slot step ring_tokens ring_logprobs"), (cache, "page_table logical_page flat")):
            for name in names.split():
                late = getattr(owner, name).as_subclass(LateTensor)
                late.late_device = self
                setattr(owner, name, late)
        prefill, decode_step, copy_pages, upload = engine._prefill, engine._decode_step, cache.copy_pages, cache.upload

        def upload_with_event() -> None:
            if cache.dirty:
                upload()
                cache.uploaded = LateEvent(self)

        # Lists are read at once, as the copies in pinned memory are made at once.
        engine._prefill = lambda prompts: self.give(prefill, [(list(token_ids), list(pages)) for token_ids, pages in prompts])
        engine._decode_step = lambda *args, **kwargs: self.give(decode_step, *args, **kwargs)
        engine._record_event = lambda: LateEvent(self)
        engine._synchronize = lambda: self.run(len(self.queue))
        cache.copy_pages = lambda source, target: self.give(copy_pages, list(source), list(target))
        cache.upload = upload_with_event

    def give(self, function, *args, **kwargs) -> None:
        self.queue.append((function, args, kwargs))

    def run(self, place: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            while self.done < place:
                function, args, kwargs = self.queue[self.done]
                self.queue[self.done] = None
                self.done += 1
                function(*args, **kwargs)
