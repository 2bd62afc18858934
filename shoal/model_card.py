"""ModelCard: the facts about a model that a server needs to exchange text with its engine, as plain data.

`shoal serve` builds one for its own engine. A worker of a fleet puts it on the plane, and the router builds
the same ServedModel from it. Torch-free.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.api import ModelSummary
from shoal.wire import ModelInfo


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    info: ModelInfo  # facts about the built engine
    names: list[str]  # names for clients; answers have the first
    # The source of the tokenizer: the engine's options of these names.
    model: str
    revision: str | None = None
    download_dir: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    skip_tokenizer_init: bool = False  # token ids only, without a tokenizer
    eos_token_ids: tuple[int, ...]  # all end-of-text ids
    seed: int = 0  # the seed of requests without one
    max_logprobs: int = 20
    template_defaults: dict[str, Any] = {}  # default variables of the chat template
    closes_objects: bool = True  # objects have only the keys of their JSON schema, unless it allows others
    tool_call_parser: str = "none"
    reasoning_parser: str = "none"
    cache_config: dict[str, str] = {}  # labels of vllm:cache_config_info
    most_drafts: int = 0  # the most in one step of a sequence; 0: the engine makes none
    summary: ModelSummary = ModelSummary()

    @property
    def kind(self) -> dict[str, Any]:
        """Returns the facts that all workers of a model must share, so that an answer that moves from one to
        another does not change."""
        summary = self.summary
        return {
            "architecture": summary.architecture,
            "parameters": summary.num_parameters,
            "quantization": summary.quantization,
            "dtype": self.info.dtype,
            "vocabulary size": self.info.vocab_size,
            "max_model_len": self.info.max_model_len,
            "end-of-text ids": self.eos_token_ids,
            "chat template": self.chat_template,
        }
