"""What the routes need, made once per worker and found through the application."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from redis.asyncio import Redis
from starlette.requests import HTTPConnection

from engine.client import EngineClient
from gateway.accounting import Accounting
from gateway.core import Core
from gateway.metrics import Metrics
from gateway.quarantine import Quarantine
from gateway.served import Models, ServedModel
from gateway.settings import Settings
from gateway.status import StatusReader
from tenants import store
from tenants.ledger import Ledger
from tenants.model import StoreUnavailable
from tenants.pricing import PriceBook
from tenants.registry import Registry

log = logging.getLogger("radixgate.gateway")


class Services:
    """Between start() and stop() requests can be served."""

    def __init__(self, data_dir: Path, redis: Redis, models: Models, status: StatusReader | None = None) -> None:
        """`status` None: there is no supervisor, and a worker with its engines is ready."""
        self.data_dir = data_dir
        self.redis = redis
        self.models = models
        self.status = status
        self.registry = Registry(redis)
        self.prices = PriceBook(redis)
        self.metrics = Metrics()
        self._ledger: Ledger | None = None
        self._core: Core | None = None

    @property
    def core(self) -> Core:
        if self._core is None:
            raise RuntimeError("the application has not been started: its lifespan must run")
        return self._core

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            raise RuntimeError("the application has not been started: its lifespan must run")
        return self._ledger

    @property
    def fault(self) -> str | None:
        """Why no request can be taken although every process is up."""
        if self._ledger is not None and not self._ledger.has_room:
            return "the disk under the ledger is full"
        return None

    async def start(self) -> None:
        """Raises SchemaMismatch, and OSError when the data directory cannot be written. Redis may still be away."""
        try:
            await store.open_schema(self.redis)
        except StoreUnavailable as error:
            log.warning("starting without Redis: %s", error)
        self._ledger = await Ledger.start(self.data_dir, self.redis)
        self._core = Core(Accounting(self.prices, self._ledger), Quarantine(self.redis), self.metrics)
        for model in self.models:
            if isinstance(model.engine, EngineClient):
                model.engine.start()

    async def stop(self) -> None:
        """End what still runs, book it, and ship what is booked. Call it when no more requests come in."""
        self.core.stop()
        for model in self.models:
            await model.engine.close()
        await self.core.settled()
        await self.ledger.stop()
        await self.redis.aclose()


def services_from(settings: Settings, status: StatusReader) -> Services:
    """A worker's services: the supervisor has resolved the Redis to use and says where the engines' sockets are."""
    if settings.redis_url is None:
        raise ValueError("the settings of a worker must name a Redis")
    known = status.read().engines
    models = []
    for model in settings.models:
        socket = (
            known[model.name].socket if model.name in known else settings.run_dir / f"engine-{model.file_name}.sock"
        )
        models.append(ServedModel(model.name, EngineClient(socket), aliases=model.aliases, status=status))
    return Services(settings.data_dir, store.connect(settings.redis_url), Models(models), status)


def services_of(connection: HTTPConnection) -> Services:
    return cast(Services, connection.app.state.services)
