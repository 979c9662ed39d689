"""`radixgate trace replay` prints a table or JSON, draws a curve, and names what is wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [{"hash_ids": [1, 2], "input_length": 1000}, {"hash_ids": [1, 3], "input_length": 1000}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", "replay", *map(str, arguments)])


def test_table(trace: Path) -> None:
    result = run(trace, "--blocks", "10,infinite")
    assert result.exit_code == 0, result.output
    assert result.output.split("\n")[0] == "trace.jsonl: 2 requests, 4 prompt blocks, lru"
    assert [line.split() for line in result.output.split("\n")[2:4]] == [
        ["10", "0.2500", "0.2560"],
        ["infinite", "0.2500", "0.2560"],
    ]


def test_json(trace: Path) -> None:
    (one,) = json.loads(run(trace, "--blocks", "10", "--json").output)["results"]
    assert (one["blocks"], one["hit_blocks"], one["hit_tokens"], one["block_hit_rate"]) == (10, 1, 512, 0.25)


def test_plot_is_a_png(trace: Path, tmp_path: Path) -> None:
    assert run(trace, "--blocks", "2,10,infinite", "--plot", tmp_path / "curve.png").exit_code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--blocks", "0"), 2, "neither a number of blocks"),
        (("--blocks", "ten"), 2, "neither a number of blocks"),
        (("--policy", "magic"), 2, "none of"),
        (("--block-tokens", "0"), 2, "block-tokens"),
        (("--block-tokens", "16"), 5, "trace.jsonl:1: input_length 1000 does not fit"),
    ],
)
def test_bad_arguments(trace: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = run(trace, *arguments)
    assert result.exit_code == code and words in result.output.replace("'", "")
