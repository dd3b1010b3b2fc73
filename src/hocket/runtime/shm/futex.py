"""Words of shared memory that processes wait on, asleep in the kernel (Linux futex(2)).

A waiting rank must cost nothing: with eight ranks on two cores a rank that polls takes the core
from the one it waits for. Python has no atomic instructions, the kernel has: FUTEX_WAKE_OP adds
to a word atomically and wakes its sleepers only if the word held a given value, so that the last
of n arrivals, and only it, wakes all others, each exactly once.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

_SYS_FUTEX = 202  # x86-64
_WAIT, _WAKE_OP = 0, 5
_ADD, _EQUAL = 1 << 28, 0 << 24
_EVERYONE = 0x7FFFFFFF
_FIELD = 0xFFF  # operand and comparison of FUTEX_WAKE_OP are 12 bits, signed

_LIBC = ctypes.CDLL(None, use_errno=True)
_syscall: Any = _LIBC.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p] + [ctypes.c_long] * 5


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Nap:
    """The longest a sleeper stays asleep before it looks around."""

    def __init__(self, seconds: float) -> None:
        self._spec = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self.address = ctypes.addressof(self._spec)


def supported() -> bool:
    """Whether this machine's processor and kernel are those the words are written for.

    Plain stores are seen in order by other cores on x86-64 only; elsewhere they would need
    fences that Python does not have.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def futex_works() -> bool:
    """Whether the kernel takes the calls, tried on a word of this process's own."""
    words = (ctypes.c_uint32 * 2)(0, 0)
    address = ctypes.addressof(words)
    ring(address)
    arrive(address, address + 4, -1, 1)
    return bool(words[0] == 0 and words[1] == 0 and _seen(address))


def _seen(address: int) -> bool:
    ring(address)
    return ctypes.c_uint32.from_address(address).value == 1


def wait(address: int, seen: int, nap: Nap) -> None:
    """Sleep while the word at `address` is `seen`; may return early or for no reason."""
    _syscall(_SYS_FUTEX, address, _WAIT, seen, nap.address, 0, 0)


def ring(address: int) -> None:
    """Add one to the word and wake all its sleepers."""
    operation = _ADD | _EQUAL | (1 << 12) | _FIELD  # a word is never -1, so no second waking
    _syscall(_SYS_FUTEX, address, _WAKE_OP, _EVERYONE, 0, address, operation)


def arrive(address: int, other: int, step: int, last: int) -> None:
    """Add `step` (1 or -1) to the word; the process that finds `last` wakes all its sleepers.

    `other` is the address of a word on which nobody ever waits; the kernel wants two.
    """
    operation = _ADD | _EQUAL | (step & _FIELD) << 12 | (last & _FIELD)
    _syscall(_SYS_FUTEX, other, _WAKE_OP, 0, _EVERYONE, address, operation)
