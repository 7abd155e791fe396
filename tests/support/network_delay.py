"""Delays the frames between network interfaces, on kernels without the queueing discipline netem.

python network_delay.py SECONDS BITS_PER_SECOND INTERFACE...: forward each frame of an interface to all other interfaces
after a delay, with a limited bandwidth per interface, until the process is terminated. Frames that would wait for more
than QUEUE_SECONDS are dropped.

python network_delay.py --compute-checksums INTERFACE: make the kernel compute checksums and divide segments before
frames reach the interface. Otherwise, forwarded frames would have no checksums and exceed the MTU.
"""

from __future__ import annotations

import array
import fcntl
import selectors
import socket
import struct
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_MAX_FRAME_BYTES = 65_600
_SIOCETHTOOL = 0x8946
_SET_CHECKSUMS, _SET_SEGMENTATION, _SET_GENERIC_SEGMENTATION = 0x17, 0x1F, 0x24  # ETHTOOL_STXCSUM, _STSO, _SGSO
QUEUE_SECONDS = 2.0


def disable_offloads(interface: str) -> None:
    """Disable the offloads of `interface`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_SET_SEGMENTATION, _SET_GENERIC_SEGMENTATION, _SET_CHECKSUMS):
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def forward(seconds: float, bits_per_second: float, interfaces: list[str]) -> None:
    """Forward frames until the process is terminated."""
    selector = selectors.DefaultSelector()
    links = []
    for index, interface in enumerate(interfaces):
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        link.bind((interface, 0))
        link.setblocking(False)
        selector.register(link, selectors.EVENT_READ, index)
        links.append(link)
    queues: list[deque[tuple[float, bytes]]] = [deque() for _ in links]
    free_at = [0.0] * len(links)
    print("up", flush=True)
    while True:
        now = time.monotonic()
        waits = [queue[0][0] - now for queue in queues if queue]
        for key, _ in selector.select(max(0.0, min(waits)) if waits else None):
            source = key.data
            try:
                frame, address = links[source].recvfrom(_MAX_FRAME_BYTES)
            except BlockingIOError:
                continue
            if address[2] == socket.PACKET_OUTGOING:
                continue
            now = time.monotonic()
            start = max(now, free_at[source])
            if start - now <= QUEUE_SECONDS:
                free_at[source] = start + 8 * len(frame) / bits_per_second
                queues[source].append((free_at[source] + seconds, frame))
        now = time.monotonic()
        for source, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                _, frame = queue.popleft()
                for target, link in enumerate(links):
                    if target != source:
                        try:
                            link.send(frame)
                        except OSError:  # the interface is down, or its queue is full
                            continue


if __name__ == "__main__":
    if sys.argv[1] == "--compute-checksums":
        disable_offloads(sys.argv[2])
    else:
        forward(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
