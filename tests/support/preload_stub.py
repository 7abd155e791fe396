"""A `sitecustomize` module that turns a Python process into the stub of a forked, preloaded process. See `preload.py`.

The module is copied to a folder on PYTHONPATH, next to the server's socket and a file with the properties that a
process must share with the server. It imports only modules that are implemented in C, because every process of a
launch runs it.
"""

import sys


def _run_in_server() -> None:
    """Let the server run this program. If the server cannot run it, return, so that the program starts normally."""
    import marshal
    import posix

    folder = __file__.rpartition("/")[0]
    options, rest = [], sys.orig_argv[1:]
    while rest and rest[0] in ("-u", "-P", "-B"):
        options.append(rest.pop(0))
    try:
        with open(f"{folder}/server", "rb") as file:  # noqa: PTH123
            server = marshal.load(file)
    except OSError:
        return
    if rest[:1] == ["-m"]:
        if rest[1:2] == [] or (rest[1] not in server["modules"] and tuple(rest[1:3]) not in server["commands"]):
            return
    elif rest[:1] == ["-c"]:
        if not rest[1].startswith(server["codes"]):
            return
    else:
        script = rest[0].rpartition("/")[2] if rest else ""
        if script not in server["programs"] and (not script.endswith(".py") or script in server["plain_scripts"]):
            return
    environment = {name.decode(): value.decode(errors="surrogateescape") for name, value in posix.environ.items()}
    if sys.prefix != server["prefix"] or any(
        name.startswith(server["plain_variables"])
        and name not in server["supported_variables"]
        and server["variables"].get(name) != text
        for name, text in environment.items()
    ):
        return
    for entry in sys.path:
        if entry not in server["path"] and any(_exists(f"{entry}/{package}") for package in server["packages"]):
            return  # a package has another version than in the server

    import _signal
    import _socket

    namespaces = []
    for name, link in server["namespaces"].items():
        if posix.readlink(f"/proc/self/ns/{name}") != link:
            namespaces.append(name)
    if "user" in namespaces:
        return
    descriptors = [int(name) for name in posix.listdir("/proc/self/fd")]
    kept = []
    for descriptor in sorted(descriptors):
        try:
            if descriptor < 3 or posix.get_inheritable(descriptor):
                kept.append(descriptor)
        except OSError:
            pass  # the descriptor of the directory listing
    if kept[:3] != [0, 1, 2] or posix.isatty(0) or len(kept) > 100:
        return
    connection = _socket.socket(_socket.AF_UNIX)
    try:
        connection.connect(f"{folder}/socket")
    except OSError:
        return
    opened = [posix.open(f"/proc/self/ns/{name}", posix.O_RDONLY) for name in namespaces]
    numbers = range(1, _signal.NSIG)
    umask = posix.umask(0)
    posix.umask(umask)
    request = marshal.dumps(
        {
            "options": options, "arguments": rest, "command_line": sys.orig_argv, "environment": environment,
            "path": sys.path, "folder": posix.getcwd(), "umask": umask, "descriptors": kept, "namespaces": namespaces,
            "streams": [
                (stream.name, stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
                for stream in (sys.stdin, sys.stdout, sys.stderr)
            ],
            "stub": posix.getpid(), "signal_mask": [int(n) for n in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])],
            "ignored_signals": [n for n in numbers if _signal.getsignal(n) == _signal.SIG_IGN],
        }
    )  # fmt: skip
    import array

    rights = array.array("i", [*kept, *opened])
    header = len(request).to_bytes(4, "big")

    def forward(number: int, _: object) -> None:
        try:  # noqa: SIM105 (contextlib is implemented in Python)
            connection.send(bytes([number]))
        except OSError:
            pass  # the forked process has exited and its exit code can be received

    # Signals are forwarded after the request, because the server would read an earlier signal as a part of the request.
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    ignored = (_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD, _signal.SIGTSTP, _signal.SIGTTIN, _signal.SIGTTOU)
    for number in _signal.valid_signals():
        if int(number) not in map(int, ignored) and int(number) < 32 and _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, forward)
    connection.sendmsg([header], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    connection.sendall(request)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
    # The forked process has copies of these descriptors. If this process kept a pipe open, the children of horovodrun
    # would not detect that horovodrun has exited.
    for descriptor in [*kept[3:], *opened]:
        posix.close(descriptor)
    try:
        answer = connection.recv(4)
    except OSError:
        answer = b""
    code = int.from_bytes(answer, "big", signed=True) if len(answer) == 4 else 1
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(-code, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -code)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [-code])
    posix._exit(code)


def _exists(path: str) -> bool:
    import posix

    try:
        posix.stat(path)
    except OSError:
        return False
    return True


_run_in_server()
