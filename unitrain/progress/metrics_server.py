"""HTTP server of the metrics endpoint. Limits prevent clients from exhausting the file descriptors, threads or memory
of rank 0.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from unitrain.threads import start_thread

Application = Callable[..., Iterable[bytes]]

# Prometheus needs one connection. Connections that exceed the limit are closed immediately.
_MAX_CONNECTIONS = 32
_REQUEST_SECONDS = 10.0  # for a complete request and its response


class _Handler(WSGIRequestHandler):
    """Handles one request, and logs nothing. The timeout of the socket applies to each part that the client sends."""

    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        pass


class MetricsServer(ThreadingMixIn, WSGIServer):
    """WSGI server with one thread per connection. It limits the number of connections and the time of each connection.
    Raises OSError if it cannot listen."""

    daemon_threads = True

    def __init__(self, address: str, port: int, application: Application) -> None:
        self.address_family, _, _, _, target = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._free_connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._deadlines: dict[Any, float] = {}  # of each open connection
        super().__init__((str(target[0]), port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind the socket. Unlike in HTTPServer, the server name is not looked up in DNS, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def start(self) -> None:
        """Handle requests in a background thread."""
        start_thread(self.serve_forever, name="unitrain metrics server", restarts=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + _REQUEST_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            del self._deadlines[request]
            self._free_connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._deadlines[request]
            self._free_connections.release()

    def service_actions(self) -> None:
        """Shut down connections whose deadline has passed. `serve_forever` calls this method at least every 0.5 s."""
        for request, deadline in list(self._deadlines.items()):
            if time.monotonic() > deadline:
                with suppress(OSError):  # the connection has just been closed
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing, so that no traceback is printed if a client closes its connection or sends an invalid request."""
