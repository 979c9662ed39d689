"""How much memory this process may use: the control group's word where there is one, else the machine's.

Both versions of control groups are read. A limit may stand at any level above the process, so every level counts and
the lowest wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

DEFAULT_KV_SHARE = 4
"""The pool takes at most one part in four of what the process may use ..."""
DEFAULT_KV_BYTES = 2 * 1024**3
"""... and at most this much, unless it is told otherwise."""


def default_kv_bytes(root: Path = Path("/")) -> int:
    """The size of the CPU's KV pool when none is given: at most 2 GiB, and a quarter of what the process may use."""
    return min(DEFAULT_KV_BYTES, allowed_bytes(root) // DEFAULT_KV_SHARE)


def allowed_bytes(root: Path = Path("/")) -> int:
    """The most this process may ever use. `root` is where the system's files lie."""
    limits = [limit for limit, _ in _group_levels(root)]
    return min([physical_bytes(root), *limits])


def free_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: below every limit of its control groups, and of the machine's memory."""
    machine = _meminfo(root).get("MemAvailable", physical_bytes(root))
    return max(0, min([machine, *(limit - used for limit, used in _group_levels(root))]))


def physical_bytes(root: Path = Path("/")) -> int:
    """The machine's memory."""
    total = _meminfo(root).get("MemTotal")
    return total if total is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    sizes = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[name] = int(words[0]) * 1024
    return sizes


def _group_levels(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes for every level above this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, cache_name = root / "sys/fs/cgroup", "inactive_file"
            limit_name, used_name = "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, cache_name = root / "sys/fs/cgroup/memory", "total_inactive_file"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        while True:
            limit = _number(group / limit_name)
            if limit is not None:
                reclaimable = _statistic(group / "memory.stat", cache_name)
                yield limit, max(0, (_number(group / used_name) or 0) - reclaimable)
            if group == base or base not in group.parents:
                break
            group = group.parent


def _number(path: Path) -> int | None:
    """The number in a control file; None when it is absent or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
