"""What a router offers its clients: the models of its fleet, as they come and go."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

from shoal.config import ServerConfig
from shoal.errors import CheckpointError, ConfigError, ShoalError
from shoal.fleet.clock import Clock
from shoal.fleet.fleet import Fleet
from shoal.fleet.fleet_config import FleetConfig
from shoal.fleet.fleet_engine import FleetEngine
from shoal.fleet.foreign_forwarder import ForeignForwarder
from shoal.fleet.model_fleet import ModelFleet
from shoal.fleet.prompt_tokens import PromptTokens
from shoal.fleet.tasks import start, stop
from shoal.model_card import ModelCard
from shoal.server.catalog import Catalog
from shoal.server.foreign_model import UNBOUNDED, ForeignModel
from shoal.server.model import ServedModel, served_model
from shoal.tokenizer import Tokenizer, load_tokenizer
from shoal.weights.source import resolve
from shoal.weights.store import is_url

logger = logging.getLogger(__name__)

RETRY_S = 10.0  # until a model whose files cannot be read is tried again


class Offer:
    """Keeps the catalog as the fleet is. A model's workers are ready once the model is offered, so that who
    sees them ready may ask."""

    def __init__(self, fleet: Fleet, catalog: Catalog, config: FleetConfig, server: ServerConfig) -> None:
        """Raises ConfigError for a tokenizer that cannot be read."""
        self._fleet, self._catalog, self._config = fleet, catalog, config
        # The dispatchers' queues bound what waits, whatever the number of workers.
        self._server = dataclasses.replace(server, max_queued_requests=UNBOUNDED)
        self._tokenizer = None if config.tokenizer is None else read_tokenizer(config.tokenizer)
        self._clock: Clock = fleet.clock
        self._offered: dict[ModelFleet, ServedModel | ForeignModel] = {}
        self._coming: dict[ModelFleet, asyncio.Task[None]] = {}

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                self._fleet.changed.clear()
                self._update()
                await self._fleet.changed.wait()
        finally:
            await stop(self._coming.values())

    def _update(self) -> None:
        current = dict.fromkeys(self._fleet.models.values())
        for model in [model for model in self._coming if model not in current]:
            self._coming.pop(model).cancel()
        for model in [model for model in self._offered if model not in current]:
            self._withdraw(model)
        for model in current:
            if model in self._offered or model in self._coming:
                continue
            if model.is_foreign:
                self._add(model, self._foreign(model))
            else:
                model.hinder("its tokenizer is being read")
                self._coming[model] = start(self._bring(model))
        for model, offered in self._offered.items():
            offered.names[:] = model.names
            if isinstance(offered, ForeignModel):
                offered.max_model_len = _shortest(model)
        coming = [worker_id for model in self._coming for worker_id in model.workers]
        self._catalog.awaited = self._fleet.unknown + coming

    async def _bring(self, model: ModelFleet) -> None:
        """Offers a model of our own workers as soon as its files can be read here."""
        while True:
            try:
                offered = await self._own(model)
            except Exception as error:
                # Files and hubs fail in ways of their own, which may pass like any other.
                if isinstance(error, ShoalError):
                    logger.error("the model %s cannot be offered: %s", model.name, error)
                else:
                    logger.exception("the model %s cannot be offered", model.name)
                model.hinder(f"the model cannot be offered: {error}")
                await self._clock.sleep(RETRY_S)
                continue
            del self._coming[model]
            self._add(model, offered)
            model.hinder("")
            self._fleet.changed.set()
            return

    def _add(self, model: ModelFleet, offered: ServedModel | ForeignModel) -> None:
        self._offered[model] = offered
        self._catalog.add(offered)
        logger.info("the model %s is offered", model.name)

    def _withdraw(self, model: ModelFleet) -> None:
        offered = self._offered.pop(model)
        self._catalog.remove(offered)
        if isinstance(offered, ServedModel):
            offered.close()
        logger.info("the model %s is offered no longer: its last worker has gone", model.name)

    def _foreign(self, model: ModelFleet) -> ForeignModel:
        tokens = model.tokens = PromptTokens(model.dispatcher, self._tokenizer)
        model.streams = ForeignForwarder(
            model.dispatcher, tokens, migration_limit=self._config.migration_limit
        )
        return ForeignModel(model.names, model.streams, request_timeout=self._server.request_timeout)

    async def _own(self, model: ModelFleet) -> ServedModel:
        """Raises ShoalError where the model's files cannot be read here."""
        workers = list(model.workers.values())
        if not workers:
            raise ConfigError("its last worker has gone")
        card: ModelCard = workers[0].link.card
        tokenizer = await asyncio.to_thread(_tokenizer_of, card)
        limit = self._config.migration_limit
        model.streams = FleetEngine(model.dispatcher, model.prefills, model.moves, migration_limit=limit)
        return served_model(card, model.streams, tokenizer, self._server)


def _tokenizer_of(card: ModelCard) -> Tokenizer | None:
    if card.skip_tokenizer_init:
        return None
    # A store may have another version than the workers have by now, with the same tokenizer.
    revision = None if is_url(card.model) else card.revision
    files = resolve(card.model, revision, card.download_dir, with_weights=False)
    return load_tokenizer(files, card.tokenizer, card.chat_template)


def _shortest(model: ModelFleet) -> int | None:
    """The context that all workers of a foreign model have."""
    lengths = [worker.link.max_model_len(model.name) for worker in model.dispatcher.workers.values()]
    return min((length for length in lengths if length is not None), default=None)


def read_tokenizer(path: str) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return Tokenizer.from_folder(Path(path).parent if Path(path).is_file() else Path(path))
    except CheckpointError as error:
        raise ConfigError(f"tokenizer {path!r} cannot be read: {error}") from None
