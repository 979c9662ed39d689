"""A child ends when its parent is gone, however the parent went."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def hold_lifeline(fd: int, on_parent_gone: Callable[[], None]) -> None:
    """Watch a pipe that the parent holds open; call back, from a thread of its own, when it ends.

    The kernel also kills this process when the thread that started it ends (Linux), which reaches a process that is
    stopped or stuck.
    """
    os.set_inheritable(fd, False)
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        log.warning("no death signal from the parent: %s", os.strerror(ctypes.get_errno()))

    def watch() -> None:
        os.set_blocking(fd, True)
        try:
            while os.read(fd, 64):
                pass
        except OSError as error:
            log.error("the lifeline (descriptor %d) cannot be read: %s", fd, error)
        on_parent_gone()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
