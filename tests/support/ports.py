"""Free ports of this machine, for servers that a test starts in another process.

Port 0 will not do: such a port comes from the range that every outgoing connection takes its own
from, and between the answer and its use another test may have it. `hocket serve` also takes the
next port for its metrics, and Linux gives a listener odd ports and a connection even ones.
"""

from __future__ import annotations

import contextlib
import random
import socket

_LOWEST, _HIGHEST = 15_000, 32_000  # below the ephemeral range of Linux, 32,768 to 60,999


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free on loopback now.

    Raises RuntimeError if 100 random places are all taken.
    """
    # Not the seeded generator: workers of one session would all meet at the same ports.
    draw = random.SystemRandom()
    for _ in range(100):
        first = draw.randrange(_LOWEST, _HIGHEST - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError(f"no {count} free ports in a row between {_LOWEST} and {_HIGHEST}")
