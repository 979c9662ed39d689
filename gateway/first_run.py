"""What a new data directory gets: an administrator's key, the demo price plan, two demo tenants and their keys.

Every step may be cut short by a crash and is made good at the next start, so no secret is ever lost in between.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis

from tenants.model import Secret
from tenants.pricing import PriceBook
from tenants.registry import Registry
from tenants.store import open_schema

DEMO_TENANTS = ("acme", "globex")
ADMIN_KEY_NAME = "first administrator"


class Credentials(NamedTuple):
    """Where the secrets lie, and the one-time token for the dashboard."""

    admin_key: Path
    tenant_keys: dict[str, Path]
    """Tenant's name -> file, demo tenants only and only those whose file exists."""
    dashboard_token: str
    created: tuple[Path, ...]
    """Files that this start wrote."""


async def prepare(redis: Redis, data_dir: Path) -> Credentials:
    """Create what is missing. Raises SchemaMismatch, StoreUnavailable, OSError."""
    await open_schema(redis)
    registry = Registry(redis)
    await PriceBook(redis).ensure_demo_plan()
    created = []

    admin_key = data_dir / "admin.key"
    if not await _works(registry, admin_key):
        write_secret(admin_key, (await registry.create_admin_key(ADMIN_KEY_NAME))[1])
        created.append(admin_key)

    files = {name: data_dir / "keys" / f"{name}.key" for name in DEMO_TENANTS}
    known = {tenant.name: tenant for tenant in await registry.list_tenants()}
    if known.keys() <= set(DEMO_TENANTS):  # nobody has made tenants of their own yet
        for name, file in files.items():
            if name not in known:
                write_secret(file, (await registry.create_tenant(name))[2])
            elif not file.exists() and known[name].disabled_at is None:
                write_secret(file, (await registry.create_key(known[name].id))[1])
            else:
                continue
            created.append(file)
    token = await registry.create_dashboard_token()
    present = {name: file for name, file in files.items() if file.exists()}
    return Credentials(admin_key, present, token.reveal(), tuple(created))


async def _works(registry: Registry, file: Path) -> bool:
    """Whether the file holds an administrator's key of this Redis: it may be another, or have lost its data."""
    try:
        secret = file.read_text().strip()
    except FileNotFoundError:
        return False
    return await registry.authenticate_admin(secret) is not None


def write_secret(path: Path, secret: Secret) -> None:
    """The secret as a file that only its owner reads, whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret.reveal() + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
