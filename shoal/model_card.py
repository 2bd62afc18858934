"""ModelCard: what a server must know of a model to speak text to its engine, as plain data.

`shoal serve` makes one for its own engine. A worker of a fleet puts it on the plane, and the router builds
the same ServedModel from it. Torch-free.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.api import ModelSummary
from shoal.wire import ModelInfo


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    info: ModelInfo  # the engine, as it was built
    names: list[str]  # those that clients may use; the first is the one answered with
    # Where the tokenizer is read from: the options of these names, as the engine was given them.
    model: str
    revision: str | None = None
    download_dir: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    skip_tokenizer_init: bool = False  # there is no tokenizer: token ids only
    eos_token_ids: tuple[int, ...]  # all ids that end a text
    seed: int = 0  # where the seeds of requests without one come from
    max_logprobs: int = 20
    template_defaults: dict[str, Any] = {}  # variables of the chat template that requests do not give
    closes_objects: bool = True  # a JSON schema's objects have no other keys, unless it says so
    tool_call_parser: str = "none"
    reasoning_parser: str = "none"
    cache_config: dict[str, str] = {}  # the labels of vllm:cache_config_info
    summary: ModelSummary = ModelSummary()

    @property
    def kind(self) -> dict[str, Any]:
        """What the workers of one model must have in common: an answer that moves from one to another must
        not change."""
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
