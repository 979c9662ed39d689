"""What a spool holds: one letter for the kind, then JSON. Reading a record back gives exactly what was written."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tenants.model import LedgerEvent, Status, TenantsError, Timings, TokenUsage
from tenants.pricing import PriceVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecord:
    """A request that is about to start, with all that its CLOSE needs if this process dies."""

    request_id: str
    x_request_id: str
    tenant_id: str
    key_id: str
    model: str
    instance: str
    engine_boot_id: str
    price: PriceVersion
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """What the client had been handed by `time_s`."""

    request_id: str
    usage: TokenUsage
    time_s: float


Record = OpenRecord | ProgressRecord | LedgerEvent

_KINDS: dict[bytes, type[Record]] = {b"O": OpenRecord, b"P": ProgressRecord, b"C": LedgerEvent}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_DECODERS = {letter: msgspec.json.Decoder(kind) for letter, kind in _KINDS.items()}
_encoder = msgspec.json.Encoder()


class UnreadableRecord(TenantsError):
    """A record whose frame is sound but whose content this version does not know."""


def encode(record: Record) -> bytes:
    return _LETTERS[type(record)] + _encoder.encode(record)


def decode(payload: bytes) -> Record:
    """Raises UnreadableRecord."""
    try:
        return _DECODERS[payload[:1]].decode(payload[1:])
    except (KeyError, msgspec.MsgspecError) as error:
        raise UnreadableRecord(f"not a spool record ({error}): {payload[:60]!r}") from error


def is_close(payload: bytes) -> bool:
    """Whether the record is a finished request, without parsing it."""
    return payload[:1] == b"C"


def close_event(
    request: OpenRecord,
    usage: TokenUsage,
    status: Status,
    *,
    finish_reason: str,
    timings: Timings,
    finished_at: float,
    engine_boot_id: str,
    sequence: int,
    waived: bool = False,
) -> LedgerEvent:
    """The ledger event of a request, priced by the version it was opened with unless its cost is waived."""
    return LedgerEvent(
        request_id=request.request_id,
        x_request_id=request.x_request_id,
        tenant_id=request.tenant_id,
        key_id=request.key_id,
        model=request.model,
        instance=request.instance,
        engine_boot_id=engine_boot_id,
        price_version=request.price.id,
        cost_nano_usd=0 if waived else request.price.cost_nano_usd(usage),
        usage=usage,
        status=status,
        finish_reason=finish_reason,
        timings=timings,
        started_at=request.started_at,
        finished_at=finished_at,
        sequence=sequence,
    )
