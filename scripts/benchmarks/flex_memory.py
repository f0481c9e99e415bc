"""Device memory that can be given back and taken again behind the same addresses.

A captured graph holds the KV pool's addresses for ever, while a training step wants the pool's memory. CUDA's virtual memory
calls separate the two: the address range is reserved once, and physical memory is mapped behind it or not.
"""

from __future__ import annotations

import ctypes
from math import prod

import torch
from torch import Tensor

_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE

_mapped_bytes = 0
_peak_mapped_bytes = 0


def peak_memory_gb() -> tuple[float, float]:
    """Peak allocated and peak reserved device memory since `reset_peak_memory`, in 10^9 bytes: torch's own peaks, plus the
    peak of what `DeviceMemory` maps outside of torch's allocator."""
    mapped = _peak_mapped_bytes
    return (torch.cuda.max_memory_allocated() + mapped) / 1e9, (torch.cuda.max_memory_reserved() + mapped) / 1e9


def reset_peak_memory() -> None:
    global _peak_mapped_bytes
    _peak_mapped_bytes = _mapped_bytes
    torch.cuda.reset_peak_memory_stats()


def _count_mapped(num_bytes: int) -> None:
    global _mapped_bytes, _peak_mapped_bytes
    _mapped_bytes += num_bytes
    _peak_mapped_bytes = max(_peak_mapped_bytes, _mapped_bytes)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DeviceMemory:
    """`num_bytes` of one CUDA device at a fixed address (CUDA driver API, virtual memory management)."""

    def __init__(self, num_bytes: int, device: torch.device):
        torch.cuda.init()
        self.device = torch.device(device)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self.prop = _AllocationProp(type=_PINNED, location=_Location(_DEVICE, index))
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self.prop), 0)
        step = granularity.value
        self.num_bytes = -(-num_bytes // step) * step
        self.address, self.handle = ctypes.c_uint64(), ctypes.c_uint64()
        self.mapped = False
        alignment, hint, flags = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(self.address), self._size, alignment, hint, flags)
        self.map()

    @property
    def _size(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self.num_bytes)

    def _call(self, name: str, *args) -> None:
        status = getattr(self.cuda, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'CUDA error {status}'}")

    def map(self) -> None:
        """Takes physical memory; what it holds is undefined. torch.OutOfMemoryError where there is too little."""
        if self.mapped:
            return
        try:
            self._call("cuMemCreate", ctypes.byref(self.handle), self._size, ctypes.byref(self.prop), ctypes.c_uint64(0))
        except RuntimeError as error:
            raise torch.OutOfMemoryError(f"{self.num_bytes / 1e9:.2f} GB for the KV pool: {error}") from None
        self._call("cuMemMap", self.address, self._size, ctypes.c_size_t(0), self.handle, ctypes.c_uint64(0))
        access = _AccessDesc(self.prop.location, _READ_WRITE)
        self._call("cuMemSetAccess", self.address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self.mapped = True
        _count_mapped(self.num_bytes)

    def unmap(self) -> None:
        """Gives the physical memory back; nothing may touch the tensors until the next `map`."""
        if not self.mapped:
            return
        torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", self.address, self._size)
        self._call("cuMemRelease", self.handle)
        self.mapped = False
        _count_mapped(-self.num_bytes)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A view of `shape` that starts `offset` bytes in. It does not keep the memory alive; the owner must."""
        num_bytes = prod(shape) * dtype.itemsize
        assert offset + num_bytes <= self.num_bytes

        class Interface:
            __cuda_array_interface__ = {
                "shape": (num_bytes,),
                "typestr": "|u1",
                "data": (self.address.value + offset, False),
                "version": 3,
            }

        return torch.as_tensor(Interface(), device=self.device).view(dtype).view(shape)

    def __del__(self):
        if getattr(self, "mapped", False):
            self.unmap()
            self._call("cuMemAddressFree", self.address, self._size)
