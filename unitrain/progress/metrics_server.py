"""HTTP server of the metrics endpoint. Limits prevent clients from exhausting the file descriptors, threads or memory
of rank 0.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

Application = Callable[..., Iterable[bytes]]

# Prometheus needs one connection. Connections that exceed the limit are closed immediately.
_MAX_CONNECTIONS = 32
_RECEIVE_TIMEOUT_SECONDS = 10.0


class _Handler(WSGIRequestHandler):
    """Handles one request. It closes a connection that sends nothing for `timeout` seconds, and logs nothing."""

    timeout = _RECEIVE_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        pass


class MetricsServer(ThreadingMixIn, WSGIServer):
    """WSGI server with one thread per connection and a limit on the number of connections. Raises OSError if it cannot
    listen."""

    daemon_threads = True

    def __init__(self, address: str, port: int, application: Application) -> None:
        self.address_family, _, _, _, target = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._free_connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((str(target[0]), port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind the socket. Unlike in HTTPServer, the server name is not looked up in DNS, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def start(self) -> None:
        """Handle requests in a background thread."""
        threading.Thread(target=self.serve_forever, name="unitrain metrics server", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free_connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing, so that no traceback is printed if a client closes its connection or sends an invalid request."""
