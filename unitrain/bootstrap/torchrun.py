"""torchrun with a rendezvous store that listens on one address only: `python -m unitrain.bootstrap.torchrun`.

The program accepts torchrun's options. torchrun's "static" and "--standalone" rendezvous listen on all network
interfaces, and "--standalone" also unpickles data that any host on the network can write. This module replaces both: a
single host uses the loopback interface unless --rdzv-endpoint is set, and several hosts use the address of the first
host. The rendezvous backends c10d and etcd remain unchanged.

SIGUSR1 and SIGUSR2 are forwarded to the ranks; with --max-restarts, the ranks receive SIGTERM instead. If the first
failed rank exits with 75 because it was preempted, this process also exits with 75. SIGHUP has the effect of SIGTERM,
unless it is ignored, as under nohup. After a signal such as SIGTERM, this process exits with 128 plus the signal number
(143), whereas torchrun prints a traceback and exits with 1. The
summary of failed ranks is printed without torchrun's traceback. If this process is killed, its ranks receive SIGTERM.
If a rank exits with status 0, ranks that wait for it in `unitrain.init` raise an error.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from unitrain.bootstrap.network import LOOPBACK, listen
from unitrain.bootstrap.rendezvous import report_normal_exit
from unitrain.bootstrap.signal_forwarding import WARNING_SIGNALS, forward_warning_signals, terminate_on_hangup
from unitrain.errors import PREEMPTED_EXIT_CODE
from unitrain.output import guard_standard_streams
from unitrain.processes import parent_death_signal_setter
from unitrain.torch_compat import observe_ranks_of_torchrun, serving_options

_BACKEND = "unitrain"
_TIMEOUT_SECONDS = 600
_DEFAULT_PORT = 29500  # default of --master-port


class BoundRendezvous(RendezvousHandler):
    """Rendezvous of a fixed number of nodes with known node ranks, through a store that listens on one address.

    Node 0 serves the store, which the ranks also use. For a single node, port 0 selects a free port.
    """

    def __init__(self, host: str, port: int, node_rank: int, num_nodes: int, run_id: str, timeout: timedelta) -> None:
        self._host, self._port, self._node_rank, self._num_nodes = host, port, node_rank, num_nodes
        self._run_id, self._timeout = run_id, timeout
        self._store: dist.TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: the ranks use the store that node 0 serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Connect the nodes. torchrun calls this method once per attempt of the job."""
        if self._store is None:
            descriptor = None
            if self._node_rank == 0:
                listener = listen(self._host, self._port)
                self._port, descriptor = listener.getsockname()[1], listener.detach()
            self._store = dist.TCPStore(
                self._host,
                self._port,
                self._num_nodes,
                is_master=self._node_rank == 0,
                timeout=self._timeout,
                multi_tenant=True,
                **serving_options(descriptor),
            )
        # The agent of a single node does not communicate with other agents, so it does not need the network.
        store = dist.HashStore() if self._num_nodes == 1 else dist.PrefixStore(self._run_id, self._store)
        address = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, address)

    def report_exit(self, variables: Mapping[str, str], status: int) -> None:
        """Report the exit of a rank with the environment `variables` to ranks that wait for it. If the status is not 0,
        do nothing, because torchrun then terminates these ranks."""
        if status == 0 and self._store is not None:
            with suppress(dist.DistError):  # the process that serves the store has exited
                report_normal_exit(self._store, variables)

    def is_closed(self) -> bool:
        """Return False: the rendezvous is open until torchrun exits."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the number of nodes does not change."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: the store closes when this process exits."""
        return True


def _create_rendezvous(parameters: RendezvousParameters) -> BoundRendezvous:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    seconds = parameters.get_as_int("timeout", _TIMEOUT_SECONDS) or _TIMEOUT_SECONDS
    node_rank = parameters.get_as_int("rank", 0) or 0
    return BoundRendezvous(host, port, node_rank, parameters.max_nodes, parameters.run_id, timedelta(seconds=seconds))


