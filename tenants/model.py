"""Who uses the gateway and what an event of use looks like: frozen records, their rules and their errors."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from enum import StrEnum

MAX_NAME_CHARS = 100
MAX_TOKENS_PER_CLASS = 10**12
_JOINERS = "\u200c\u200d"
"""Format characters that ordinary words of some scripts need; every other one is refused."""


# --- errors -----------------------------------------------------------------------------------------------------------


class TenantsError(Exception):
    """Base of what this room raises; the message is fit for a user and holds no secret."""


class InvalidName(TenantsError):
    """A name that cannot be told apart on a screen or in a log."""


class InvalidPrice(TenantsError):
    """A price that is not a whole number of nano-USD per million tokens in the allowed range."""


class InvalidRange(TenantsError):
    """A time range, grouping or bucket that a report cannot use."""


class TenantExists(TenantsError):
    """Another tenant has this name, or one that reads the same."""


class UnknownTenant(TenantsError):
    """No tenant has this id or name."""


class UnknownKey(TenantsError):
    """No key has this id."""


class UnknownPlan(TenantsError):
    """No plan has this id."""


class PlanExists(TenantsError):
    """A plan of this id exists."""


class UnknownPrice(TenantsError):
    """The plan has no price for this model at this time."""


class PriceOverlap(TenantsError):
    """A price version that would begin before the latest one of its plan and model, or in the past."""


class StoreUnavailable(TenantsError):
    """Redis did not answer."""


class SchemaMismatch(TenantsError):
    """Redis holds the data of another version of this schema."""


# --- tenants and keys -------------------------------------------------------------------------------------------------


class Scope(StrEnum):
    """What a key may do. INFERENCE and USAGE are of a tenant's keys, ADMIN of an administrator's."""

    INFERENCE = "inference"
    USAGE = "usage"
    ADMIN = "admin"


TENANT_SCOPES = (Scope.INFERENCE, Scope.USAGE)


@dataclass(frozen=True, slots=True)
class Tenant:
    id: str
    name: str
    plan_id: str
    created_at: float
    disabled_at: float | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A key as stored: never the secret. `tenant_id` is empty for an administrator's key."""

    id: str
    tenant_id: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None

    def usable(self, now_s: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now_s < self.expires_at)


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant's caller: who sent a request, and under which key."""

    tenant_id: str
    tenant_name: str
    plan_id: str
    key_id: str
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, slots=True)
class Admin:
    """An administrator's caller. It has no tenant, so nothing can be billed to it."""

    key_id: str
    name: str
    scopes: tuple[Scope, ...]


class Secret:
    """A key or token in clear, shown once. Its text leaves only through reveal(): not by str, repr or a traceback."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(...)"

    def __format__(self, spec: str) -> str:
        raise TypeError("a Secret is not text; call reveal() where it must be shown")

    __str__ = __repr__


def clean_name(name: str, what: str = "name") -> str:
    """`name` in normal form (NFC, no outer blanks). Any script is welcome. Raises InvalidName.

    Refused: empty, over MAX_NAME_CHARS, and characters that are invisible or reorder the text around them.
    """
    text = unicodedata.normalize("NFC", name).strip()
    if not text:
        raise InvalidName(f"the {what} is empty; give 1 to {MAX_NAME_CHARS} characters")
    if len(text) > MAX_NAME_CHARS:
        raise InvalidName(f"the {what} has {len(text)} characters; the limit is {MAX_NAME_CHARS}")
    for position, char in enumerate(text):
        category = unicodedata.category(char)
        if (category[0] == "C" and char not in _JOINERS) or category in ("Zl", "Zp"):
            raise InvalidName(f"the {what} holds U+{ord(char):04X} at position {position}; control characters, line "
                              "breaks and invisible formatting are not allowed")  # fmt: skip
    if not any(unicodedata.category(char)[0] in "LNPS" for char in text):
        raise InvalidName(f"the {what} has no visible character")
    return text


def name_key(name: str) -> str:
    """What two names that read the same share: compatibility form, case and blanks folded, joiners dropped."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return " ".join("".join(char for char in folded if char not in _JOINERS).split())


# --- usage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """One request's tokens by billing class. The prompt is the sum of every class but `output`."""

    cached_private: int = 0
    cached_public: int = 0
    written_unleased: int = 0
    written_leased: tuple[tuple[int, int], ...] = ()
    """(ttl_s, tokens) pairs."""
    uncached: int = 0
    output: int = 0

    def __post_init__(self) -> None:
        for name, tokens in self.classes():
            if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS_PER_CLASS:
                raise ValueError(
                    f"{name} is {tokens!r} tokens; expected a whole number from 0 to {MAX_TOKENS_PER_CLASS}"
                )

    def classes(self) -> list[tuple[str, int]]:
        """(class name, tokens) of every class; a leased write's class is `written_leased:<ttl_s>`."""
        return [
            ("cached_private", self.cached_private),
            ("cached_public", self.cached_public),
            ("written_unleased", self.written_unleased),
            *((f"written_leased:{ttl_s}", tokens) for ttl_s, tokens in self.written_leased),
            ("uncached", self.uncached),
            ("output", self.output),
        ]

    @property
    def cached(self) -> int:
        return self.cached_private + self.cached_public

    @property
    def leased(self) -> int:
        return sum(tokens for _, tokens in self.written_leased)

    @property
    def prompt(self) -> int:
        return self.cached + self.written_unleased + self.leased + self.uncached


# --- events -----------------------------------------------------------------------------------------------------------


class Status(StrEnum):
    """How a request ended. ABORTED: its gateway process died, and the ledger closed it afterwards."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_error(self) -> bool:
        return self in (Status.FAILED, Status.ABORTED)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent by one request, as the engine and the gateway measured them."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CloseEvent:
    """A request's end as the gateway reports it; the rest of the ledger event is known since OPEN."""

    usage: TokenUsage
    status: Status
    finish_reason: str = ""
    timings: Timings = field(default_factory=Timings)
    finished_at: float | None = None
    """Seconds since 1970; None takes the ledger's clock."""
    engine_boot_id: str | None = None
    """None keeps the one given at OPEN."""
    waived: bool = False
    """The tokens are booked, as the engine counted them, and cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """One finished request: immutable, priced once. `sequence` counts a tenant's events within one spool from 1."""

    request_id: str
    x_request_id: str
    tenant_id: str
    key_id: str
    model: str
    instance: str
    engine_boot_id: str
    price_version: str
    cost_nano_usd: int
    usage: TokenUsage
    status: Status
    finish_reason: str
    timings: Timings
    started_at: float
    finished_at: float
    sequence: int
