"""Liveness check: connections between rank 0 and every other rank, which detect killed processes.

If no launcher monitors the ranks, only this check detects killed processes.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable

import torch.distributed as dist

from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.network import listen
from unitrain.bootstrap.rank_connections import accept_ranks, connect_to_rank, new_token
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import AuthenticationError
from unitrain.monitoring.peer_connection import ORDERLY_EXIT_MESSAGE, PeerConnection
from unitrain.monitoring.rank_status import format_ranks
from unitrain.output import get_logger
from unitrain.threads import start_thread

_log = get_logger(__name__)

_CONNECT_TIMEOUT_SECONDS = 10.0
# Rank 0 waits longer, because a rank can be late, for example on a host whose name server does not respond.
_ACCEPT_TIMEOUT_SECONDS = 30.0
_POLL_MILLISECONDS = 500
_CONNECTION_PURPOSE = "liveness check"


class LivenessCheck:
    """This rank's connections for the liveness check. All ranks create it at the same time, then call `start`.

    Rank 0 has one connection to every other rank. `on_process_ended` is called at most once, in the thread of the
    check, with the first connected rank whose process has terminated unexpectedly. A rank is not monitored if its
    connection could not be established; rank 0 logs a warning that names such ranks.
    """

    def __init__(self, rendezvous: Rendezvous, on_process_ended: Callable[[int], None]) -> None:
        self._on_process_ended = on_process_ended
        self._peers: dict[int, PeerConnection] = {}
        self._is_closed = False
        self.exited_ranks: set[int] = set()  # ranks that exited normally
        store = MessageStore(dist.PrefixStore("liveness", rendezvous.store), "liveness")
        with contextlib.suppress(OSError, dist.DistError, AuthenticationError):
            if rendezvous.rank_info.rank == 0:
                self._peers = _accept_ranks(rendezvous, store)
            else:
                self._peers = _connect_to_rank_zero(rendezvous, store)

    def start(self) -> None:
        """Start the thread that reads from the connections. The thread does not depend on rank 0's store."""
        start_thread(self._run, name="unitrain liveness", restarts=True)

    def close(self) -> None:
        """Announce a normal exit and close the connections. A second call has no effect."""
        self._is_closed = True
        while self._peers:
            _, peer = self._peers.popitem()
            peer.send_final_message()
            peer.close()

    def _run(self) -> None:
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while ranks and not self._is_closed:
            for descriptor, _ in poll.poll(_POLL_MILLISECONDS):
                poll.unregister(descriptor)
                rank = ranks.pop(descriptor)
                peer = self._peers.get(rank)
                if peer is None:  # `close` was called
                    return
                if peer.receive() == ORDERLY_EXIT_MESSAGE:
                    self.exited_ranks.add(rank)
                else:
                    if not self._is_closed:
                        self._on_process_ended(rank)
                    return


def _connect_to_rank_zero(rendezvous: Rendezvous, store: MessageStore) -> dict[int, PeerConnection]:
    address = store.get("address").decode().split()
    if not address:  # rank 0 could not listen
        return {}
    port, token = address
    rank = rendezvous.rank_info.rank
    connection = connect_to_rank(rendezvous.host, int(port), token, rank, _CONNECTION_PURPOSE, _CONNECT_TIMEOUT_SECONDS)
    return {0: PeerConnection(connection)}


def _accept_ranks(rendezvous: Rendezvous, store: MessageStore) -> dict[int, PeerConnection]:
    token = new_token()
    try:
        server = listen(rendezvous.host, 0)
    except OSError:
        store.set("address", "")  # otherwise the other ranks would wait for this value until the store's timeout
        raise
    with server:
        store.set("address", f"{server.getsockname()[1]} {token}")
        ranks = range(1, rendezvous.rank_info.size)
        accepted = accept_ranks(server, token, ranks, _CONNECTION_PURPOSE, _ACCEPT_TIMEOUT_SECONDS)
    if missing_ranks := [rank for rank in ranks if rank not in accepted]:
        _log.warning(
            "%s did not connect to %s within %g s. If the process of such a rank is killed, the other ranks may wait "
            "for it until the timeout. Allow connections between the hosts of the job.",
            format_ranks(missing_ranks),
            rendezvous.host,
            _ACCEPT_TIMEOUT_SECONDS,
        )
    for connection in accepted.values():
        connection.settimeout(_CONNECT_TIMEOUT_SECONDS)
    return {rank: PeerConnection(connection) for rank, connection in accepted.items()}
