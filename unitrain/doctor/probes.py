"""What shows only between the hosts of a job: whether they reach each other, share a folder, and agree on the time."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unitrain.bootstrap.network import address_towards
from unitrain.bootstrap.rendezvous import Rendezvous

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Between:
    """What one rank found out about the others.

    `address` is its own on the way to the others, and `unreachable` what each host's first rank said that it could not
    reach, by host: the address and the reason. `clock` is how many seconds this host is ahead of rank 0's, within the
    time that a message takes. `shares_folder` is whether it sees in its folder what rank 0 leaves in its own.
    """

    address: str
    unreachable: dict[str, str]
    clock: float
    shares_folder: bool

    def as_json(self) -> dict[str, Any]:
        """What was found, as plain data."""
        return vars(self)


def probe(rendezvous: Rendezvous) -> Between:
    """Try what a job between these hosts needs. All ranks call it; no try takes longer than a few seconds."""
    address = _address(rendezvous)
    clock = _clock(rendezvous)
    return Between(
        address=address,
        unreachable=_unreachable(rendezvous, address),
        clock=clock,
        shares_folder=_shares_folder(rendezvous),
    )


def _address(rendezvous: Rendezvous) -> str:
    """Return this host's address on the way to the others, which rank 0's host may take for itself by a loopback."""
    own = address_towards(rendezvous.host)
    others = [other for other in rendezvous.allgather("doctor/address", own) if not other.startswith("127.")]
    return address_towards(others[0]) if own.startswith("127.") and others else own


def _clock(rendezvous: Rendezvous) -> float:
    store, rank = rendezvous.store, rendezvous.rank_info.rank
    rendezvous.allgather("doctor/ready", None)
    if rank == 0:
        time.sleep(0.1)  # until the others wait
        store.set("doctor/time", repr(time.time()))
        return 0.0
    told = float(store.get("doctor/time"))
    return time.time() - told


def _unreachable(rendezvous: Rendezvous, address: str) -> dict[str, str]:
    """Let the first rank of every host listen, and all these try each other."""
    first = rendezvous.rank_info.local_rank == 0
    with contextlib.ExitStack() as stack:
        port = 0
        if first:
            listener = stack.enter_context(socket.create_server((address, 0), backlog=128))
            port = listener.getsockname()[1]
            threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        told = rendezvous.allgather("doctor/listens", [socket.gethostname(), address, port])
        failed: dict[str, str] = {}
        for rank, (host, other, port) in enumerate(told):
            if first and port and rank != rendezvous.rank_info.rank:
                try:
                    socket.create_connection((other, port), timeout=_CONNECT_SECONDS).close()
                except OSError as error:
                    failed[host] = f"{other}:{port}: {error}"
        rendezvous.allgather("doctor/tried", None)
    return failed


def _answer(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed when all have tried
        while True:
            listener.accept()[0].close()


def _shares_folder(rendezvous: Rendezvous) -> bool:
    mark = Path.cwd() / f".unitrain-doctor-{secrets.token_hex(8)}"
    left = False
    if rendezvous.rank_info.rank == 0:
        with contextlib.suppress(OSError):
            mark.touch()
            left = True
    told = rendezvous.allgather("doctor/left", [mark.name, left])
    name, left = told[0]
    seen = left and (Path.cwd() / name).exists()
    rendezvous.allgather("doctor/looked", None)
    if rendezvous.rank_info.rank == 0:
        mark.unlink(missing_ok=True)
    return bool(seen)
