"""`ExternalLink`: the HTTP client of one external worker: vLLM, SGLang, llama.cpp, Ollama, or another server
with OpenAI's endpoints. Retries are in forwarder.py; KV events are read by index/event_listener.py."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import urllib.parse
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from shoal.errors import BusyError, ShoalError, WorkerFailedError
from shoal.fleet.worker import WorkerInfo, WorkerLoad
from shoal.fleet.worker_spec import WorkerSpec
from shoal.hosts import is_loopback

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
TOKENIZE_SECONDS = 5.0
END_SECONDS = 0.5
# vLLM and other servers on uvicorn close a connection that is idle for 5 s. Closing it here before that
# avoids a close while a request is being sent.
KEEP_ALIVE_SECONDS = 3.0
MAX_MODELS = 1000  # models and adapters of one worker
MAX_ANSWER_BYTES = 1 << 28  # limit of an unstreamed answer; embeddings of many texts take megabytes
NO_SUCH_PATH = (404, 405, 501)
RETRY_SECONDS = (0.1, 60.0)  # bounds of a Retry-After
# The load of a worker in the metrics of vLLM, SGLang and llama.cpp: running, waiting, use of the KV cache.
GAUGES = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",  # its name before version 0.10
    "sglang:num_running_reqs": "num_running",
    "sglang:num_queue_reqs": "num_waiting",
    "sglang:token_usage": "kv_usage",
    "llamacpp:requests_processing": "num_running",
    "llamacpp:requests_deferred": "num_waiting",
    "llamacpp:kv_cache_usage_ratio": "kv_usage",
}
NUMBER = r"[0-9]{1,15}(?:\.[0-9]*)?(?:[eE]-?[0-9]{1,2})?"
GAUGE_LINE = re.compile(rf"^({'|'.join(GAUGES)})(?:{{([^}}]*)}})? ({NUMBER})$", re.MULTILINE)
RANK_LABEL = re.compile(r'(?:engine|dp_rank)="(\d+)"')


def new_session() -> aiohttp.ClientSession:
    """Opens the router's connections to its external workers. Needs a running loop; the caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class ExternalExchange:
    """One request to a worker and its answer.

        async with link.exchange("POST", path, body) as exchange:
            exchange.status, await exchange.whole()

    Leaving the block before the answer is read closes the connection: the worker sees its client leave.
    """

    def __init__(self, link: ExternalLink, method: str, url: str, options: Mapping[str, Any]) -> None:
        self._link, self._method, self._url, self._options = link, method, url, options
        self._wait_for_head = asyncio.timeout(None)
        self._is_aborted = False
        self._why_aborted: ShoalError | None = None
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> ExternalExchange:
        """Raises WorkerFailedError if no answer begins."""
        try:
            async with self._wait_for_head:
                self._response = await self._link.session.request(self._method, self._url, **self._options)
        except aiohttp.ClientError as error:  # comes first, as some subclasses are TimeoutErrors too
            is_absent = isinstance(error, aiohttp.ClientConnectorError)
            raise self._link.failure(_without_address(error), is_absent) from None
        except TimeoutError:
            if self._response is not None:  # its head arrived at the same moment
                self._response.close()
            raise self._failure("it did not answer and counts as dead") from None
        except OSError as error:
            raise self._link.failure(_without_address(error)) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started.close()

    def abort(self, why: ShoalError | None = None) -> None:
        """Ends the present or next wait for the worker with `why`, or with a WorkerFailedError."""
        if self._is_aborted:
            return
        self._is_aborted, self._why_aborted = True, why
        if self._response is not None:
            self._response.close()
        else:
            self._wait_for_head.reschedule(asyncio.get_running_loop().time())

    @property
    def status(self) -> int:
        return self._started.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._started.headers

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yields the body as it arrives. Raises WorkerFailedError if it breaks off."""
        content = self._started.content
        try:
            while piece := await content.readany():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(f"its answer broke off: {_without_address(error)}") from None
        if self._is_aborted:
            raise self._failure("it counts as dead, or was removed")

    def _failure(self, what: str) -> ShoalError:
        return self._why_aborted or self._link.failure(what)

    async def read_end(self) -> None:
        """Reads the rest of a finished answer, so that the connection can be reused. Stops after a short
        time."""
        try:
            async with asyncio.timeout(END_SECONDS):
                while await self._started.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass

    async def whole(self) -> bytes:
        """Returns the body. Raises WorkerFailedError as `pieces` does, and for a body that is too large."""
        body = bytearray()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise self._link.failure(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)

    @property
    def _started(self) -> aiohttp.ClientResponse:
        assert self._response is not None, "the block was not entered"
        return self._response


class ExternalLink:
    """One external worker. Keeps its models and which of /health, /metrics, /tokenize and /detokenize it
    lacks, until the router finds the worker again."""

    def __init__(self, spec: WorkerSpec, session: aiohttp.ClientSession) -> None:
        """The URL may end in /v1, as for clients of OpenAI's API."""
        self.session = session
        self.takes_token_ids = True  # False after it has refused the field return_token_ids
        self._spec = spec
        self._url = spec.url.removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity"}
        if spec.api_key is not None:
            self._headers["Authorization"] = f"Bearer {spec.api_key}"
        elif is_exposed(spec.url):
            logger.warning(
                "worker %s (%s) is on another host and has plain http without a key: others on the network "
                "can read and change the requests; use https, or give its key (api_key_file=)",
                spec.id,
                spec.url,
            )
        self._missing: set[str] = set()  # paths and forms of /tokenize that the worker lacks
        self._tokenizes_late = False  # it was too slow to tokenize, and has not passed a check since
        self._max_model_lens: dict[str, int] = {}  # by model
        self._model: str | None = None  # its first model

    # The interface of every worker

    async def check(self) -> WorkerInfo:
        """Returns the worker's models from /v1/models. Raises WorkerFailedError, also if it has /health and
        that reports a failure."""
        if "/health" not in self._missing:
            async with self.exchange("GET", "/health") as exchange:
                status = exchange.status
            if status in (401, 403, *NO_SUCH_PATH):
                self._missing.add("/health")
            elif status >= 300:
                raise self.failure(f"its /health answers {status}")
        status, answer = await self._ask("GET", "/v1/models")
        self._tokenizes_late = False
        cards = answer.get("data") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(cards, list):
            hint = "; give its key by api_key_file=" if status in (401, 403) else ""
            raise self.failure(f"its /v1/models answers {status}{hint}")
        return self._read_cards([one for one in cards if isinstance(one, dict)])

    def _read_cards(self, cards: list[dict[str, Any]]) -> WorkerInfo:
        names: list[str] = []
        adapters: list[str] = []
        if len(cards) > MAX_MODELS:
            if self._model is None:
                text = "worker %s lists %d models; the first %d are served"
                logger.warning(text, self._spec.id, len(cards), MAX_MODELS)
            del cards[MAX_MODELS:]
        for card in cards:
            name, parent, length = card.get("id"), card.get("parent"), card.get("max_model_len")
            if not isinstance(name, str):
                continue
            is_adapter = isinstance(parent, str) and parent != name
            (adapters if is_adapter else names).append(name)
            if isinstance(length, int):
                self._max_model_lens[name] = length
            if card.get("owned_by") == "llamacpp":
                # Its /tokenize takes other fields. It publishes no KV events, so token ids have no advantage
                # over the text.
                self._missing |= {"/tokenize prompt", "/tokenize messages"}
        if not names:
            raise self.failure("its /v1/models lists no model")
        self._model = names[0]
        return msgspec.structs.replace(self._spec.info(), models=tuple(names), adapters=frozenset(adapters))

    async def canary(self) -> None:
        """Requests one token. A refusal also shows that the worker works: an embedding model, for example,
        generates nothing. Raises WorkerFailedError."""
        if self._model is None:
            await self.check()
        body: dict[str, Any] = {"model": self._model, "prompt": "1 2 3", "max_tokens": 1, "temperature": 0}
        status, _ = await self._ask("POST", "/v1/completions", body)
        if status in NO_SUCH_PATH:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": "1 2 3"}]
            status, _ = await self._ask("POST", "/v1/chat/completions", body)
        if status >= 500:
            raise self.failure(f"it answers {status} to a request for one token")

    async def loads(self) -> list[WorkerLoad]:
        """Returns the load of each rank from /metrics, [] without it. Raises WorkerFailedError."""
        if "/metrics" in self._missing:
            return []
        async with self.exchange("GET", "/metrics") as exchange:
            text = (await exchange.whole()).decode("utf-8", "replace") if exchange.status == 200 else ""
        found = read_loads(text)
        if not found:
            self._missing.add("/metrics")
        return found

    async def close(self) -> None:
        """Does nothing: requests have ended, and the session belongs to its owner."""

    # The interface of external workers only

    def exchange(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> ExternalExchange:
        """Returns a request, which is sent when its block is entered. `path` may have a query."""
        sent = {**(headers or {}), **self._headers}
        options = {"data": body, "headers": sent, "allow_redirects": False}
        return ExternalExchange(self, method, self._url + path, options)

    def max_model_len(self, model: str | None) -> int | None:
        return self._max_model_lens.get(model or self._model or "")

    def may_tokenize(self, form: str) -> bool:
        return f"/tokenize {form}" not in self._missing and not self._tokenizes_late

    async def tokenize(self, form: str, body: Mapping[str, Any]) -> list[int] | None:
        """Returns the token ids of a text or of messages by the worker's own tokenizer and template; None if
        it cannot tokenize. `form`: "prompt" or "messages". A worker without /tokenize is asked only once."""
        answer = await self._try("/tokenize", form, {"model": self._model, **body})
        ids = answer.get("tokens")
        is_answer = isinstance(ids, list) and bool(ids) and all(type(one) is int for one in ids)
        return ids if is_answer else None

    async def detokenize(self, model: str | None, token_ids: list[int]) -> str | None:
        """Returns the text of the token ids; None if the worker cannot detokenize."""
        answer = await self._try("/detokenize", "", {"model": model or self._model, "tokens": token_ids})
        text = answer.get("prompt")
        return text if isinstance(text, str) else None

    def failure(self, why: str, is_absent: bool = False) -> WorkerFailedError:
        """Returns an error that names the worker but not its address, as clients read it."""
        return WorkerFailedError(f"the worker {self._spec.id} failed: {why}", is_absent)

    def busy(self, retry_after: str | None) -> BusyError:
        """Returns the error for an answer 429. `retry_after`: its header."""
        try:
            seconds = float(retry_after or "")
        except ValueError:  # missing, or a date
            seconds = 1.0
        least, most = RETRY_SECONDS
        seconds = min(max(seconds, least), most) if math.isfinite(seconds) else 1.0
        return BusyError(f"the worker {self._spec.id} is full", seconds)

    async def _try(self, path: str, form: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an answer that the router can do without; empty on a failure."""
        where = f"{path} {form}"
        if where in self._missing:
            return {}
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS):
                status, answer = await self._ask("POST", path, body)
        except (TimeoutError, WorkerFailedError):
            self._tokenizes_late = True
            return {}
        if status in NO_SUCH_PATH:
            self._missing.add(where)
        return answer if status == 200 and isinstance(answer, dict) else {}

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Returns status and JSON of an answer; None in place of invalid JSON."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with self.exchange(method, path, data, headers) as exchange:
            answer = await exchange.whole()
        try:
            return exchange.status, msgspec.json.decode(answer)
        except ValueError:
            return exchange.status, None


def _without_address(error: Exception) -> str:
    """Returns the error's kind and text without the URL, host and port that aiohttp adds."""
    if isinstance(error, aiohttp.ClientResponseError):
        said = error.message
    elif isinstance(error, aiohttp.ClientConnectorError):
        said = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else ""
    elif isinstance(error, OSError):
        said = error.strerror or ""
    else:
        said = str(error)
    kind = type(error).__name__
    return f"{kind}: {said}" if said else kind


def read_loads(metrics: str) -> list[WorkerLoad]:
    """Returns the load of each data-parallel rank from the text of /metrics."""
    ranks: dict[int, dict[str, Any]] = {}
    for name, labels, value in GAUGE_LINE.findall(metrics):
        rank = RANK_LABEL.search(labels)
        field, number = GAUGES[name], float(value)
        own = ranks.setdefault(int(rank[1]) if rank else 0, {})
        own[field] = number if field == "kv_usage" else int(number)
    return [WorkerLoad(rank=rank, **own) for rank, own in sorted(ranks.items())]


def is_exposed(url: str) -> bool:
    """Returns True if the URL has plain HTTP to another host."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")
