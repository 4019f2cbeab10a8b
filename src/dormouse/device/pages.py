"""The kernel's page tables, through libc: reserve addresses, put a file's bytes there, take them away.

Knows nothing of pools or functions. Every call releases the interpreter lock.
"""

import ctypes
import errno
import os
from pathlib import Path

from dormouse.core.types import Bytes
from dormouse.errors import DeviceError

_NONE, _READ_WRITE = 0x0, 0x3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE, _POPULATE = 0x1, 0x2, 0x10, 0x20, 0x4000, 0x8000
_FAILED = 2**64 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_uint64
_libc.mmap.argtypes = [
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_uint64, ctypes.c_size_t]


def reserve(size_bytes: Bytes) -> int:
    """Addresses that nothing may touch yet."""
    return _mmap(0, size_bytes, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE)


def place(address: int, size_bytes: Bytes, fd: int, offset: Bytes) -> None:
    """Put bytes of a file at reserved addresses, with their page table entries, so that no later touch faults."""
    _mmap(address, size_bytes, _READ_WRITE, _SHARED | _FIXED | _POPULATE, (fd, offset))


def withdraw(address: int, size_bytes: Bytes) -> None:
    """Make the addresses reserved and untouchable again."""
    _mmap(address, size_bytes, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED)


def release(address: int, size_bytes: Bytes) -> None:
    if _libc.munmap(address, size_bytes) != 0:
        raise _failure("munmap", size_bytes)


def mapped_bytes(fd: int) -> Bytes:
    """How many bytes of this process's addresses are backed by the file, as the kernel lists them."""
    status = os.fstat(fd)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _permissions, _offset, device, inode = line.split(None, 5)[:5]
        if (device, inode) == file:
            start, _, end = addresses.partition("-")
            total += int(end, 16) - int(start, 16)
    return total


def _mmap(address: int, size_bytes: Bytes, protection: int, flags: int, file: tuple[int, Bytes] = (-1, 0)) -> int:
    found = int(_libc.mmap(address, size_bytes, protection, flags, *file))
    if found == _FAILED:
        raise _failure("mmap", size_bytes)
    return found


def _failure(call: str, size_bytes: Bytes) -> DeviceError:
    number = ctypes.get_errno()
    return DeviceError(call, errno.errorcode.get(number, str(number)), f"{size_bytes} bytes, {os.strerror(number)}")