def main() -> None:
    """Run torchrun with this process's arguments. If a rank fails, print torchrun's summary and exit with 1, or exit
    with 75 if the rank was preempted."""
    guard_standard_streams()
    try:
        with tempfile.TemporaryDirectory(prefix="unitrain-torchrun-") as folder:
            _main(folder)
    except ChildFailedError as error:  # the traceback would only show functions of torchrun
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


@record
def _main(error_folder: str) -> None:
    """Run torchrun. The ranks write error files to `error_folder`, unless an option selects another folder."""
    rendezvous: list[BoundRendezvous] = []

    def create_rendezvous(parameters: RendezvousParameters) -> BoundRendezvous:
        rendezvous.append(_create_rendezvous(parameters))
        return rendezvous[-1]

    def report_exit(variables: Mapping[str, str], status: int) -> None:
        for handler in rendezvous:
            handler.report_exit(variables, status)

    rendezvous_handler_registry.register(_BACKEND, create_rendezvous)
    options = run.parse_args(None)
    if not options.log_dir and options.redirects == options.tee == "0":
        options.log_dir = error_folder  # otherwise, torchrun would create a folder and not remove it
    # A rank with a watchdog cancels the signal and detects the exit of this process itself.
    observe_ranks_of_torchrun(parent_death_signal_setter(signal.SIGTERM), report_exit)
    if options.max_restarts:
        # Ranks that receive a warning signal exit after a checkpoint, and torchrun would restart them. torchrun
        # forwards SIGTERM to the ranks and does not restart them.
        for signum in WARNING_SIGNALS:
            signal.signal(signum, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    else:
        forward_warning_signals("LOCAL_RANK")
    # torch would replace the handler of SIGHUP, also one that nohup has set, and forward SIGHUP to the ranks.
    # Old versions of torch do not have the option.
    handled_signals = getattr(options, "signals_to_handle", "").split(",")
    options.signals_to_handle = ",".join(name for name in handled_signals if name.strip() != "SIGHUP")
    terminate_on_hangup()
    try:
        _run(options)
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode != PREEMPTED_EXIT_CODE:
            raise
        sys.exit(PREEMPTED_EXIT_CODE)
    except SignalException as error:
        sys.exit(128 + error.sigval)


def _run(options: Namespace) -> None:
    is_single_node = options.standalone or run.parse_min_max_nnodes(options.nnodes)[1] == 1
    if is_single_node and (options.standalone or (options.rdzv_backend == "static" and not options.rdzv_endpoint)):
        endpoint = f"{LOOPBACK}:0"
    elif options.rdzv_backend == "static":
        endpoint = _static_endpoint(options, default_port=0 if is_single_node else options.master_port or _DEFAULT_PORT)
    else:
        run.run(options)
        return
    settings = [options.rdzv_conf, f"rank={options.node_rank}"]
    options.rdzv_backend, options.rdzv_endpoint = _BACKEND, endpoint
    options.rdzv_conf = ",".join(filter(None, settings))
    options.standalone, options.node_rank = False, 0  # torchrun would warn that it ignores a node rank
    run.run(options)


def _static_endpoint(options: Namespace, default_port: int) -> str:
    """Return HOST:PORT of --rdzv-endpoint, with `default_port` if it has no port. Without --rdzv-endpoint, return the
    endpoint given by --master-addr and --master-port.

    Exits with an error if the endpoint is invalid, or if the other hosts would not know the port. torch's own static
    rendezvous raises an error for an endpoint without a port.
    """
    if not options.rdzv_endpoint:
        return f"{options.master_addr}:{options.master_port or _DEFAULT_PORT}"
    fix = f"Use the same address and port on every host: --rdzv-endpoint node1:{_DEFAULT_PORT}"
    try:
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port)
    except ValueError as error:
        sys.exit(f"unitrain: {error} {fix}")
    if not port and default_port:
        option = f"--rdzv-endpoint {options.rdzv_endpoint}"
        sys.exit(f"unitrain: {option} selects a free port, which other hosts cannot know. {fix}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    main()
