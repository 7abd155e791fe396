"""Authentication of messages between the processes of a job, with a key that `unitrain launch` passes to them.

The stores and sockets of a job accept connections from any program that can reach them. A message in a store is
therefore signed with HMAC-SHA256 and verified before it is used. The peers of a direct connection authenticate each
other when they open it; later messages on it are not signed. Without a key, for example if the user runs the launcher
directly, messages and connections are not verified.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Generator

from unitrain.bootstrap import environment
from unitrain.errors import AuthenticationError

SIGNATURE_BYTES = 32
_NONCE_BYTES = 16
_SIGNED, _UNSIGNED = "s", "u"
# Generator that yields (bytes to send, number of bytes to receive); the caller passes the received bytes to `send`.
Handshake = Generator[tuple[bytes, int], bytes, None]


def new_key() -> str:
    """Return a random key for one job, as text."""
    return secrets.token_hex(32)


def job_key() -> str | None:
    """Return the key of this job, or None if this process has no key."""
    return environment.get_variable(environment.JOB_KEY_VARIABLE)


def has_key() -> bool:
    """Return whether this process has the key of its job."""
    return job_key() is not None


def sign(content: bytes | memoryview, purpose: str = "") -> bytes:
    """Return the signature of `content`, SIGNATURE_BYTES long, or empty bytes without a key.

    A signature is valid for one `purpose` only.
    """
    return _sign(job_key() or "", content, purpose)


def verify(content: bytes | memoryview, signature: bytes | memoryview, purpose: str = "") -> bool:
    """Return whether `signature` is the signature of `content` for `purpose`."""
    return hmac.compare_digest(sign(content, purpose), signature)


def seal(text: str, purpose: str) -> str:
    """Return `text` with its signature for `purpose`, or marked as unsigned if there is no key. See `unseal`."""
    return f"{_SIGNED}{sign(text.encode(), purpose).hex()}{text}" if has_key() else _UNSIGNED + text


def unseal(sealed: bytes, purpose: str) -> str:
    """Return the text that was sealed for `purpose`. Raises AuthenticationError if the signature is not valid."""
    mark, content = sealed[:1].decode("latin-1"), sealed[1:]
    length = 2 * SIGNATURE_BYTES if has_key() else 0
    signature, text = content[:length], content[length:]
    if mark != (_SIGNED if length else _UNSIGNED):
        reason = "it is signed, and this process has no key" if mark == _SIGNED else "it is not signed"
    elif length and not hmac.compare_digest(sign(text, purpose).hex().encode(), signature):
        reason = "its signature is not valid"
    else:
        try:
            return text.decode()
        except UnicodeDecodeError:  # without a key, another program can write any bytes
            reason = "it is not text"
    raise AuthenticationError(
        f"The value of {purpose!r} was not written by a process of this job: {reason}. Give all ranks the same "
        f"{environment.JOB_KEY_VARIABLE}, or find the other program that reaches the job's ports: docs/security.md"
    )


def handshake(key: str | None, purpose: str, *, is_server: bool) -> Handshake:
    """Authenticate this process and its peer to each other with the job's `key`. `Handshake` describes the generator.

    Both peers use the same `purpose`, which names the use of the connection. `is_server` is true on the side that
    accepted the connection. Nothing is sent if the key is None. Raises AuthenticationError if the peer has a different
    key.
    """
    if key is None:
        return
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    peer_nonce = yield own_nonce, _NONCE_BYTES
    nonces = own_nonce + peer_nonce if is_server else peer_nonce + own_nonce
    own_signature = _sign(key, nonces, f"{purpose} {is_server}")
    expected = _sign(key, nonces, f"{purpose} {not is_server}")
    # The client signs first, so that a client without the key does not obtain a signature.
    received = yield b"" if is_server else own_signature, SIGNATURE_BYTES
    if not hmac.compare_digest(received, expected):
        raise AuthenticationError(
            f"The peer of a connection for {purpose} does not have this job's {environment.JOB_KEY_VARIABLE}. Give all "
            "ranks the same key, or find the other program that reaches the job's ports: docs/security.md"
        )
    if is_server:
        yield own_signature, 0


def authenticate(connection: socket.socket, key: str | None, purpose: str, *, is_server: bool) -> None:
    """Run `handshake` on a blocking socket. Raises the errors of `handshake`, and OSError if the connection is closed
    or times out."""
    steps = handshake(key, purpose, is_server=is_server)
    try:
        to_send, num_bytes = next(steps)
        while True:
            connection.sendall(to_send)
            to_send, num_bytes = steps.send(receive_exactly(connection, num_bytes))
    except StopIteration:
        pass


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return the next `num_bytes` bytes. Raises ConnectionError if the connection is closed before all bytes are
    received."""
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError(f"the connection was closed after {len(received)} of {num_bytes} bytes")
        received += part
    return received


def _sign(key: str, content: bytes | memoryview, purpose: str) -> bytes:
    if not key:
        return b""
    name = purpose.encode()
    digest = hmac.new(key.encode(), len(name).to_bytes(4, "big") + name, hashlib.sha256)
    digest.update(content)
    return digest.digest()
