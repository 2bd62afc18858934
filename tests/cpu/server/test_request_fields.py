"""Fields of other servers' requests: a field that would change the answer is never ignored silently."""

import json
import logging

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from shoal.cli import field_tables
from shoal.server.apis.anthropic import MessagesRequest
from shoal.server.apis.ollama import OllamaChatRequest, OllamaGenerateRequest
from shoal.server.apis.protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from shoal.server.apis.responses import ResponsesRequest
from shoal.server.http.request_fields import FIELDS, Refused, fields_of
from tests.fake_server import FakeServer

USER = [{"role": "user", "content": "x"}]
BODIES = {
    "ChatCompletionRequest": ("/v1/chat/completions", {"messages": USER, "max_tokens": 1}),
    "CompletionRequest": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    "ResponsesRequest": ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    "EmbeddingRequest": ("/v1/embeddings", {"input": "x"}),
    "CountTokensRequest": ("/v1/messages", {"messages": USER, "max_tokens": 1}),
    "OllamaRequest": ("/api/chat", {"messages": USER, "stream": False}),
}
# The fields of vLLM's requests (0.24) and of llama.cpp's server, which have no types to import here.
VLLM = [
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "add_special_tokens",
    "response_format",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
    "echo",
]
VLLM_CHAT = [
    "include_reasoning",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
]
LLAMA_CPP = [
    "n_predict",
    "n_indent",
    "n_keep",
    "n_discard",
    "n_cache_reuse",
    "t_max_predict_ms",
    "response_fields",
    "samplers",
    "min_keep",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_n_sigma",
    "adaptive_target",
    "adaptive_decay",
    "grammar",
    "json_schema",
    "n_probs",
    "post_sampling_probs",
    "id_slot",
    "cache_prompt",
    "lora",
    "timings_per_token",
    "return_progress",
]
OLLAMA = [
    "model",
    "stream",
    "options",
    "format",
    "keep_alive",
    "think",
    "logprobs",
    "top_logprobs",
    "shift",
    "truncate",
]


@pytest.fixture(scope="module")
def server():
    with FakeServer() as server:
        yield server


@pytest.mark.parametrize(
    "kind, names",
    [
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase.__annotations__),
        (ChatCompletionRequest, [*VLLM, *VLLM_CHAT, *LLAMA_CPP]),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase.__annotations__),
        (CompletionRequest, [*VLLM, *LLAMA_CPP]),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase.__annotations__),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams.__annotations__),
        (MessagesRequest, message_create_params.MessageCreateParamsBase.__annotations__),
        (MessagesRequest, beta_message_create_params.MessageCreateParamsBase.__annotations__),
        (OllamaChatRequest, [*OLLAMA, "messages", "tools"]),
        (
            OllamaGenerateRequest,
            [*OLLAMA, "prompt", "suffix", "images", "system", "template", "raw", "context"],
        ),
    ],
)
def test_every_field_of_other_apis_is_known(kind, names):
    known = {*kind.__struct_fields__, *fields_of(kind)}
    assert sorted(set(names) - known) == []


def test_the_page_is_up_to_date():
    assert field_tables.PAGE.read_text("utf-8") == field_tables.page(), (
        "run `python -m shoal.cli.field_tables`"
    )


@pytest.mark.parametrize(
    "kind, name",
    [(kind, name) for kind in BODIES for name, field in FIELDS[kind].items() if isinstance(field, Refused)],
)
def test_a_field_that_changes_the_answer_is_refused_unless_it_asks_for_nothing(kind, name, server):
    """Regression: such fields were ignored, and the client got another answer than it asked for, as a
    success."""
    path, body = BODIES[kind]
    status, found = server.json(path, {**body, name: {"other": 5}})
    assert status == 400 and name in str(found["error"])
    if path.startswith("/v1/") and path != "/v1/messages":  # the other APIs' errors have no such field
        assert found["error"]["param"] == name
    for neutral in (None, *FIELDS[kind][name].neutral):
        status, found = server.json(path, {**body, name: neutral})
        assert status == 200, found


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_beam_search", "false"),
        ("use_beam_search", "Off"),
        ("n_predict", "-1"),
        ("typical_p", "1.0"),
        ("repetition_detection", {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}),
    ],
)
def test_a_value_that_asks_for_nothing_may_be_text_or_spelt_out(name, value, server):
    """Regression: numbers and flags as text were read in Shoal's own fields, and `use_beam_search: "false"`
    was a 400."""
    path, body = BODIES["CompletionRequest"]
    assert server.json(path, {**body, name: value})[0] == 200


@pytest.mark.parametrize("name, value", [("use_beam_search", "true"), ("n_predict", "5"), ("echo", "yes")])
def test_a_value_that_asks_for_something_is_refused_as_text_too(name, value, server):
    path, body = BODIES["ChatCompletionRequest"]
    status, found = server.json(path, {**body, name: value})
    assert status == 400 and found["error"]["param"] == name


def test_other_fields_have_no_effect_and_a_line_in_the_log(server, caplog):
    caplog.set_level(logging.WARNING)
    path, body = BODIES["ChatCompletionRequest"]
    more = {
        "prediction": {"type": "content", "content": "x"},
        "service_tier": "auto",
        "store": True,
        "nonsense": 1,
    }
    status, _ = server.json(path, {**body, **more}, headers={"user-agent": json.dumps("fields")})
    assert status == 200
    told = [message for message in caplog.messages if "takes no field" in message]
    assert [m for m in told if "'prediction': it is ignored, as a guess" in m]
    assert [m for m in told if "'nonsense': it is ignored" in m]
    assert not [m for m in told if "service_tier" in m or "store" in m]


def test_a_name_within_a_text_is_no_field(server):
    path, body = BODIES["ChatCompletionRequest"]
    told = [{"role": "user", "content": 'say "use_beam_search": true'}]
    assert server.json(path, {**body, "messages": told})[0] == 200
    schema = {"type": "object", "properties": {"echo": {"type": "boolean"}}}
    assert server.json(path, {**body, "structured_outputs": {"json": schema}})[0] == 200
