"""A job: what is to be run, which may take several attempts, and the command of each of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unitrain import launchers
from unitrain.bootstrap import environment
from unitrain.launchers import Command, Host, LaunchSpec


@dataclass(frozen=True)
class Job:
    """Runs `spec` under `launcher`, and once more after each of `spec.max_restarts` failures.

    `name` is the same in all attempts: by it a Trainer knows what an earlier one has left as its own.
    """

    launcher: str
    spec: LaunchSpec
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def is_restarted(self) -> bool:
        """Whether there may be more than one attempt."""
        return self.spec.max_restarts > 0 or self.spec.elastic is not None

    @property
    def is_followed(self) -> bool:
        """Whether the command that starts it stays until its end."""
        return self.is_restarted or bool(self.spec.wrapper)

    def command(self, hosts: tuple[Host, ...] = (), variables: Mapping[str, str] | None = None) -> Command:
        """Return the command of an attempt, on all slots of these `hosts`, or where none are given on those asked for.

        Every rank gets the `variables` too. Raises LaunchError.
        """
        added = dict(variables or {})
        if self.is_followed:
            added[environment.JOB] = self.name
        if self.spec.elastic is not None:
            added[environment.ELASTIC] = str(self.spec.elastic)
        spec = replace(self.spec, environment={**self.spec.environment, **added})
        if hosts:
            spec = replace(spec, hosts=hosts, num_processes=sum(host.slots for host in hosts))
        return launchers.build(self.launcher, spec)
