"""`check_possible`: refuses requests that an engine can never answer, whatever its state."""

from __future__ import annotations

from shoal.api import Request
from shoal.config import ResolvedConfig
from shoal.errors import RequestError
from shoal.model_config import ModelConfig
from shoal.text.request_builder import check_request


def check_possible(request: Request, config: ResolvedConfig, model: ModelConfig) -> None:
    """Raises RequestError for a request that does not fit this model or these options."""
    check_request(request, model.vocab_size, config.max_logprobs)
    if not model.has_head and not request.embed:
        raise RequestError(
            "the model must have an output head (lm_head) to generate, and its checkpoint has none; ask "
            "for embeddings, by /v1/embeddings or LLM.embed, or serve a causal model"
        )
    structured = request.params.structured_outputs
    if structured is not None and (request.embed or config.skip_tokenizer_init):
        without = "this engine runs without a tokenizer (skip_tokenizer_init)"
        why = "an embedding has no text" if request.embed else without
        raise RequestError(
            f"structured_outputs needs tokens of text, and {why}; leave it out", field="structured_outputs"
        )
    transfer = config.kv_transfer_config
    if request.fetches_only and (transfer is None or not transfer.reads):
        raise RequestError(
            "fetches_only brings KV blocks of another engine in, and this engine reads none; send it to "
            "one whose kv_role is kv_consumer or kv_both",
            field="fetches_only",
        )
