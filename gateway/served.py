"""The models that this gateway serves: each an engine, its names, and the prompts made for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.client import Engine
from engine.protocol import Hello
from gateway.errors import ApiError, unavailable
from gateway.prompts import Prompts
from gateway.status import StatusReader
from gateway.templates import TemplateFailed
from gateway.tokenizer import TokenizerMissing

RETRY_AFTER_S = 5


class ServedModel:
    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        aliases: Sequence[str] = (),
        status: StatusReader | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        """`prompts` None reads the tokenizer from the model folder that the engine names."""
        self.name = name
        self.engine = engine
        self.aliases = tuple(aliases)
        self.created = int(time.time())
        self._status = status
        self._fixed_prompts = prompts
        self._prompts: tuple[str, Prompts] | None = None
        self._loading = asyncio.Lock()

    @property
    def hello(self) -> Hello:
        """Raises ApiError (503, with the stage) while the engine is away."""
        hello = self.engine.hello
        if hello is None:
            raise unavailable(f"The model {self.name} is not ready: {self.stage()}.", "model_not_ready", RETRY_AFTER_S)
        return hello

    def stage(self) -> str:
        """`ready`, or why the engine is not there, in words."""
        known = self._status.read().engines.get(self.name) if self._status else None
        if self.engine.hello is not None and (known is None or known.up):
            return "ready"
        if known is None:
            return "its engine is starting"
        progress = f" ({known.fraction:.0%})" if known.fraction is not None and not known.up else ""
        stage = "connecting to its engine" if known.up else known.stage + progress
        return f"{stage}: {known.message}" if known.message else stage

    async def prompts(self) -> Prompts:
        """What turns messages into this model's token ids. Raises ApiError."""
        if self._fixed_prompts is not None:
            return self._fixed_prompts
        model_dir = self.hello.model_dir
        if self._prompts is not None and self._prompts[0] == model_dir:
            return self._prompts[1]
        async with self._loading:
            if self._prompts is None or self._prompts[0] != model_dir:
                try:
                    self._prompts = (model_dir, await Prompts.load(Path(model_dir)))
                except (TokenizerMissing, TemplateFailed, OSError, ValueError) as error:
                    raise ApiError(
                        503, "tokenizer_unavailable", f"The model {self.name} cannot be used: {error}"
                    ) from error
        return self._prompts[1]


class Models:
    """By name and by alias."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in (model.name, *model.aliases)}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def get(self, name: str) -> ServedModel:
        """Raises ApiError (404)."""
        model = self._by_name.get(name)
        if model is None:
            served = ", ".join(model.name for model in self._models)
            shown = name if len(name) <= 100 else name[:100] + "..."
            raise ApiError(
                404, "model_not_found", f"The model '{shown}' does not exist; this server has: {served}.", param="model"
            )
        return model
