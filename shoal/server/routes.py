"""The routes of the public port."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.server.apis import anthropic, model_list, ollama, protocol, responses, shapes, tokens
from shoal.server.apis.anthropic import ANTHROPIC
from shoal.server.apis.chat import create_chat_completion
from shoal.server.apis.chat_batch import create_chat_batch
from shoal.server.apis.completions import create_completion
from shoal.server.apis.invocations import InvocationRequest, invocations
from shoal.server.apis.ollama import OLLAMA
from shoal.server.http.route import DOCS, DOCUMENT, Route
from shoal.server.operator import recent_requests, system
from shoal.server.operator.docs_page import docs
from shoal.server.operator.monitoring_routes import DASHBOARD, FLEET
from shoal.server.operator.openapi import openapi
from shoal.telemetry.timeline import RequestDetails

PUBLIC_ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "The next message of a conversation",
        protocol.ChatCompletionRequest,
        shapes.ChatCompletion,
    ),
    Route(
        "POST",
        "/v1/chat/completions/batch",
        create_chat_batch,
        "The next message of each of several conversations",
        protocol.BatchChatCompletionRequest,
        shapes.ChatCompletion,
    ),
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        "The continuation of a text",
        protocol.CompletionRequest,
        shapes.Completion,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses.create_response,
        "The next items of a conversation, in OpenAI's newer API",
        responses.ResponsesRequest,
        responses.Response,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        "The number of tokens of such a conversation",
        responses.ResponsesRequest,
        responses.InputTokens,
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        responses.get_response,
        "A response that is kept",
        response=responses.Response,
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        responses.delete_response,
        "Forgets a response",
        response=responses.DeletedResponse,
    ),
    Route(
        "POST",
        "/v1/messages",
        anthropic.create_message,
        "The next message of a conversation, in Anthropic's API",
        anthropic.MessagesRequest,
        anthropic.Message,
        dialect=ANTHROPIC,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        "The number of tokens of such a conversation",
        anthropic.CountTokensRequest,
        anthropic.TokenCount,
        dialect=ANTHROPIC,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        tokens.create_embeddings,
        "Pooled hidden states",
        protocol.EmbeddingRequest,
        shapes.EmbeddingList,
    ),
    Route("GET", "/v1/models", model_list.list_models, "The models", response=shapes.ModelList),
    Route("GET", "/v1/models/{id}", model_list.get_model, "One model", response=shapes.ModelCard),
    Route(
        "POST",
        "/tokenize",
        tokens.tokenize,
        "Text or messages to token ids",
        protocol.TokenizeRequest,
        shapes.Tokens,
    ),
    Route(
        "POST",
        "/detokenize",
        tokens.detokenize,
        "Token ids to text",
        protocol.DetokenizeRequest,
        shapes.Detokenized,
    ),
    Route(
        "GET",
        "/tokenizer_info",
        tokens.tokenizer_info,
        "The tokenizer's settings and chat template",
        response=shapes.TokenizerInfo,
    ),
    Route(
        "POST",
        "/inference/v1/generate",
        tokens.generate_tokens,
        "Token ids in, token ids out",
        protocol.TokenRequest,
        shapes.TokenAnswer,
    ),
    Route(
        "POST",
        "/api/chat",
        ollama.chat,
        "The next message of a conversation, in Ollama's API",
        ollama.OllamaChatRequest,
        ollama.OllamaChatAnswer,
        dialect=OLLAMA,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama.generate,
        "The answer to a text",
        ollama.OllamaGenerateRequest,
        ollama.OllamaGenerateAnswer,
        dialect=OLLAMA,
    ),
    Route(
        "POST",
        "/api/embed",
        ollama.embed_texts,
        "Pooled hidden states",
        ollama.OllamaEmbedRequest,
        ollama.OllamaEmbeddings,
        dialect=OLLAMA,
    ),
    Route(
        "POST",
        "/api/embeddings",
        ollama.embed_text,
        "The older form of it",
        ollama.OllamaEmbeddingsRequest,
        ollama.OllamaEmbedding,
        dialect=OLLAMA,
    ),
    Route("GET", "/api/tags", ollama.tags, "The models", response=ollama.OllamaModels, dialect=OLLAMA),
    Route(
        "GET", "/api/ps", ollama.ps, "The models that are awake", response=ollama.OllamaModels, dialect=OLLAMA
    ),
    Route(
        "POST",
        "/api/show",
        ollama.show,
        "One model",
        ollama.OllamaShowRequest,
        ollama.OllamaShown,
        dialect=OLLAMA,
    ),
    Route(
        "GET",
        "/api/version",
        ollama.version,
        "The release of Ollama whose API this is",
        response=shapes.Version,
        public=True,
        dialect=OLLAMA,
    ),
    Route(
        "GET",
        "/requests",
        recent_requests.list_requests,
        "The last requests",
        response=recent_requests.RequestList,
        quiet=True,
    ),
    Route(
        "GET",
        "/requests/{id}",
        recent_requests.get_request,
        "One with its timeline",
        response=RequestDetails,
        quiet=True,
    ),
    Route("GET", "/load", system.load, "Requests that run or wait", response=shapes.Load, quiet=True),
    Route("GET", "/health", system.health, "Whether the server works", public=True, quiet=True),
    Route("GET", "/ping", system.health, "The same", public=True, quiet=True),
    Route("POST", "/ping", system.health, "The same", public=True, quiet=True),
    Route(
        "GET",
        "/version",
        system.version,
        "The server's version",
        response=shapes.Version,
        public=True,
        quiet=True,
    ),
    Route("GET", "/metrics", system.metrics, "Metrics for Prometheus", public=True, quiet=True),
    FLEET,
    DASHBOARD,
    Route("GET", "/", system.page, "The chat page", content_type="text/html", public=True),
)


def described(routes: Sequence[Route]) -> list[Route]:
    """Returns the routes with SageMaker's path, two routes that describe all of them, and the chat page's
    libraries."""
    found = list(routes)
    found += [
        Route(
            "POST",
            "/invocations",
            invocations(routes),
            "Chat, completions or embeddings, as the body's fields say: SageMaker's path",
            InvocationRequest,
            content_type="application/json",
        ),
        Route("GET", DOCS, docs(found), "The API, to read", content_type="text/html", public=True),
        Route("GET", DOCUMENT, openapi(found), "This document", content_type="application/json", public=True),
    ]
    vendor = Route(
        "GET", "/vendor/{id}", system.vendored_file, "The chat page's libraries", public=True, quiet=True
    )
    return [*found, vendor]
