"""The words of a ready server: whatever the paths and names, what it prints can be pasted."""

import shlex
from pathlib import Path

import pytest

from gateway.console import PlainAnnouncer, Welcome, welcome_text
from gateway.first_run import Credentials


def words(data_dir: Path, url: str = "http://127.0.0.1:8080", tenants: tuple[str, ...] = ("acme",)) -> str:
    keys = {name: data_dir / "keys" / f"{name}.key" for name in tenants}
    credentials = Credentials(data_dir / "admin.key", keys, "TOKEN", ())
    return welcome_text(Welcome(url, ["it's a model"], data_dir, "/opt/my tools/radixgate", credentials, 1.26))


def curl_of(text: str) -> list[str]:
    start = text.index("  curl")
    return shlex.split(text[start : text.index("\n\n", start)].replace("\\\n", ""))


def test_the_curl_line_survives_blanks_and_quotes() -> None:
    text = words(Path("/data of mine"))
    line = curl_of(text)
    assert line[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/chat/completions"]
    assert "$(cat '/data of mine/keys/acme.key')" in line[4]
    assert '"model": "it\'s a model"' in line[-1]
    assert "RADIXGATE_DATA_DIR='/data of mine' '/opt/my tools/radixgate' usage report" in text


def test_variables_are_named_only_where_the_defaults_do_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "  '/opt/my tools/radixgate' usage report" in words(Path.cwd() / ".radixgate")
    assert "RADIXGATE_URL=http://127.0.0.1:9 '/opt" in words(Path.cwd() / ".radixgate", "http://127.0.0.1:9")


def test_without_a_demo_tenant_it_says_how_to_make_one() -> None:
    text = words(Path("/d"), tenants=())
    assert "curl" not in text
    assert "radixgate' tenant create NAME" in text


def test_piped_progress_is_a_line_a_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    announcer = PlainAnnouncer()
    for percent in range(0, 101, 5):
        announcer.progress("m", "loading", percent / 100)
    announcer.progress("m", "ready", None)
    lines = capsys.readouterr().out.splitlines()
    shown = [f"radixgate: m: loading {percent}%" for percent in (0, 25, 50, 75, 100)]
    assert lines == [*shown, "radixgate: m: ready"]
