"""Addresses and interfaces of this host, and listening sockets.

By default, Gloo and Horovod use the address to which the host's own name resolves. On Debian, this is 127.0.1.1, so
connections between hosts are refused or hang.
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
# poll(2) takes milliseconds as a C int. Longer timeouts raise OverflowError in Python, and are negative in C++.
_MAX_WAIT_SECONDS = 24 * 24 * 3600.0


def limit_wait(seconds: float) -> float:
    """Return a timeout of at most 24 days, which poll, sockets and torch's stores support, for a timeout of the user of
    up to a year. A caller whose own deadline is later waits again."""
    return min(seconds, _MAX_WAIT_SECONDS)


def local_address_for(host: str) -> str:
    """Return this host's IPv4 address on the route to `host`. Apart from the resolution of a name, no packet is sent.
    Raises OSError if the name does not resolve or there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # the port does not matter: connecting a datagram socket only selects the route
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this host, by the name of the interface."""
    address_by_interface: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _GET_INTERFACE_ADDRESS, request)
            except OSError:
                continue  # without an IPv4 address
            address_by_interface[name] = socket.inet_ntoa(reply[20:24])
    return address_by_interface


def interface_with_address(address: str) -> str | None:
    """Return the name of the interface with `address`, or None if there is none. Any loopback address belongs to the
    loopback interface."""
    for name, interface_address in interfaces().items():
        if interface_address == address or (is_loopback(interface_address) and is_loopback(address)):
            return name
    return None


def own_addresses() -> list[str]:
    """Return this host's addresses: the address of the default route, the other addresses, and last the loopback
    addresses."""
    addresses = list(interfaces().values())
    with contextlib.suppress(OSError):  # there is no default route
        addresses.insert(0, local_address_for("10.255.255.255"))
    return sorted(dict.fromkeys(addresses), key=is_loopback) or ["127.0.0.1"]


def find_reachable_addresses(addresses: list[str], port: int, timeout_seconds: float) -> list[str]:
    """Return the `addresses` that accept a connection to `port` within `timeout_seconds`."""

    def is_reachable(address: str) -> bool:
        try:
            socket.create_connection((address, port), timeout=timeout_seconds).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(len(addresses)) as pool:
        return [
            address
            for address, reachable in zip(addresses, pool.map(is_reachable, addresses), strict=True)
            if reachable
        ]


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address is a loopback address."""
    return address.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port`, or on a free port if `port` is 0, at the address of `host`.

    If `host` is "localhost" or a loopback address, the socket listens only there. It listens on all interfaces if
    `host` does not resolve to an address of this machine, or is another name that resolves to a loopback address. For
    example, the name of a Kubernetes service resolves to an address of another machine, and Debian's installer maps the
    host name to a loopback address. Raises OSError if the port is in use.
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


def check_can_listen(address: str, port: int) -> None:
    """Raise OSError if this process cannot listen on `port` at `address`, for example because the port is in use."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    socket.create_server(target, family=family).close()  # create_server sets SO_REUSEADDR


def find_free_port() -> int:
    """Return a TCP port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a free TCP port. While it is open, the port is not assigned to another program.

    The socket does not listen, so `listen` can still bind to this port. Until then, connections are refused.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    return reservation
