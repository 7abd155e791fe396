"""Which of this host's addresses and interfaces lead to another host.

Gloo and Horovod otherwise take the address that the own host name resolves to, which on Debian is 127.0.1.1: they then
refuse connections, or hang, as soon as there are two hosts.
"""

from __future__ import annotations

import fcntl
import socket
import struct

_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def address_towards(host: str) -> str:
    """Return this host's own address on the route to `host`; nothing is sent. Raises OSError when there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # any port: a datagram socket only looks the route up
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Return this host's interfaces that have an IPv4 address, with it."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _GET_INTERFACE_ADDRESS, request)
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_of(address: str) -> str | None:
    """Return the name of the interface that carries `address`, or None when it cannot be told."""
    for name, own in interfaces().items():
        if own == address or (own.startswith("127.") and address.startswith("127.")):
            return name
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface that leads to `host`, or None when it cannot be told."""
    try:
        return interface_of(address_towards(host))
    except OSError:
        return None


def free_port() -> int:
    """Return a TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
