"""Interfaces: the network interface of this host that leads to another one."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915
"""The request for an interface's IPv4 address (netdevice(7))."""


def interface_to(address: str) -> str | None:
    """The name of the interface by which this host reaches `address`; None where it is not found.

    Nothing is sent: connecting a datagram socket only asks the kernel for the route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            own = socket.inet_aton(probe.getsockname()[0])
        except OSError:
            return None
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", os.fsencode(name)))
            try:
                fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request, True)
            except OSError:  # an interface without an address
                continue
            if bytes(request[20:24]) == own:
                return name
    return None


def chosen_interface(backend: str) -> str:
    """The interface that the environment sets for a backend, as `NAME=VALUE` or as not set."""
    name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    value = os.environ.get(name)
    return f"{name} is not set" if value is None else f"{name}={value}"
