"""`shoal run-batch`: answers a file of requests. They go to the server's own endpoints, in this process and
without a port, so a line may use every field that the server accepts."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.apps.join import ModelToServe
from shoal.apps.serve import card_of, start_engine
from shoal.cli.batch_files import (
    AnswerFile,
    BatchAnswer,
    BatchError,
    BatchRequest,
    BatchResponse,
    Line,
    read_lines,
    refusal_of,
)
from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError, UnavailableError
from shoal.server.app import Server, create_app
from shoal.server.served.catalog import Catalog
from shoal.server.served.model import served_model
from shoal.weights.source import resolve

# SHOAL_API_KEY of the environment would make this server refuse requests without it, so a batch has its own
# key.
KEY = "batch"
NO_LIMIT = 1 << 60
# Lines of the user's own file are not refused for their size or for a full queue: `answer` bounds the queue.
LIMITS: dict[str, Any] = {
    "max_body_bytes": NO_LIMIT,
    "max_total_body_bytes": NO_LIMIT,
    "max_queued_requests": NO_LIMIT,
    "log_requests": "off",
    "api_key": [KEY],
}
AHEAD = 2  # lines in flight per sequence of the engine: further prompts are tokenized meanwhile


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0  # as /v1/responses calls them
    output_tokens: int = 0


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _Refused(msgspec.Struct):
    error: dict[str, Any] = {}


@dataclass
class Progress:
    """Counts of a run."""

    total: int
    done: int = 0
    refused: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    started: float = field(default_factory=time.perf_counter)

    def count(self, answer: BatchAnswer) -> None:
        self.done += 1
        self.refused += answer.error is not None
        if answer.response is not None and answer.error is None:
            usage = msgspec.json.decode(answer.response.body, type=_Counted).usage or _Usage()
            self.tokens_in += usage.prompt_tokens + usage.input_tokens
            self.tokens_out += usage.completion_tokens + usage.output_tokens

    @property
    def speed(self) -> str:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return f"{self.tokens_in / seconds:,.0f} tokens/s in, {self.tokens_out / seconds:,.0f} tokens/s out"


def run_batch(input_file: str, output_file: str, options: dict[str, Any], config: ServerConfig) -> int:
    """Answers what the output does not have yet; returns the exit code. Raises ShoalError.

    options: EngineConfig's.
    """
    source, target = Path(input_file), Path(output_file)
    if source.exists() and target.exists() and source.samefile(target):
        raise ConfigError(f"output_file must be another file than input_file, got {output_file!r} for both")
    keys = [line.key for line in read_lines(source)]
    with AnswerFile(target) as answers:
        known = set(keys)
        if strangers := [key for key in answers.places if isinstance(key, str) and key not in known]:
            raise ConfigError(
                f"output_file {output_file!r} has an answer for {strangers[0]!r:.80}, which is not in "
                f"{input_file!r}; name a new file"
            )
        num_before = len(known & answers.places.keys())
        if num_before:
            _say(f"{num_before:,} of {len(keys):,} lines are answered in {target} already")
        if num_before < len(keys):
            progress = Progress(len(keys) - num_before)
            try:
                asyncio.run(_run(source, answers, options, config, progress))
            except KeyboardInterrupt:
                done = len(known & answers.places.keys())
                _say(f"interrupted after {done:,} of {len(keys):,} lines; the same command continues")
                raise
            _say(
                f"{progress.done:,} lines, {progress.refused:,} of them with an error, in "
                f"{time.perf_counter() - progress.started:.1f} s: {progress.speed}"
            )
        answers.put_in_order(keys)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


async def _run(
    source: Path, answers: AnswerFile, options: dict[str, Any], config: ServerConfig, progress: Progress
) -> None:
    engine = EngineConfig.from_options(**options)
    files = resolve(engine.model, engine.revision, engine.download_dir, overrides=engine.hf_overrides)
    files = files.overridden(engine.hf_overrides).check()
    planned = ModelToServe(config.served_model_name or [engine.model], engine, files)
    llm, tokenizer = await start_engine(planned, config, None)
    try:
        model = served_model(card_of(planned, llm.info, tokenizer, config), llm, tokenizer, config)
        server = create_app(Catalog([model]), config)
        progress.started = time.perf_counter()
        await answer(server, read_lines(source), answers, progress, AHEAD * llm.info.max_num_seqs)
    except asyncio.CancelledError:
        await llm.close(flush=False)
        raise
    finally:
        await llm.close()


async def answer(
    server: Server, lines: Iterable[Line], answers: AnswerFile, progress: Progress, most: int
) -> None:
    """Answers the lines without an answer, `most` of them at a time. Raises UnavailableError if the engine
    has ended; `answers` then keeps the answers so far."""
    room = asyncio.Semaphore(most)

    async def settle(line: Line) -> None:
        try:
            found = refusal_of(line) if line.request is None else await _answer_of(server, line.request)
            answers.add(found)
            progress.count(found)
            advance()
        finally:
            room.release()

    with _bar(progress) as advance:
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    if line.key not in answers.places:
                        await room.acquire()
                        group.create_task(settle(line))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def _answer_of(server: Server, request: BatchRequest) -> BatchAnswer:
    status, headers, body = await _post(server, request.url, bytes(request.body))
    if status == 503:
        error = msgspec.json.decode(body, type=_Refused).error
        raise UnavailableError(
            f"the engine cannot answer any more: {error.get('message')}; the same command continues"
        )
    response = BatchResponse(status, headers[b"x-request-id"].decode(), msgspec.Raw(body))
    if status == 200:
        return BatchAnswer(custom_id=request.custom_id, response=response)
    error = msgspec.json.decode(body, type=_Refused).error
    code = error.get("code") or error.get("type")
    return BatchAnswer(
        custom_id=request.custom_id, response=response, error=BatchError(str(code), str(error.get("message")))
    )


async def _post(server: Server, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Sends a request to a server of this process; returns status, headers and body of its answer."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer " + KEY.encode()), (b"user-agent", b"shoal run-batch")],
    }
    status, headers, parts = 0, dict[bytes, bytes](), list[bytes]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await server(scope, receive, send)
    return status, headers, b"".join(parts)


@contextlib.contextmanager
def _bar(progress: Progress) -> Generator[Any]:
    """Yields a function to call after each answer. A terminal shows a bar."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=progress.total, speed="")
        yield lambda: bar.update(task, completed=progress.done, speed=progress.speed)
