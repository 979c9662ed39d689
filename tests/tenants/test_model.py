"""Names that can be told apart, secrets that do not leak, usage that adds up."""

import pytest

from tenants.model import MAX_NAME_CHARS, InvalidName, Secret, TokenUsage, clean_name, name_key


@pytest.mark.parametrize("name", ["Acme", "株式会社", "Ærø & Søn", "مؤسسة", "می‌خواهم", "a" * MAX_NAME_CHARS, "🦊 Labs"])
def test_names_of_every_script_are_kept(name: str) -> None:
    assert clean_name(f"  {name} ") == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("a" * 10_000, "10000 characters"),
        ("a\nb", "U+000A at position 1"),
        ("a\x00", "U+0000"),
        ("a\x1b[31m", "U+001B"),
        ("gnp.\u202eexe", "U+202E"),
        ("a\u200bb", "U+200B"),
        ("a\u2028b", "U+2028"),
        ("\ud800", "U+D800"),
        ("\u200d\u200d", "no visible"),
    ],
)
def test_names_that_mislead_are_refused(name: str, why: str) -> None:
    with pytest.raises(InvalidName, match=why.replace("+", r"\+")):
        clean_name(name)


@pytest.mark.parametrize(
    ("one", "other"), [("Acme", "ACME"), ("Straße", "STRASSE"), ("ｆｕｌｌ", "full"), ("a  b", "a b"), ("e\u0301", "é")]
)
def test_names_that_read_the_same_share_a_key(one: str, other: str) -> None:
    assert name_key(one) == name_key(other)


def test_a_secret_shows_only_when_revealed() -> None:
    secret = Secret("rg-hidden")
    assert "hidden" not in f"{secret!r} {[secret]} {secret!s}"
    with pytest.raises(TypeError, match="reveal"):
        f"{secret}"
    assert secret.reveal() == "rg-hidden"


def test_the_prompt_is_the_sum_of_its_classes() -> None:
    usage = TokenUsage(1, 2, 4, ((300, 8), (3600, 16)), 32, 64)
    assert (usage.cached, usage.leased, usage.prompt) == (3, 24, 63)
    assert dict(usage.classes())["written_leased:3600"] == 16


@pytest.mark.parametrize("bad", [{"uncached": -1}, {"output": 1.0}, {"cached_private": True}, {"output": 10**13}])
def test_impossible_counts_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        TokenUsage(**bad)
