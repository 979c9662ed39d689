"""The command line: it starts at once, refuses in words, and loads what it needs only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.main import SUBCOMMANDS, main

HEAVY = ("torch", "transformers", "numpy", "starlette", "redis", "rich", "uvicorn")


def imported(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('|' + ' '.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return set(output.rpartition("|")[2].split())


def run(*arguments: str, folder: Path | None = None, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments, env={"RADIXGATE_MODEL": None, **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_lists_every_command_and_imports_none() -> None:
    code, output = run("--help")
    assert code == 0
    assert all(f"\n  {name} " in output for name in SUBCOMMANDS)
    modules = imported("from gateway.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert not modules & set(HEAVY)
    assert not {entry.module for entry in SUBCOMMANDS.values()} & modules


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_exists_and_loads_nothing_heavy(name: str) -> None:
    modules = imported(f"from gateway.cli.main import main\ntry: main(['{name}', '--help'])\nexcept SystemExit: pass")
    assert not modules & set(HEAVY)


def test_an_unknown_command_is_refused_with_the_nearest() -> None:
    code, output = run("srve")
    assert (code, "there is no command 'srve'; did you mean serve?" in output) == (2, True)


def test_serve_refuses_a_wrong_setting_with_exit_code_2() -> None:
    code, output = run("serve", "--port", "x")
    assert code == 2
    assert "flag --port: 'x' cannot be used: expected a whole number from 0 to 65535" in output


def test_config_show_prints_values_and_origins() -> None:
    Path("radixgate.toml").write_text("workers = 2\n")
    code, output = run("config", "show", "--kv-memory", "1GiB", RADIXGATE_PORT="9000")
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in output.splitlines()}
    assert code == 0
    assert rows["port"] == ["9000", "environment RADIXGATE_PORT"]
    assert rows["workers"] == ["2", "radixgate.toml: workers"]
    assert rows["model.smollm2-135m.kv_memory"] == ["1.0 GiB", "flag --kv-memory"]
    assert rows["host"] == ["127.0.0.1", "default"]


def test_config_show_for_programs() -> None:
    code, output = run("config", "show", "--json")
    assert code == 0
    assert {"setting": "port", "value": "8080", "origin": "default"} in json.loads(output)


def test_doctor_finds_nothing_wrong_here() -> None:
    code, output = run("doctor", "--json", "--port", "0")
    findings = {finding["subject"]: finding["verdict"] for finding in json.loads(output)}
    assert (code, set(findings.values())) == (0, {"ok"})
    assert {"Python", "torch", "data directory", "address", "memory", "Redis", "model"} <= set(findings)


def test_doctor_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("--port", "0", "--data-dir", "file", "--model", "./absent", "--redis-url", "redis://127.0.0.1:1")
    code, output = run("doctor", "--json", *arguments)
    faults = {item["subject"]: item["detail"] for item in json.loads(output) if item["verdict"] == "fault"}
    assert code == 1
    assert set(faults) == {"data directory", "Redis", "model"}
    assert "choose another --data-dir" in faults["data directory"]
    assert "./absent does not exist" in faults["model"]
