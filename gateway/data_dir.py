"""The data directory: who may use it, which version it has, and where the run-time files lie.

format      the version of everything below
lock        held by the running server (flock: it goes with the process, however that ends)
admin.key   keys/       secrets of the first start, mode 0600
run/        sockets, pid records, status.json, settings.json; mode 0700; nothing of it outlives a run
logs/  models/  spool/  valkey/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gateway.failures import DataDirUnusable

FORMAT = "1"
MIN_FREE_BYTES = 64 * 2**20
MAX_SOCKET_PATH_BYTES = 100
"""Unix socket paths end at 104 bytes on macOS and 108 on Linux."""
_OURS = {"lock", "format", "run", "logs", "keys", "models", "spool", "valkey", "admin.key", "lost+found"}


@dataclass(frozen=True)
class DataDir:
    """An open and locked data directory."""

    path: Path
    lock_fd: int

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def socket(self, name: str) -> Path:
        """Where the Unix socket of that name is: in run/, or in a short private directory when that is too long."""
        path = self.run / f"{name}.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        return _short_directory(self.path) / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}.sock"

    def close(self) -> None:
        """Let go of the lock; the directory stays."""
        with contextlib.suppress(OSError):  # it was never made, or holds the socket of somebody who still runs
            _short_path(self.path).rmdir()
        os.close(self.lock_fd)


def open_data_dir(path: Path) -> DataDir:
    """Create what is missing, lock it, check its version and that it can be written. Raises DataDirUnusable."""
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = _lock(path)
        try:
            _check_format(path)
            _check_space(path)
            for name in ("run", "logs", "keys", "valkey"):
                (path / name).mkdir(mode=0o700, exist_ok=True)
            os.chmod(path / "run", 0o700)
            os.chmod(path / "keys", 0o700)
        except BaseException:
            os.close(lock_fd)
            raise
    except OSError as error:
        raise DataDirUnusable(_explain(path, error)) from None
    return DataDir(path, lock_fd)


def running_server(path: Path) -> str | None:
    """The pid of the server that holds this data directory now."""
    try:
        with (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (path / "lock").read_text(errors="replace").strip()
    except OSError:
        pass
    return None


def _lock(path: Path) -> int:
    lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock_fd)
        raise DataDirUnusable(
            f"the data directory {path} is in use by another server (pid {pid}); stop it, or choose another --data-dir"
        ) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    return lock_fd


def _check_format(path: Path) -> None:
    file = path / "format"
    try:
        found = file.read_text(errors="replace").strip()
    except FileNotFoundError:
        foreign = sorted({entry.name for entry in path.iterdir()} - _OURS)
        if foreign:
            raise DataDirUnusable(
                f"{path} is not a data directory of radixgate: it holds {foreign[0]!r} and no file `format`; "
                "choose an empty or new directory with --data-dir"
            ) from None
        part = path / "format.part"
        part.write_text(FORMAT + "\n")
        part.replace(file)
        return
    if found != FORMAT:
        raise DataDirUnusable(
            f"the data directory {path} has format {found[:40]!r}; this version of radixgate reads format {FORMAT}. "
            "Use the version that wrote it, or choose another --data-dir"
        )


def _check_space(path: Path) -> None:
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise DataDirUnusable(
            f"the disk of the data directory {path} is full: {free // 2**20} MiB are free, "
            f"{MIN_FREE_BYTES // 2**20} MiB are needed to start"
        )
    with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as probe:
        probe.write(b"\0" * 4096)
        probe.flush()
        os.fsync(probe.fileno())


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the data directory {path} is full"
    reason = {
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.EROFS: "its file system is read-only",
        errno.ENOTDIR: "a part of the path is a file",
        errno.EEXIST: "it is a file, or holds a file where a directory belongs",
    }.get(error.errno or 0, error.strerror or str(error))
    return f"the data directory {path} cannot be written: {reason}; choose another --data-dir"


def _short_path(data_dir: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    return Path("/tmp") / f"radixgate-{os.getuid()}-{digest}"


def _short_directory(data_dir: Path) -> Path:
    """A private directory with a short path, the same for every start on this data directory."""
    path = _short_path(data_dir)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    # /tmp is everybody's: somebody else may have been here first.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise DataDirUnusable(
            f"{path} is not a private directory of this user; remove it, or choose a shorter --data-dir"
        )
    return path
