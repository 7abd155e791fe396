"""Which of this host's addresses and interfaces lead to another host.

Gloo and Horovod otherwise take the address that the own host name resolves to, which on Debian is 127.0.1.1: they then
refuse connections, or hang, as soon as there are two hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

LOOPBACK = "127.0.0.1"
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
        if own == address or (is_loopback(own) and is_loopback(address)):
            return name
    return None


def own_addresses() -> list[str]:
    """Return this host's addresses, the most promising first: on the way out, others, and loopback last."""
    found = list(interfaces().values())
    with contextlib.suppress(OSError):  # no way out
        found.insert(0, address_towards("10.255.255.255"))
    return sorted(dict.fromkeys(found), key=is_loopback) or ["127.0.0.1"]


def reachable_addresses(addresses: list[str], port: int, seconds: float) -> list[str]:
    """Return those of the addresses where somebody listens at `port`; all are tried at once, for so long."""

    def answers(address: str) -> bool:
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(len(addresses)) as pool:
        return [address for address, answer in zip(addresses, pool.map(answers, addresses), strict=True) if answer]


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address means this host on every host."""
    return address.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `port`, or at a free port for 0, on the one address that `host` stands for.

    It listens on all interfaces where no address of this machine can be derived from `host`: its name resolves to an
    address of another machine, as for a Kubernetes service, or to a loopback address that other hosts cannot reach, as
    Debian's installer sets it up. Raises OSError for a port that is in use.
    """
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return socket.create_server(("", port), backlog=1024)
    if is_loopback(str(address[0])) and not (name == "localhost" or is_loopback(name)):
        return socket.create_server(("", port), backlog=1024)
    try:
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), backlog=1024)


def free_port() -> int:
    """Return a TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
