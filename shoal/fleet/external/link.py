"""`ExternalLink`: HTTP to an external worker: vLLM, SGLang, llama.cpp, Ollama, or another server with the
endpoints of OpenAI."""

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
from shoal.fleet.key import is_loopback
from shoal.fleet.worker import WorkerInfo, WorkerLoad
from shoal.fleet.worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
TOKENIZE_SECONDS = 5.0
END_SECONDS = 0.5
# vLLM and others on uvicorn close a connection that is idle for 5 s. It is better closed here before that
# than at the same moment as a request goes out.
KEEP_ALIVE_SECONDS = 3.0
MAX_MODELS = 1000  # of one worker, with its adapters
MAX_ANSWER_BYTES = 1 << 28  # of an answer that is no stream; one with the vectors of many texts has megabytes
NO_SUCH_PATH = (404, 405, 501)
RETRY_SECONDS = (0.1, 60.0)  # the least and the most that a Retry-After counts for
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
    """The connections of a router to its external workers. To be called in the running loop, and closed."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class ExternalExchange:
    """One request to a worker, and its answer.

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
        except aiohttp.ClientError as error:  # comes first, as some of them are TimeoutErrors too
            is_absent = isinstance(error, aiohttp.ClientConnectorError)
            raise self._link.failure(_without_address(error), is_absent) from None
        except TimeoutError:
            if self._response is not None:  # its head came at the same moment
                self._response.close()
            raise self._failure("it gave no answer, and is taken for dead") from None
        except OSError as error:
            raise self._link.failure(_without_address(error)) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started.close()

    def abort(self, why: ShoalError | None = None) -> None:
        """Ends the wait for the worker with `why`, or else a WorkerFailedError, at once or when it is next
        waited for."""
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
        """The body as it comes. Raises WorkerFailedError where it breaks off."""
        content = self._started.content
        try:
            while piece := await content.readany():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(f"its answer broke off: {_without_address(error)}") from None
        if self._is_aborted:
            raise self._failure("it is taken for dead, or was removed")

    def _failure(self, what: str) -> ShoalError:
        return self._why_aborted or self._link.failure(what)

    async def read_end(self) -> None:
        """Reads an answer that has said all to its very end, so that the connection can be used again. Gives
        up soon."""
        try:
            async with asyncio.timeout(END_SECONDS):
                while await self._started.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass

    async def whole(self) -> bytes:
        """The body. Raises WorkerFailedError as `pieces` does, and for one that is too large."""
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
    """One worker. What is learned about it is kept until it is found anew: its models, and whether it has
    /health, /metrics, /tokenize and /detokenize."""

    def __init__(self, spec: WorkerSpec, session: aiohttp.ClientSession) -> None:
        """The URL may end in /v1, as clients of OpenAI's API are given it."""
        self.session = session
        self.takes_token_ids = True  # it has not refused the field return_token_ids
        self._spec = spec
        self._url = spec.url.removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity"}
        if spec.api_key is not None:
            self._headers["Authorization"] = f"Bearer {spec.api_key}"
        elif is_exposed(spec.url):
            logger.warning(
                "worker %s (%s) is reached by plain http without a key, and is not on this host: others on "
                "the way can read and change what goes there; use https, or give its key (api_key_file=)",
                spec.id,
                spec.url,
            )
        self._missing: set[str] = set()  # paths, and forms of /tokenize, that it does not have
        self._tokenizes_late = False  # it gave no tokens in time, and was not well since
        self._max_model_lens: dict[str, int] = {}  # by model
        self._model: str | None = None  # its first

    # What a router needs of any worker

    async def check(self) -> WorkerInfo:
        """What /v1/models says of it, if /health, where it has that, says that it is well. Raises
        WorkerFailedError."""
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
                told = "worker %s lists %d models, of which the first %d are offered"
                logger.warning(told, self._spec.id, len(cards), MAX_MODELS)
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
                # Its /tokenize takes other fields. It publishes no KV events, without which the text itself
                # tells as much.
                self._missing |= {"/tokenize prompt", "/tokenize messages"}
        if not names:
            raise self.failure("its /v1/models lists no model")
        self._model = names[0]
        return msgspec.structs.replace(self._spec.info(), models=tuple(names), adapters=frozenset(adapters))

    async def canary(self) -> None:
        """Has it generate one token. An answer that refuses the request shows that it works, too: a model of
        embeddings, for one, generates nothing. Raises WorkerFailedError."""
        if self._model is None:
            await self.check()
        body: dict[str, Any] = {"model": self._model, "prompt": "1 2 3", "max_tokens": 1, "temperature": 0}
        status, _ = await self._ask("POST", "/v1/completions", body)
        if status in NO_SUCH_PATH:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": "1 2 3"}]
            status, _ = await self._ask("POST", "/v1/chat/completions", body)
        if status >= 500:
            raise self.failure(f"it answers {status} where one token is asked for")

    async def loads(self) -> list[WorkerLoad]:
        """The load of each rank by its /metrics; [] without them. Raises WorkerFailedError."""
        if "/metrics" in self._missing:
            return []
        async with self.exchange("GET", "/metrics") as exchange:
            text = (await exchange.whole()).decode("utf-8", "replace") if exchange.status == 200 else ""
        found = read_loads(text)
        if not found:
            self._missing.add("/metrics")
        return found

    async def close(self) -> None:
        """Requests under way have ended: the session is its owner's."""

    # What only an external worker is asked

    def exchange(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> ExternalExchange:
        """A request, to be entered. `path` may have a query."""
        sent = {**(headers or {}), **self._headers}
        options = {"data": body, "headers": sent, "allow_redirects": False}
        return ExternalExchange(self, method, self._url + path, options)

    def max_model_len(self, model: str | None) -> int | None:
        return self._max_model_lens.get(model or self._model or "")

    def may_tokenize(self, form: str) -> bool:
        return f"/tokenize {form}" not in self._missing and not self._tokenizes_late

    async def tokenize(self, form: str, body: Mapping[str, Any]) -> list[int] | None:
        """The ids of a text or of messages (`form`: which of these), by the worker's own tokenizer and
        template. None if the worker cannot say. A worker without /tokenize is asked once only."""
        answer = await self._try("/tokenize", form, {"model": self._model, **body})
        ids = answer.get("tokens")
        is_answer = isinstance(ids, list) and bool(ids) and all(type(one) is int for one in ids)
        return ids if is_answer else None

    async def detokenize(self, model: str | None, token_ids: list[int]) -> str | None:
        """Their text. None if the worker cannot say."""
        answer = await self._try("/detokenize", "", {"model": model or self._model, "tokens": token_ids})
        text = answer.get("prompt")
        return text if isinstance(text, str) else None

    def failure(self, why: str, is_absent: bool = False) -> WorkerFailedError:
        """Clients get to read it, so it names the worker and not where it is."""
        return WorkerFailedError(f"the worker {self._spec.id} failed: {why}", is_absent)

    def busy(self, retry_after: str | None) -> BusyError:
        """What its answer 429 means. `retry_after`: the header of this name."""
        try:
            seconds = float(retry_after or "")
        except ValueError:  # none, or a date
            seconds = 1.0
        least, most = RETRY_SECONDS
        seconds = min(max(seconds, least), most) if math.isfinite(seconds) else 1.0
        return BusyError(f"the worker {self._spec.id} is full", seconds)

    async def _try(self, path: str, form: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An answer that the router can do without; empty if there is none."""
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
        """Status and JSON of an answer, None where it is no JSON."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with self.exchange(method, path, data, headers) as exchange:
            answer = await exchange.whole()
        try:
            return exchange.status, msgspec.json.decode(answer)
        except ValueError:
            return exchange.status, None


def _without_address(error: Exception) -> str:
    """The error's kind and what it says, but for the URL, host and port that aiohttp adds."""
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
    """The load of each data-parallel rank, out of the text of /metrics."""
    ranks: dict[int, dict[str, Any]] = {}
    for name, labels, value in GAUGE_LINE.findall(metrics):
        rank = RANK_LABEL.search(labels)
        field, number = GAUGES[name], float(value)
        own = ranks.setdefault(int(rank[1]) if rank else 0, {})
        own[field] = number if field == "kv_usage" else int(number)
    return [WorkerLoad(rank=rank, **own) for rank, own in sorted(ranks.items())]


def is_exposed(url: str) -> bool:
    """Whether plain HTTP to this URL leaves the host."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")
