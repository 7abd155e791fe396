"""Authentication of what the processes of a job send each other, with the key that `unitrain launch` gives them.

The stores and sockets of a job accept connections from any program that can reach them. A message is therefore signed
with HMAC-SHA256 and verified before it is used. Without a key, as under a launcher that the user has typed, messages
are neither signed nor verified.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable

from unitrain.bootstrap import environment
from unitrain.errors import AuthenticationError

SIGNATURE_BYTES = 32
_NONCE_BYTES = 16
_SIGNED, _UNSIGNED = "s", "u"


def new_key() -> str:
    """Return a random key for one job, as text."""
    return secrets.token_hex(32)


def has_key() -> bool:
    """Return whether this process was given the key of its job."""
    return environment.setting(environment.JOB_KEY) is not None


def sign(content: bytes | memoryview, purpose: str = "") -> bytes:
    """Return the signature of `content` for a `purpose`, of SIGNATURE_BYTES; empty where there is no key.

    A signature for one purpose is not valid for another one.
    """
    return _sign(environment.setting(environment.JOB_KEY) or "", content, purpose)


def verify(content: bytes | memoryview, signature: bytes | memoryview, purpose: str = "") -> bool:
    """Return whether `signature` is that of `content` for this `purpose`."""
    return hmac.compare_digest(sign(content, purpose), signature)


def seal(text: str, purpose: str) -> str:
    """Return `text` with its signature for a `purpose`, as `unseal` takes it; marked as unsigned without a key."""
    return f"{_SIGNED}{sign(text.encode(), purpose).hex()}{text}" if has_key() else _UNSIGNED + text


def unseal(sealed: bytes, purpose: str) -> str:
    """Return the text that was sealed for this `purpose`. Raises AuthenticationError for anything else."""
    mark, content = sealed[:1].decode("latin-1"), sealed[1:]
    length = 2 * SIGNATURE_BYTES if has_key() else 0
    signature, text = content[:length], content[length:]
    if mark != (_SIGNED if length else _UNSIGNED):
        reason = "it is signed, and this process has no key" if mark == _SIGNED else "it is not signed"
    elif length and not hmac.compare_digest(sign(text, purpose).hex().encode(), signature):
        reason = "its signature is not valid"
    else:
        return text.decode()
    raise AuthenticationError(
        f"The value of {purpose!r} was not written by a process of this job: {reason}. Give all ranks the same "
        f"{environment.JOB_KEY}, or see which other program can reach the job's ports: docs/security.md"
    )


def prove(connection: socket.socket, key: str | None, role: str, *, accepts: bool) -> None:
    """Show the other end of a connection that this process has the job's `key`, and verify that the other end has it.

    Both ends call it with the same `role`; the end that accepted the connection passes `accepts`. Nothing is sent where
    the key is None. Raises AuthenticationError for another key, OSError for a connection that ends or times out.
    """
    if key is None:
        return
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own)
    other = receive_exactly(connection, _NONCE_BYTES)
    nonces = own + other if accepts else other + own
    signature: Callable[[bool], bytes] = lambda accepted: _sign(key, nonces, f"{role} {accepted}")  # noqa: E731

    def check() -> None:
        if not hmac.compare_digest(receive_exactly(connection, SIGNATURE_BYTES), signature(not accepts)):
            raise AuthenticationError(
                f"The other end of a connection for {role} does not have this job's {environment.JOB_KEY}. Give all "
                "ranks the same, or see which other program can reach the job's ports: docs/security.md"
            )

    # The end that connects signs first, so that nobody who connects obtains a signature.
    if accepts:
        check()
        connection.sendall(signature(accepts))
    else:
        connection.sendall(signature(accepts))
        check()


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Return the next `length` bytes. Raises ConnectionError where the connection ends before."""
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError(f"the connection ended after {len(received)} of {length} bytes")
        received += part
    return received


def _sign(key: str, content: bytes | memoryview, purpose: str) -> bytes:
    if not key:
        return b""
    name = purpose.encode()
    digest = hmac.new(key.encode(), len(name).to_bytes(4, "big") + name, hashlib.sha256)
    digest.update(content)
    return digest.digest()
