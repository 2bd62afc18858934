"""`shoal serve`: engines in processes of their own, the server in this one. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from shoal.apps.join import (
    ModelToServe,
    check_fleet,
    event_endpoints,
    joined,
    weights_of_peers,
    with_events,
    worker_id_of,
)
from shoal.config import (
    DEFAULT_MODEL,
    SERVER_SPECULATION,
    SERVER_TARGET_ITL_MS,
    EngineConfig,
    ServerConfig,
    check_lends,
)
from shoal.control import ServedEngine
from shoal.engine.process.async_llm import AsyncLLM
from shoal.engine.process.swap import Swapper
from shoal.errors import ConfigError, ShoalError
from shoal.model_card import ModelCard
from shoal.server.apis.tools import choose_reasoning_parser, choose_tool_call_parser
from shoal.server.app import create_admin_app, create_app
from shoal.server.http.keys import check_admin_port
from shoal.server.run import check_tls, open_ports, url_of, warn_of_open_port
from shoal.server.run import serve as serve_http
from shoal.server.served.catalog import Catalog
from shoal.server.served.model import ServedModel, loaded_model, served_model
from shoal.telemetry.tracing import check_tracing, opened_tracing
from shoal.text.tokenizer import Tokenizer, end_token_ids, load_tokenizer
from shoal.weights.source import CheckpointFiles, resolve
from shoal.weights.summary import summarize
from shoal.wire import ModelInfo

logger = logging.getLogger(__name__)

# Default kv_role of a worker by its role. Requests that leave a decode worker take their blocks along, so it
# lends, too.
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_both"}


def serve(model: str | None, models: Sequence[str], options: dict[str, Any], config: ServerConfig) -> int:
    """Serves until a signal; returns the exit code. Raises ShoalError for a server that cannot start.

    model: folder, file or id; or `models`: the same as "name=model", several with config.swap. options:
    fields of EngineConfig.
    """
    started = time.monotonic()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    planned = plan(model, models, options, config)
    return asyncio.run(_serve(planned, config, started))


def plan(
    model: str | None, models: Sequence[str], options: dict[str, Any], config: ServerConfig
) -> list[ModelToServe]:
    """Returns the models to serve. Checks all options before an engine is started, which may take minutes.
    Raises ShoalError."""
    check_admin_port(config)
    check_tls(config)
    check_tracing(config.otlp_traces_endpoint)
    if config.plane is not None:
        check_fleet(config)
    pairs = [_named(entry) for entry in models]
    if model is not None and pairs:
        raise ConfigError(
            f"the model is given twice, as {model!r} and by --model {models[0]!r}; give all by --model "
            "NAME=MODEL"
        )
    pairs = pairs or [(None, model or DEFAULT_MODEL)]
    names = [name or path for name, path in pairs]
    if len(pairs) > 1:
        if not config.swap:
            raise ConfigError(
                f"{len(pairs)} models are given; serve several with --swap (one awake, the others asleep), "
                "or a server each"
            )
        if config.served_model_name is not None:
            raise ConfigError(
                "served_model_name names one model; with several, --model name=model names each"
            )
        if len(set(names)) < len(names):
            raise ConfigError(
                f"two models are called {max(names, key=names.count)!r}; give each a name of its own: "
                "--model name=model"
            )
    if config.swap and config.plane is not None:
        raise ConfigError(
            "--plane does not go with --swap: a worker of a fleet serves one model; start one each"
        )
    if config.swap:
        if config.restart:
            raise ConfigError(
                "--restart does not go with --swap: a model that starts anew needs the memory that the "
                "awake one has"
            )
        options = {**options, "enable_sleep_mode": True}
    defaults = {"target_itl_ms": SERVER_TARGET_ITL_MS, "speculative_config": SERVER_SPECULATION}
    options = defaults | options
    if config.role in KV_ROLES:
        kv_role = KV_ROLES[config.role]
        if config.role == "decode" and options.get(
            "enable_sleep_mode"
        ):  # swap releases the memory of its cache
            kv_role = "kv_consumer"
        transfer = {"kv_role": kv_role, "kv_ip": config.fleet_host}
        options = {"kv_transfer_config": transfer, **options}
    found = []
    for name, (_, path) in zip(names, pairs):
        engine = EngineConfig.from_options(model=path, **options)
        check_lends(config.role, engine)
        files = resolve(engine.model, engine.revision, engine.download_dir, overrides=engine.hf_overrides)
        files = files.overridden(engine.hf_overrides).check()
        if files.revision is not None:
            engine = dataclasses.replace(
                engine, revision=files.revision
            )  # its processes inherit this variable
        found.append(ModelToServe(config.served_model_name or [name], engine, files))
    return found


def _named(entry: str) -> tuple[str | None, str]:
    """Returns (name, model) of `name=model`, or of a model alone: a `=` in a path does not end a name."""
    name, equals, path = entry.partition("=")
    return (name, path) if equals and name and path and "/" not in name else (None, entry)


async def _serve(planned: Sequence[ModelToServe], config: ServerConfig, started: float) -> int:
    async with AsyncExitStack() as stack:
        ports = [stack.enter_context(port) for port in open_ports(config)]
        swapper = Swapper(config.swap_patience) if config.swap else None
        worker_id = worker_id_of(config) if config.plane is not None else ""
        tracing = await stack.enter_async_context(opened_tracing(config.otlp_traces_endpoint, worker_id))
        events = stack.enter_context(event_endpoints(planned[0].config)) if config.plane is not None else None
        if events is not None:
            planned = [with_events(planned[0], events)]
        models, engines = [], list[AsyncLLM]()
        for one in planned:
            async with weights_of_peers(one, config, worker_id) as peer_weights:
                llm, tokenizer = await start_engine(one, config, peer_weights)
                stack.push_async_callback(llm.close)
            engines.append(llm)
            engine: ServedEngine = llm
            if swapper is not None:
                engine = await swapper.add(one.names[0], llm, one.config.model, llm.info.vocab_size)
            model = served_model(card_of(one, llm.info, tokenizer, config), engine, tokenizer, config)
            llm.on_other_model = _following(model, llm, config)
            models.append(model)
            if config.plane is not None:
                url = url_of(config, _number(ports[0]), reachable=True)
                await stack.enter_async_context(joined(model, events, url, config, worker_id, tracing))
        catalog = Catalog(models)
        app = create_app(catalog, config, tracing)
        admin = create_admin_app(catalog, config) if config.admin_port is not None else None

        def ready(port: int, admin_port: int | None) -> None:
            # The objects so far stay alive. A full collection would visit them while answers wait.
            gc.freeze()
            operated = f", admin port {admin_port} on {config.admin_host}" if admin_port is not None else ""
            logger.info(
                "serving %s at %s%s, ready after %.1f s",
                ", ".join(m.name for m in models),
                url_of(config, port),
                operated,
                time.monotonic() - started,
            )
            if config.plane is None and config.uds is None:  # in a fleet, the router has the pages
                url = url_of(config, port, reachable=True)
                pages = "chat page %s/  dashboard %s/dashboard  API %s/v1  description of the API %s/docs"
                logger.info(pages, url, url, url, url)
            warn_of_open_port(config, port)

        drain = asyncio.Event()
        if config.plane is not None:
            # Without its engine a worker of a fleet ends, so that its supervisor may start it again.
            stack.callback(asyncio.create_task(_set_after(engines[0].lost, drain)).cancel)
        else:
            for llm in engines:
                stack.callback(asyncio.create_task(_tell_when_lost(llm)).cancel)
        drained = await serve_http(app, admin, config, ports, drain=drain, ready=ready)
        if not drained:  # a second signal: at once
            for llm in engines:
                await llm.close(flush=False)
        return 0 if drained and not (config.plane is not None and engines[0].lost.is_set()) else 1


async def _tell_when_lost(llm: AsyncLLM) -> None:
    await llm.lost.wait()
    again = "" if llm.restart else "; with --restart it starts such an engine again by itself"
    logger.error("requests for %s are refused from now on: restart the server%s", llm.config.model, again)


async def _set_after(first: asyncio.Event, then: asyncio.Event) -> None:
    await first.wait()
    then.set()


async def start_engine(
    one: ModelToServe, config: ServerConfig, peer_weights: Awaitable[bytes | None] | None
) -> tuple[AsyncLLM, Tokenizer | None]:
    """Starts the engine, and loads the tokenizer meanwhile: a tenth of a small model's start."""
    engine = one.config
    starting = asyncio.create_task(
        AsyncLLM.start(
            engine, restart=config.restart, engine_timeout=config.engine_timeout, peer_weights=peer_weights
        )
    )
    try:
        await asyncio.sleep(0)  # the engine's process first, as it takes longer
        tokenizer = await _load_tokenizer(engine, one.files)
    except BaseException:
        starting.cancel()
        with contextlib.suppress(ShoalError, asyncio.CancelledError):
            await (await starting).close()
        raise
    return await starting, tokenizer


