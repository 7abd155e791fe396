"""The hosts of an elastic job: which there are, which of them answer, and when the job should be started anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import click

from unitrain.launchers import Elastic, Host, LaunchError, find_reachable_hosts

# How often the hosts are looked for, and how often one that has not answered is asked again.
POLL_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 10.0
# A host on which the first rank to die has been twice in a row is left out for so long, where others suffice.
_LEFT_OUT_SECONDS = 600.0
_DEATHS = 2


class Membership:
    """Chooses the hosts of each attempt out of those that `listed` returns, for an `elastic` number of ranks.

    Hosts that were in the attempt before come first, so that a job that grows has its rank 0 where it was. Only hosts
    that answer are chosen. `listed` may raise LaunchError.
    """

    def __init__(self, elastic: Elastic, listed: Callable[[], tuple[Host, ...]], timeout_seconds: float) -> None:
        self._elastic, self._listed, self._timeout_seconds = elastic, listed, timeout_seconds
        self._chosen: tuple[Host, ...] = ()
        self._silent: dict[str, float] = {}
        self._left_out: dict[str, float] = {}
        self._deaths: tuple[str, int] = ("", 0)
        self._wanted: tuple[Host, ...] = ()

    def gather(self, ended: threading.Event) -> tuple[Host, ...]:
        """Return the hosts for the next attempt, with the slots that are used of each; wait until there are enough.

        Returns none once `ended` is set. Raises LaunchError if there are too few, or none can be found, for longer
        than the timeout, and at once where no host can be asked.
        """
        deadline, told = time.monotonic() + self._timeout_seconds, False
        self._silent.clear()
        while not ended.is_set():
            failure = ""
            try:
                listed = self._listed()
            except LaunchError as error:  # it may succeed the next time
                listed, failure = (), f" ({error})"
            if hosts := self._choose(listed):
                self._chosen = self._wanted = hosts
                return hosts
            found = (", ".join(str(host) for host in listed if host.name not in self._silent) or "none") + failure
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--elastic {self._elastic} needs slots for {self._elastic.least} "
                    f"{'rank' if self._elastic.least == 1 else 'ranks'}, but for {self._timeout_seconds:g} s the hosts "
                    f"that answer were {found}. Bring back the others, or wait longer with: --elastic-timeout "
                    f"{2 * self._timeout_seconds:g}"
                )
            if not told:
                _say(f"waits for slots for {self._elastic.least} ranks; hosts that answer: {found}")
                told = True
            ended.wait(POLL_SECONDS)
        return ()

    def change(self) -> str | None:
        """Return what has changed for the better since `gather`, in words, or that hosts are to be given up; else None.

        It has to be so twice in a row, because hosts often come together. A host that is listed no longer is given up
        only where the others are enough. May take as long as it takes to find out.
        """
        try:
            listed = self._listed()
        except LaunchError as error:
            _say(f"keeps to its hosts: {error}")
            return None
        hosts = self._choose(listed, running=True)
        settled, self._wanted = hosts == self._wanted, hosts
        now, before = _slots(hosts), _slots(self._chosen)
        slots = {host.name: host.slots for host in listed}
        gone = [host.name for host in self._chosen if slots.get(host.name, 0) < host.slots]
        if hosts and settled and (now > before or gone):
            came = f"there are slots for {now} ranks instead of {before}"
            return came if not gone else f"{', '.join(gone)} should be given up, {now} ranks are left"
        return None

    def note_death(self, rank: int | None) -> None:
        """Take notice that `rank` was the first to die, or None where that is not known."""
        host = None if rank is None else self._host_of(rank)
        if host is None:
            self._deaths = ("", 0)
            return
        deaths = self._deaths[1] + 1 if self._deaths[0] == host else 1
        self._deaths = (host, deaths)
        if deaths >= _DEATHS:
            self._left_out[host] = time.monotonic() + _LEFT_OUT_SECONDS
            self._deaths = ("", 0)
            _say(f"leaves out {host} for {_LEFT_OUT_SECONDS:g} s where others suffice: a rank there died twice")

    def _choose(self, listed: tuple[Host, ...], *, running: bool = False) -> tuple[Host, ...]:
        members, now = {host.name for host in self._chosen}, time.monotonic()
        # The hosts of a running job need not be asked; those that were silent just now are asked a little later.
        unasked = members if running else set()
        asked = [
            host
            for host in listed
            if host.name not in unasked and now - self._silent.get(host.name, -_ASK_AGAIN_SECONDS) >= _ASK_AGAIN_SECONDS
        ]
        try:
            answers = find_reachable_hosts(asked)
        except LaunchError:  # a job that runs goes on where it is
            if not running:
                raise
            answers = set()
        self._silent |= {host.name: now for host in asked if host.name not in answers}
        for name in answers:
            self._silent.pop(name, None)
        present = [host for host in listed if host.name in answers or host.name in unasked]
        present.sort(key=lambda host: host.name not in members)
        trusted = [host for host in present if self._left_out.get(host.name, 0.0) <= now]
        return self._elastic.select_slots(trusted) or self._elastic.select_slots(present)

    def _host_of(self, rank: int) -> str | None:
        for host in self._chosen:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        return None


def _slots(hosts: tuple[Host, ...]) -> int:
    return sum(host.slots for host in hosts)


def _say(text: str) -> None:
    click.echo(f"unitrain: the job {text}", err=True)
