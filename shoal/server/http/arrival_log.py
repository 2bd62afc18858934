"""The log line of a request that arrives (--enable-log-requests): its id, size and parameters, and with
--verbose its prompts."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from shoal.config import ServerConfig
from shoal.sampling_params import SamplingParams
from shoal.server.served.generation import Generation
from shoal.telemetry.logs import about

logger = logging.getLogger(__name__)

MAX_PARAMS = 2000  # characters: a schema may be long


def log_arrival(request_id: str, handler: str, generation: Generation, config: ServerConfig) -> None:
    """Logs an arrival. request_id: as in all logs. handler: the path of the request's route."""
    sizes = [len(prompt.token_ids) for prompt in generation.prompts]
    fields: dict[str, Any] = {
        "path": handler,
        "model": generation.model.name,
        "prompts": len(sizes),
        "prompt_tokens": sum(sizes),
        "params": _shown(generation.params)[:MAX_PARAMS],
    }
    text = (
        f"arrived at {handler} for {fields['model']}: {len(sizes)} prompts, {sum(sizes)} tokens, "
        f"{fields['params'] or 'parameters by default'}"
    )
    if logger.isEnabledFor(logging.DEBUG):
        most = config.max_log_len
        fields["texts"] = [
            prompt.token_ids[:most] if prompt.text is None else prompt.text[:most]
            for prompt in generation.prompts
        ]
        text += f", {fields['texts']!r}"
    logger.info(about(request_id, text, **fields))


def _shown(params: SamplingParams) -> str:
    """Returns the parameters that differ from the defaults of their class."""
    parts = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default and value not in (None, []):
            parts.append(f"{field.name}={value!r}")
    return " ".join(parts)
