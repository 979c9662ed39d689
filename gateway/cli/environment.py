"""What may be wrong with the Python environment that radixgate runs in."""

from __future__ import annotations

import importlib.metadata


def conflicting_package() -> str | None:
    """Words about Hugging Face's package `kernels` where it is installed: it takes the name of one of our folders."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"the package `kernels` {version} is installed in this environment and takes the name of a part of radixgate; "
        "remove it: pip uninstall kernels"
    )
