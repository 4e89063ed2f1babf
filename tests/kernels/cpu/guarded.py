"""Memory that ends where nothing may be read: what a kernel touches beyond it ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PROT_NONE = 0


class GuardedTensor:
    """A copy of a tensor whose last byte lies before a page without access.

    Attributes:
        tensor: the copy; use it while this object lives.
    """

    def __init__(self, source: Tensor) -> None:
        size = source.numel() * source.element_size()
        end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, end + mmap.PAGESIZE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
        self.tensor = whole[end - size : end].view(source.dtype).view(source.shape)
        self.tensor.copy_(source)
        guard = ctypes.c_void_p(whole.data_ptr() + end)
        if ctypes.CDLL(None, use_errno=True).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
