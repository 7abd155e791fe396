"""One rank of a `RankGroup`: start the backend, then run each function that the group sends, until it sends None.

python -m unitrain.testing.worker HOST PORT BACKEND DEVICE TIMEOUT_SECONDS
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import closing
from multiprocessing.connection import Client, Connection
from typing import Any, NoReturn

from unitrain.bootstrap import environment


def main() -> None:
    """Connect to the group that started this rank, then run the functions that it sends."""
    host, port, backend_name, device, timeout_seconds = sys.argv[1:]
    rank_info = environment.detect()
    with (
        tempfile.NamedTemporaryFile("w+", prefix="unitrain-stacks-") as stacks,
        closing(Client((host, int(port)), authkey=bytes.fromhex(environment.copy()["UNITRAIN_TEST_KEY"]))) as parent,
    ):
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        parent.send((rank_info.rank, os.getpid(), stacks.name))
        sys.path[:0] = parent.recv()
        _serve(parent, backend_name, device, float(timeout_seconds))


def _serve(parent: Connection, backend_name: str, device: str, timeout_seconds: float) -> None:
    import torch

    import unitrain

    torch.set_num_threads(1)  # the ranks of a test share the cores of one host
    backend = None
    while True:
        message: bytes | None = parent.recv()
        if message is None:
            break
        try:
            if backend is None:
                backend = unitrain.init(backend_name, device=device, timeout_seconds=timeout_seconds)
            function, args = pickle.loads(message)
            # parent.send would pass tensors in shared memory, which this process frees when it exits.
            answer = _pickle_on_cpu((True, function(backend, *args)))
            failed = False
        except BaseException as error:
            # The time identifies the rank that failed first. The first report to arrive often comes from a rank that
            # has lost a peer.
            failure_time = time.time()  # before the traceback is formatted, which may take long
            failure = (False, type(error).__name__, str(error), traceback.format_exc(), failure_time)
            answer, failed = pickle.dumps(failure), True
        parent.send_bytes(answer)
        if failed:
            # Do not shut down after a failure, because a shutdown could wait for ranks that hang.
            parent.close()
            os._exit(1)
    if backend is not None:
        backend.shutdown()


def _pickle_on_cpu(value: object) -> bytes:
    """Pickle `value`, with copies of its GPU tensors in CPU memory."""
    import torch

    class CPUPickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            return NotImplemented

    file = io.BytesIO()
    CPUPickler(file).dump(value)
    return file.getvalue()


def exit_process() -> NoReturn:
    """Wait for non-daemon threads, run the exit handlers, and exit without unloading torch, which would take
    seconds."""
    for thread in threading.enumerate():
        if not (thread.daemon or thread is threading.current_thread()):
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    exit_process()
