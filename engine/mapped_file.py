"""A file mapped into memory at the border of a large page, in large pages where the kernel has them (Linux).

Python's own `mmap` takes whatever address comes. The kernel puts large pages under a mapping only where address and file
offset agree, and under an anonymous file only when it is asked to gather the small ones (MADV_COLLAPSE, Linux 6.1): without,
attention over such a KV pool misses the address cache at every other block.
"""

import ctypes
import mmap
import os
import weakref
from typing import Final

LARGE_PAGE_BYTES: Final = 2 << 20
_MADV_COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(descriptor: int, num_bytes: int, *, writable: bool) -> memoryview:
    """The file's first bytes; unmapped when nothing refers to them any more. Raises OSError.

    Not to be written unless `writable`: the kernel would end the process.
    """
    room = num_bytes + LARGE_PAGE_BYTES
    reserved = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    start = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(start, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, room)
        raise
    memory = (ctypes.c_uint8 * num_bytes).from_address(start)
    weakref.finalize(memory, _libc.munmap, reserved, room).atexit = False  # the process's end unmaps it, behind all threads
    return memoryview(memory).cast("B")


def gather_large_pages(memory: memoryview) -> bool:
    """Put large pages, all present, under a new file. False where the kernel cannot, or has too few in one piece; never fails."""
    whole = len(memory) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    for at in range(0, whole, LARGE_PAGE_BYTES):
        memory[at] = 0  # nothing is gathered where there is nothing at all
    return bool(_libc.madvise(ctypes.addressof(ctypes.c_uint8.from_buffer(memory)), whole, _MADV_COLLAPSE) == 0)


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(errno := ctypes.get_errno(), os.strerror(errno))
    return int(found)
