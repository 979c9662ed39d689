"""Every command in README.md and docs/ runs: `make` lines are dry runs, all others go against a live server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.server import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell_blocks() -> list[tuple[str, str]]:
    """(where, script) of every fenced block marked sh."""
    found = []
    for page in PAGES:
        for match in re.finditer(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            line = page.read_text().count("\n", 0, match.start()) + 2
            found.append((f"{page.relative_to(ROOT)}:{line}", match.group(1)))
    return found


@pytest.mark.parametrize(("where", "script"), shell_blocks(), ids=[where for where, _ in shell_blocks()])
def test_command(where: str, script: str, server: Server, tmp_path: Path) -> None:
    script = re.sub(r"^make ", "make -n ", script, flags=re.MULTILINE)
    if "make -n" in script:
        cwd = ROOT
    else:
        cwd = tmp_path
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / ".venv" / "bin" / "radixgate").symlink_to(Path(sys.executable).with_name("radixgate"))
        (tmp_path / ".radixgate").symlink_to(server.data_dir)
        script = script.replace("http://127.0.0.1:8080", server.url)
    environment = {**os.environ, "RADIXGATE_URL": server.url}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, f"{where}\n{result.stdout}\n{result.stderr}"
    assert '"error"' not in result.stdout, f"{where}\n{result.stdout}"
