"""Keeps the catalog of a router in step with the models of its fleet."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

from shoal.config import ServerConfig
from shoal.errors import CheckpointError, ConfigError, ShoalError
from shoal.fleet.clock import Clock
from shoal.fleet.config import FleetConfig
from shoal.fleet.external.forwarder import ExternalForwarder
from shoal.fleet.external.prompt_tokens import PromptTokens
from shoal.fleet.native.fleet_engine import FleetEngine
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.pool.model_pool import ModelPool
from shoal.model_card import ModelCard
from shoal.server.served.catalog import Catalog
from shoal.server.served.external_model import UNBOUNDED, ExternalModel
from shoal.server.served.model import ServedModel, served_model
from shoal.tasks import start, stop
from shoal.text.tokenizer import Tokenizer, load_tokenizer
from shoal.weights.source import resolve
from shoal.weights.store import is_url

logger = logging.getLogger(__name__)

RETRY_S = 10.0  # before another attempt to read the files of a model


class ModelCatalogSync:
    """Adds a model to the catalog when its first worker joins and removes it when the last one leaves. The
    workers become ready after the model is in the catalog, so that a client that sees a ready worker can send
    requests."""

    def __init__(self, fleet: Fleet, catalog: Catalog, config: FleetConfig, server: ServerConfig) -> None:
        """Raises ConfigError for a tokenizer that cannot be read."""
        self._fleet, self._catalog, self._config = fleet, catalog, config
        # The dispatchers' queues bound the waiting requests, whatever the number of workers.
        self._server = dataclasses.replace(server, max_queued_requests=UNBOUNDED)
        self._tokenizer = None if config.tokenizer is None else read_tokenizer(config.tokenizer)
        self._clock: Clock = fleet.clock
        self._served: dict[ModelPool, ServedModel | ExternalModel] = {}
        self._loading: dict[ModelPool, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                self._fleet.changed.clear()
                self._update()
                await self._fleet.changed.wait()
        finally:
            await stop(self._loading.values())

    def _update(self) -> None:
        current = dict.fromkeys(self._fleet.models.values())
        for model in [model for model in self._loading if model not in current]:
            self._loading.pop(model).cancel()
        for model in [model for model in self._served if model not in current]:
            self._remove(model)
        for model in current:
            if model in self._served or model in self._loading:
                continue
            if model.is_external:
                self._add(model, self._external(model))
            else:
                model.block("its tokenizer is being read")
                self._loading[model] = start(self._load(model))
        for model, served in self._served.items():
            served.names[:] = model.names
            if isinstance(served, ExternalModel):
                served.max_model_len = _shortest(model)
        loading = [worker_id for model in self._loading for worker_id in model.workers]
        self._catalog.awaited = self._fleet.unknown + loading

    async def _load(self, model: ModelPool) -> None:
        """Adds a model of native workers as soon as its files can be read here."""
        while True:
            try:
                served = await self._native(model)
            except Exception as error:
                # Files and hubs fail with many exceptions, and every failure may be temporary.
                if isinstance(error, ShoalError):
                    logger.error("the model %s cannot be served: %s", model.name, error)
                else:
                    logger.exception("the model %s cannot be served", model.name)
                model.block(f"the model cannot be served: {error}")
                await self._clock.sleep(RETRY_S)
                continue
            del self._loading[model]
            self._add(model, served)
            model.block("")
            self._fleet.changed.set()
            return

    def _add(self, model: ModelPool, served: ServedModel | ExternalModel) -> None:
        self._served[model] = served
        self._catalog.add(served)
        logger.info("the model %s is served", model.name)

    def _remove(self, model: ModelPool) -> None:
        served = self._served.pop(model)
        self._catalog.remove(served)
        if isinstance(served, ServedModel):
            served.close()
        logger.info("the model %s is not served any more: its last worker has left", model.name)

    def _external(self, model: ModelPool) -> ExternalModel:
        tokens = model.tokens = PromptTokens(model.dispatcher, self._tokenizer)
        model.sender = ExternalForwarder(
            model.dispatcher, tokens, migration_limit=self._config.migration_limit
        )
        return ExternalModel(model.names, model.sender, request_timeout=self._server.request_timeout)

    async def _native(self, model: ModelPool) -> ServedModel:
        """Raises ShoalError where the model's files cannot be read here."""
        workers = list(model.workers.values())
        if not workers:
            raise ConfigError("its last worker has left")
        card: ModelCard = workers[0].link.card
        tokenizer = await asyncio.to_thread(_tokenizer_of, card)
        limit = self._config.migration_limit
        model.sender = FleetEngine(
            model.dispatcher, model.prefills, model.kv_transfers, migration_limit=limit
        )
        return served_model(card, model.sender, tokenizer, self._server)


def _tokenizer_of(card: ModelCard) -> Tokenizer | None:
    if card.skip_tokenizer_init:
        return None
    # A store may have a newer version than the workers loaded; the tokenizer is the same.
    revision = None if is_url(card.model) else card.revision
    files = resolve(card.model, revision, card.download_dir, with_weights=False)
    return load_tokenizer(files, card.tokenizer, card.chat_template)


def _shortest(model: ModelPool) -> int | None:
    """Returns the smallest context length among the workers of an external model."""
    lengths = [worker.link.max_model_len(model.name) for worker in model.dispatcher.workers.values()]
    return min((length for length in lengths if length is not None), default=None)


def read_tokenizer(path: str) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return Tokenizer.from_folder(Path(path).parent if Path(path).is_file() else Path(path))
    except CheckpointError as error:
        raise ConfigError(f"tokenizer {path!r} cannot be read: {error}") from None
