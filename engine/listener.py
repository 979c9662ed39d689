"""The engine's Unix socket: where it lies, and who may connect."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from pathlib import Path

from engine.errors import StartError

MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
BACKLOG = 128


def listen(path: Path) -> socket.socket:
    """A listening, non-blocking socket at `path`, in a directory that only its owner may enter.

    A missing directory is made. A socket file that a dead engine left behind is replaced. Raises StartError.
    """
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise StartError(
            "socket_path_too_long",
            f"the socket path {path} has {size} bytes and the system allows {MAX_SOCKET_PATH_BYTES}: "
            "choose a data directory with a shorter path",
        )
    try:
        _private_directory(path.parent)
        _remove_dead_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous_umask = os.umask(0o077)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous_umask)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        raise StartError("socket_unavailable", f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


def _private_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise StartError(
            "socket_directory_not_private",
            f"{directory} has mode {mode:04o} and owner {status.st_uid}: anyone who can enter it can read prompts. "
            f"It must belong to user {os.geteuid()} with mode 0700 (chmod 700 {directory})",
        )


def _remove_dead_socket(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise StartError("socket_unavailable", f"{path} exists and is not a socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            caller.connect(str(path))
            raise StartError("socket_in_use", f"another engine listens at {path}: stop it first")
    path.unlink(missing_ok=True)


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel. Raises OSError."""
    if sys.platform == "linux":
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getpeereid(connection.fileno(), ctypes.byref(uid), ctypes.byref(gid)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return uid.value
