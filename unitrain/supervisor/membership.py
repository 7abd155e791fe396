"""Select the hosts of an elastic job, and detect host changes that justify a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import click

from unitrain.launchers import ElasticRange, Host, LaunchError, find_reachable_hosts

# Interval between host discoveries, and between probes of an unresponsive host.
POLL_SECONDS = 2.0
_PROBE_AGAIN_SECONDS = 10.0
# If ranks of the same host fail first this many times in a row, the host is excluded for this number of seconds, unless
# too few hosts would remain.
_MAX_FAILURES_IN_A_ROW = 2
_EXCLUSION_SECONDS = 600.0


class Membership:
    """Selects the hosts of each attempt from those returned by `list_hosts`, for a number of ranks in `elastic`.

    Only responsive hosts are selected. Hosts of the previous attempt come first, so that rank 0 remains on its host
    when the job grows. `list_hosts` may raise LaunchError.
    """

    def __init__(
        self, elastic: ElasticRange, list_hosts: Callable[[], tuple[Host, ...]], timeout_seconds: float
    ) -> None:
        self._elastic, self._list_hosts, self._timeout_seconds = elastic, list_hosts, timeout_seconds
        self._selected_hosts: tuple[Host, ...] = ()
        self._latest_choice: tuple[Host, ...] = ()
        self._unresponsive_since: dict[str, float] = {}
        self._excluded_until: dict[str, float] = {}
        self._failing_host: str | None = None  # the host whose rank failed first in the latest attempts
        self._failures_in_a_row = 0  # of this host

    def wait_for_hosts(self, stop_event: threading.Event) -> tuple[Host, ...]:
        """Wait until enough slots are available for the next attempt. Return the hosts with the number of slots to use.

        Return no hosts once `stop_event` is set. Raises LaunchError after the timeout, and immediately if hosts cannot
        be probed at all.
        """
        deadline, is_reported = time.monotonic() + self._timeout_seconds, False
        self._unresponsive_since.clear()
        while not stop_event.is_set():
            problem = ""
            try:
                listed_hosts = self._list_hosts()
            except LaunchError as error:  # the next call may succeed
                listed_hosts, problem = (), f" ({error})"
            if hosts := self._probe_and_select(listed_hosts):
                self._selected_hosts = self._latest_choice = hosts
                return hosts
            responsive_hosts_text = (
                ", ".join(str(host) for host in listed_hosts if host.name not in self._unresponsive_since) or "none"
            )
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--elastic {self._elastic} needs slots for at least {self._elastic.min_ranks} "
                    f"{'rank' if self._elastic.min_ranks == 1 else 'ranks'}, but after {self._timeout_seconds:g} s the "
                    f"hosts that respond are: {responsive_hosts_text}{problem}. Start more hosts, or raise the limit "
                    f"with: --elastic-timeout {2 * self._timeout_seconds:g}"
                )
            if not is_reported:
                _report(
                    f"waiting for slots for {self._elastic.min_ranks} ranks; hosts that respond: "
                    f"{responsive_hosts_text}{problem}"
                )
                is_reported = True
            stop_event.wait(POLL_SECONDS)
        return ()

    def find_change(self) -> str | None:
        """Return a description of the host change if the job should be restarted, else None.

        A restart is due if more slots are available than the job uses. It is also due if a host is no longer listed, or
        is listed with fewer slots than the job uses, and enough slots remain. Two consecutive calls must detect the
        change, because hosts often join one after another.
        """
        try:
            listed_hosts = self._list_hosts()
        except LaunchError as error:
            _report(f"keeping the current hosts: {error}")
            return None
        hosts = self._probe_and_select(listed_hosts, is_running=True)
        is_stable, self._latest_choice = hosts == self._latest_choice, hosts
        num_slots, num_slots_before = _count_slots(hosts), _count_slots(self._selected_hosts)
        listed_slots = {host.name: host.slots for host in listed_hosts}
        reduced = [host for host in self._selected_hosts if listed_slots.get(host.name, 0) < host.slots]
        if not hosts or not is_stable or not (num_slots > num_slots_before or reduced):
            return None
        if not reduced:
            return f"there are {num_slots} slots instead of {num_slots_before}"
        removed = [host.name for host in reduced if host.name not in listed_slots]
        changes = [
            *([f"{', '.join(removed)} {'is' if len(removed) == 1 else 'are'} no longer listed"] if removed else []),
            *(
                f"{host.name} has {slots} {'slot' if slots == 1 else 'slots'} instead of {host.slots}"
                for host in reduced
                if (slots := listed_slots.get(host.name)) is not None
            ),
        ]
        return f"{', '.join(changes)}, and {num_slots} slots remain"

    def record_failure(self, rank: int | None) -> None:
        """Record that `rank` failed first in the latest attempt (None: unknown)."""
        host = None if rank is None else self._host_of(rank)
        self._failures_in_a_row = self._failures_in_a_row + 1 if host == self._failing_host else 1
        self._failing_host = host
        if host is not None and self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self._excluded_until[host] = time.monotonic() + _EXCLUSION_SECONDS
            self._failing_host = None
            _report(
                f"excluding {host} for {_EXCLUSION_SECONDS:g} s while enough other hosts remain: "
                f"its ranks failed first {self._failures_in_a_row} times in a row"
            )

    def _probe_and_select(self, listed_hosts: tuple[Host, ...], *, is_running: bool = False) -> tuple[Host, ...]:
        """Probe the listed hosts. Return the hosts to use, with their slots; empty if too few hosts respond.

        With `is_running`, the job runs on the hosts that were selected before, which are not probed.
        """
        members, now = {host.name for host in self._selected_hosts}, time.monotonic()
        # Hosts of a running job are not probed. Hosts that did not respond are probed again after 10 s.
        not_probed = members if is_running else set()
        probed = [
            host
            for host in listed_hosts
            if host.name not in not_probed
            and now - self._unresponsive_since.get(host.name, -_PROBE_AGAIN_SECONDS) >= _PROBE_AGAIN_SECONDS
        ]
        try:
            responding = find_reachable_hosts(probed)
        except LaunchError:  # a running job continues on its hosts
            if not is_running:
                raise
            responding = set()
        self._unresponsive_since |= {host.name: now for host in probed if host.name not in responding}
        for name in responding:
            self._unresponsive_since.pop(name, None)
        available = [host for host in listed_hosts if host.name in responding or host.name in not_probed]
        available.sort(key=lambda host: host.name not in members)
        not_excluded = [host for host in available if self._excluded_until.get(host.name, 0.0) <= now]
        return self._elastic.select_hosts(not_excluded) or self._elastic.select_hosts(available)

    def _host_of(self, rank: int) -> str | None:
        for host in self._selected_hosts:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        return None


def _count_slots(hosts: tuple[Host, ...]) -> int:
    return sum(host.slots for host in hosts)


def _report(text: str) -> None:
    click.echo(f"unitrain: {text}", err=True)
