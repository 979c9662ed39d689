"""Real traces and texts that are not part of the project; tests that need them are skipped where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("RADIXGATE_SHARED", Path(__file__).parents[2] / "shared")) / "data"


def shared_file(name: str) -> Path:
    """The path of a file below the data folder; skips the test when it is not there."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not in {FOLDER}; RADIXGATE_SHARED names the folder that holds data/")
    return path
