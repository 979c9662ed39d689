"""The port, bound before anything else: whoever comes early is told how far the start is."""

from __future__ import annotations

import errno
import socket

from gateway.failures import AddressUnavailable

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises AddressUnavailable."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressUnavailable(f"the host {host!r} cannot be resolved ({error.strerror}); check --host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressUnavailable(_explain(host, port, error)) from None
    return listener


def url_of(host: str, port: int) -> str:
    """Where a program on this machine reaches it."""
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it, or choose another port with --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs more rights than this user has; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; check --host"
    return f"cannot listen on {host} port {port}: {error.strerror}"