async def _load_tokenizer(config: EngineConfig, files: CheckpointFiles) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    return await asyncio.to_thread(load_tokenizer, files, config.tokenizer, config.chat_template)


def _following(model: ServedModel, llm: AsyncLLM, config: ServerConfig) -> Callable[[], Awaitable[None]]:
    """Returns a function to call after a change of the engine's model (AsyncLLM.on_other_model): the server
    then serves the new model under the same names."""

    async def follow() -> None:
        engine = llm.config
        try:
            files = await asyncio.to_thread(
                resolve, engine.model, engine.revision, engine.download_dir, overrides=engine.hf_overrides
            )
            tokenizer = await _load_tokenizer(engine, files)
        except ShoalError:
            # The old tokenizer does not fit the new model. Requests with text are refused now.
            model.loaded = dataclasses.replace(model.loaded, tokenizer=None)
            raise
        card = card_of(ModelToServe(model.names, engine, files), llm.info, tokenizer, config)
        model.become(loaded_model(card, tokenizer))

    return follow


def card_of(
    planned: ModelToServe, info: ModelInfo, tokenizer: Tokenizer | None, config: ServerConfig
) -> ModelCard:
    """Returns the facts that a server needs about this engine."""
    template = tokenizer.chat_template if tokenizer is not None else None
    tool_template = tokenizer.chat_templates.get("tool_use", template) if tokenizer is not None else None
    engine = planned.config
    has_own_template = engine.chat_template is not None and tokenizer is not None
    return ModelCard(
        info=info,
        names=planned.names,
        model=engine.model,
        revision=engine.revision,
        download_dir=engine.download_dir,
        tokenizer=engine.tokenizer,
        chat_template=template if has_own_template else None,
        skip_tokenizer_init=engine.skip_tokenizer_init,
        eos_token_ids=end_token_ids(info.eos_token_ids, tokenizer, info.vocab_size),
        seed=engine.seed,
        max_logprobs=engine.max_logprobs,
        closes_objects=engine.closes_objects,
        template_defaults=config.default_chat_template_kwargs or {},
        tool_call_parser=choose_tool_call_parser(
            config.tool_call_parser, tool_template, tokenizer.added_tokens if tokenizer is not None else ()
        ),
        reasoning_parser=choose_reasoning_parser(config.reasoning_parser, template),
        cache_config=_cache_config(engine, info),
        most_drafts=info.most_drafts,
        summary=summarize(planned.files),
    )


def _number(port: socket.socket) -> int:
    """Returns the number of a port; 0 for a Unix socket."""
    return 0 if port.family == socket.AF_UNIX else int(port.getsockname()[1])


def _cache_config(config: EngineConfig, info: ModelInfo) -> dict[str, str]:
    """Returns the labels of vllm:cache_config_info that apply here."""
    return {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "num_gpu_blocks": str(info.num_blocks),
        "kv_cache_size_tokens": str(info.kv_cache_tokens),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
    }
