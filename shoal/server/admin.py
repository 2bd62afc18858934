"""The admin port: putting a model to sleep and waking it, weights, pause. Every path takes ?model=NAME;
without it, the first model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path, PurePosixPath

from shoal.api import SLEEP_MODES
from shoal.server.app import Route
from shoal.server.errors import ApiError
from shoal.server.http import Exchange
from shoal.server.model import ServedModel
from shoal.server.protocol import UpdateWeightsRequest
from shoal.server.system import health, metrics

MOST_FOLDER_CHARACTERS = 200
SLEEP_NAMES = ("level", "mode", "tags", "model")


async def sleep(exchange: Exchange) -> None:
    query = _query(exchange, SLEEP_NAMES)
    level = _one(query, "level", "1")
    if level not in ("0", "1", "2"):
        raise ApiError(400, f"level {level!r:.40} is not 0, 1 or 2", param="level")
    model = _model(exchange, query)
    await exchange.json(asdict(await model.engine.sleep(int(level), query.get("tags"), _mode(query))))


async def wake_up(exchange: Exchange) -> None:
    query = _query(exchange, ("tags", "model"))
    await exchange.json(asdict(await _model(exchange, query).engine.wake_up(query.get("tags"))))


async def is_sleeping(exchange: Exchange) -> None:
    state = await _model(exchange, _query(exchange, ("model",))).engine.sleep_state()
    await exchange.json({"is_sleeping": state.is_sleeping})


async def pause(exchange: Exchange) -> None:
    """Level 0: nothing is scheduled, nothing released."""
    query = _query(exchange, ("mode", "model"))
    model = _model(exchange, query)
    await model.engine.sleep(0, None, _mode(query))
    await exchange.json({"status": "paused"})


async def resume(exchange: Exchange) -> None:
    await _model(exchange, _query(exchange, ("model",))).engine.wake_up(None)
    await exchange.json({"status": "resumed"})


async def is_paused(exchange: Exchange) -> None:
    """Asleep or paused: as vLLM, either way nothing is scheduled."""
    state = await _model(exchange, _query(exchange, ("model",))).engine.sleep_state()
    await exchange.json({"is_paused": state.is_sleeping})


async def reset_prefix_cache(exchange: Exchange) -> None:
    await exchange.json(
        {"reset": await _model(exchange, _query(exchange, ("model",))).engine.reset_prefix_cache()}
    )


async def update_weights(exchange: Exchange) -> None:
    model = _model(exchange, _query(exchange, ("model",)))
    request = exchange.decode(UpdateWeightsRequest)
    if (request.path is None) == (request.model is None):
        raise ApiError(
            400,
            "path and model: give exactly one of them, a checkpoint's folder or file, or a model's name",
            param="path",
        )
    await exchange.json({"version": await model.engine.update_weights(request.path or request.model or "")})


async def check_weights(exchange: Exchange) -> None:
    await exchange.json(
        {"checksums": await _model(exchange, _query(exchange, ("model",))).engine.check_weights()}
    )


async def memory_usage(exchange: Exchange) -> None:
    await exchange.json(await _model(exchange, _query(exchange, ("model",))).engine.memory_usage())


async def start_profile(exchange: Exchange) -> None:
    query = _query(exchange, ("folder", "model"))
    folder = _below(exchange.server.config.profile_dir, _one(query, "folder", ""))
    await _model(exchange, query).engine.start_profile(folder)
    await exchange.json({"status": "tracing"})


async def stop_profile(exchange: Exchange) -> None:
    """Answers with the traces' files, on this machine."""
    await exchange.json({"files": await _model(exchange, _query(exchange, ("model",))).engine.stop_profile()})


def _below(profile_dir: str, name: str) -> str:
    """The folder of traces that a request may name."""
    parts = PurePosixPath(name).parts
    if (
        not name.isprintable()
        or len(name) > MOST_FOLDER_CHARACTERS
        or name.startswith(("/", "~"))
        or ".." in parts
    ):
        raise ApiError(
            400,
            f"folder {name!r:.100} is no folder below the server's --profile-dir ({profile_dir}); give a "
            f"relative path of at most {MOST_FOLDER_CHARACTERS} printable characters",
            param="folder",
        )
    return str(Path(profile_dir, *parts))


def _query(exchange: Exchange, known: tuple[str, ...]) -> dict[str, list[str]]:
    """The URL's parameters. An unknown one is refused: a misspelt `tag=` would put everything to sleep."""
    query = exchange.query()
    if unknown := [name for name in query if name not in known]:
        raise ApiError(
            400,
            f"unknown parameter {unknown[0]!r:.40}; {exchange.path} takes {', '.join(known)}",
            param=unknown[0][:40],
        )
    return query


def _one(query: dict[str, list[str]], name: str, default: str) -> str:
    values = query.get(name, [default])
    if len(values) > 1:
        raise ApiError(400, f"{name} is given {len(values)} times; give it once", param=name)
    return values[0]


def _mode(query: dict[str, list[str]]) -> str:
    mode = _one(query, "mode", "abort")
    if mode not in SLEEP_MODES:
        raise ApiError(400, f"mode {mode!r:.40} is not one of {', '.join(SLEEP_MODES)}", param="mode")
    return mode


def _model(exchange: Exchange, query: dict[str, list[str]]) -> ServedModel:
    return exchange.server.find(_one(query, "model", exchange.server.models[0].name))


ADMIN_ROUTES = (
    Route("POST", "/sleep", sleep, "Give memory back"),
    Route("POST", "/wake_up", wake_up, "Take it again"),
    Route("GET", "/is_sleeping", is_sleeping, "Whether the model sleeps"),
    Route("POST", "/pause", pause, "Stop scheduling"),
    Route("POST", "/resume", resume, "Schedule again"),
    Route("GET", "/is_paused", is_paused, "Whether scheduling is stopped"),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, "Forget all cached prefixes"),
    Route("POST", "/update_weights", update_weights, "Load other weights in place", UpdateWeightsRequest),
    Route("GET", "/check_weights", check_weights, "Checksums of the weights"),
    Route("GET", "/memory_usage", memory_usage, "Memory by tag"),
    Route("POST", "/start_profile", start_profile, "Trace what runs, for ui.perfetto.dev"),
    Route("POST", "/stop_profile", stop_profile, "Write the traces"),
    Route("GET", "/health", health, "Whether the server works", public=True, quiet=True),
    Route("GET", "/metrics", metrics, "Metrics for Prometheus", public=True, quiet=True),
)
