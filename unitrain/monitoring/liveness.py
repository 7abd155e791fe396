"""A connection between rank 0 and every other rank on which nothing is said but goodbye.

The system closes a process's connections whatever it dies of, so one that ends without a goodbye is a rank that was
killed: nobody else could tell of that, where no launcher looks after the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

import torch.distributed as dist

from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import prove
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.network import listen
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import AuthenticationError

_JOIN_SECONDS = 10.0
_PERIOD_MILLISECONDS = 500
_HERE, _GOODBYE = b"+", b"."
_open: WeakSet[LivenessCheck] = WeakSet()


class LivenessCheck:
    """This rank's connections; `on_loss` is called, in a thread, with the first rank whose process is gone without a
    goodbye. All ranks make one at the same time, then call `start`.

    Rank 0 has a connection to each, every other rank one to rank 0. A rank that cannot be reached is not missed.
    """

    def __init__(self, rendezvous: Rendezvous, on_loss: Callable[[int], None]) -> None:
        self._on_loss = on_loss
        self._peers: dict[int, socket.socket] = {}
        self._closed = False
        self.exited_ranks: set[int] = set()  # ranks that have closed their connection in order
        self._store = MessageStore(dist.PrefixStore("presence", rendezvous.store), "presence")
        with contextlib.suppress(OSError, dist.DistError, AuthenticationError):
            if rendezvous.rank_info.rank == 0:
                self._meet_all(rendezvous)
            else:
                self._meet_first(rendezvous)
        _open.add(self)
        _see_to_ends()

    def start(self) -> None:
        """Begin to listen, in a thread of its own: it must hear even while rank 0's store does not answer."""
        threading.Thread(target=self._listen, name="unitrain presence", daemon=True).start()

    def _listen(self) -> None:
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        for number in ranks:
            poll.register(number, select.POLLIN)
        while ranks and not self._closed:
            for number, _ in poll.poll(_PERIOD_MILLISECONDS):
                poll.unregister(number)
                rank = ranks.pop(number)
                try:
                    said = self._peers[rank].recv(1)
                except OSError:
                    said = b""
                except KeyError:  # closed by this rank, which ends too
                    return
                if said == _GOODBYE:
                    self.exited_ranks.add(rank)
                else:
                    if not self._closed:
                        self._on_loss(rank)
                    return

    def close(self) -> None:
        """Say goodbye; a second call does nothing."""
        self._closed = True
        while self._peers:
            _, peer = self._peers.popitem()
            with contextlib.suppress(OSError):
                peer.send(_GOODBYE)
            peer.close()

    def forget(self) -> None:
        """Let go of the connections without a word: this is another process now, and they are those of its parent."""
        while self._peers:
            self._peers.popitem()[1].close()

    def _meet_all(self, rendezvous: Rendezvous) -> None:
        size, password = rendezvous.rank_info.size, secrets.token_hex(16)
        with listen(rendezvous.host, 0) as server:
            self._store.set("door", f"{server.getsockname()[1]} {password}")
            deadline = time.monotonic() + _JOIN_SECONDS
            while len(self._peers) < size - 1 and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                peer, _ = server.accept()
                peer.settimeout(_JOIN_SECONDS)
                with contextlib.suppress(OSError, ValueError, AuthenticationError):
                    prove(peer, environment.setting(environment.JOB_KEY), "presence", accepts=True)
                    told, rank = _read(peer, len(password) + 9).split()
                    if secrets.compare_digest(told, password):
                        peer.sendall(_HERE)
                        self._peers[int(rank)] = peer
                        continue
                peer.close()

    def _meet_first(self, rendezvous: Rendezvous) -> None:
        port, password = self._store.get("door").decode().split()
        peer = socket.create_connection((rendezvous.host, int(port)), timeout=_JOIN_SECONDS)
        prove(peer, environment.setting(environment.JOB_KEY), "presence", accepts=False)
        peer.sendall(f"{password} {rendezvous.rank_info.rank:08d}".encode())
        if _read(peer, 1) == _HERE.decode():
            self._peers[0] = peer
        else:
            peer.close()


def _read(peer: socket.socket, length: int) -> str:
    told = b""
    while len(told) < length and (part := peer.recv(length - len(told))):
        told += part
    return told.decode()


@functools.cache
def _see_to_ends() -> None:
    """See that a process which ends in order says goodbye, and that none which is forked from this one, such as a
    DataLoader's worker, keeps its connections open."""

    def close() -> None:
        for liveness_check in list(_open):
            liveness_check.close()

    def forget() -> None:
        for liveness_check in list(_open):
            liveness_check.forget()

    atexit.register(close)
    os.register_at_fork(after_in_child=forget)
