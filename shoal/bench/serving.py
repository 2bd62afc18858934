"""`shoal bench serve` measures throughput and latency of any OpenAI-compatible server under Poisson load. Its
flags, table and JSON are vLLM's.

The server's `usage` says how many tokens a request has. TTFT is the time until the first text, ITL the gaps
between chunks of text, and TPOT is (end - first text) / (tokens - 1). A failed request is counted and its
error is shown, but no other figure includes it.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, UnavailableError
from shoal.options.fields import check_fields, option

if TYPE_CHECKING:
    import aiohttp

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SHOWN_ERRORS = 5
MAX_LINE_BYTES = 1 << 24  # most bytes of a line of a stream


@dataclass(frozen=True, slots=True)
class ServeBench:
    """The flags of the command. Raises ConfigError for an impossible value."""

    base_url: str = option("http://127.0.0.1:8000", "address of the server", common=True)
    endpoint: str = option("completions", "endpoint to measure", common=True, choices=tuple(PATHS))
    model: str | None = option(
        None, "name of the model; default: the first one that the server lists", common=True
    )
    api_key: str | None = option(None, "bearer token; default: OPENAI_API_KEY", common=True)
    dataset_name: str = option("random", "source of prompts", common=True, choices=("random", "sharegpt"))
    dataset_path: str | None = option(
        None, "file for sharegpt: a JSON list of {'conversations': [{'value': text}, ...]}"
    )
    num_prompts: int = option(1000, "requests", common=True, low=1)
    num_warmups: int = option(0, "requests before the measurement, all at once, which are not counted", low=0)
    request_rate: float = option(math.inf, "mean requests per second; inf: all at once", common=True)
    burstiness: float = option(
        1.0,
        "evenness of arrivals; 1: a Poisson process; below 1 burstier, above more even (gamma-distributed "
        "gaps)",
        above=0,
    )
    max_concurrency: int | None = option(
        None,
        "most requests in flight; others wait in the client, which does not count as latency",
        common=True,
        low=1,
    )
    random_input_len: int = option(1024, "tokens of a prompt (words, with chat)", common=True, low=1)
    random_output_len: int = option(128, "tokens of an answer", common=True, low=1)
    random_range_ratio: float = option(0.0, "fraction by which lengths vary, up and down")
    random_prefix_len: int = option(
        0, "tokens of a common prefix of all prompts, in addition to their own", low=0
    )
    sharegpt_output_len: int | None = option(
        None, "tokens of an answer; default: a quarter of the characters of the file's answer", low=1
    )
    vocab_size: int = option(
        10_000, "upper bound of random token ids; every common vocabulary is larger than the default", low=2
    )
    ignore_eos: bool = option(False, "request answers of full length")
    temperature: float | None = option(None, "temperature; default: the server's")
    seed: int = option(0, "seed of prompts, lengths and arrivals")
    timeout: float = option(6 * 3600.0, "most seconds of a request", above=0)
    metric_percentiles: str = option("99", "percentiles to show, comma-separated")

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate must be > 0, got {self.request_rate}; raise it")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio must be in [0, 1), got {self.random_range_ratio}; lengths vary by this "
                "fraction up and down"
            )
        try:
            known = all(0 <= p <= 100 for p in self.percentiles)
        except ValueError:
            known = False
        if not known:
            raise ConfigError(
                f"metric_percentiles must be numbers from 0 to 100, got {self.metric_percentiles!r}; give a "
                "list such as 50,90,99"
            )
        if (self.dataset_name == "sharegpt") != (self.dataset_path is not None):
            raise ConfigError("dataset_name sharegpt and dataset_path belong together; give both or neither")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://, got {self.base_url!r}")

    @property
    def percentiles(self) -> list[float]:
        return [float(p) for p in self.metric_percentiles.split(",")]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the prompt, as token ids or text, and the most tokens of the answer."""

    prompt: str | list[int]
    output_len: int


@dataclass(slots=True)
class Answer:
    """The result of one request. Times are seconds since it was sent. `sent` is in seconds since the start of
    the benchmark."""

    sent: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Returns the seconds per token after the first. The answer must have at least two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def make_requests(bench: ServeBench) -> list[Ask]:
    """Returns the requests, the same for the same options. Raises ConfigError for an unusable file."""
    random = Random(bench.seed)
    if bench.dataset_name == "sharegpt":
        return _from_file(bench, random)

    def length(mean: int) -> int:
        shortest = math.floor(mean * (1 - bench.random_range_ratio))
        longest = math.ceil(mean * (1 + bench.random_range_ratio))
        return max(1, random.randint(shortest, longest))

    def ids(count: int) -> list[int]:
        return [random.randrange(bench.vocab_size) for _ in range(count)]

    prefix = ids(bench.random_prefix_len)
    asks = []
    for _ in range(bench.num_prompts):
        tokens = prefix + ids(length(bench.random_input_len))
        prompt: str | list[int] = tokens
        if bench.endpoint == "chat":  # A chat message is text, so each id stands for a word.
            prompt = " ".join(WORDS[token % len(WORDS)] for token in tokens)
        asks.append(Ask(prompt, length(bench.random_output_len)))
    return asks


# After a space, each of these words is one token in every common vocabulary. The result counts the tokens
# that the server reports.
_WORDS = (
    "time year way day man life world school state group hand part place week water room "
    "money story month book word house power line city name team idea body face door air"
)
WORDS = _WORDS.split()


def _from_file(bench: ServeBench, random: Random) -> list[Ask]:
    try:
        entries = json.loads(Path(bench.dataset_path or "").read_text("utf-8-sig"))
        turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"dataset_path must be a JSON list of {{'conversations': [{{'value': text}}, ...]}}, got "
            f"{bench.dataset_path!r}: "
            f"{type(error).__name__}: {error}"
        ) from None
    asks = [
        Ask(turn[0], bench.sharegpt_output_len or max(1, len(turn[1]) // 4))
        for turn in turns
        if len(turn) == 2 and turn[0]
    ]
    if not asks:
        raise ConfigError(
            f"dataset_path must have conversations of two turns, got {bench.dataset_path!r} without any"
        )
    random.shuffle(asks)
    return [asks[i % len(asks)] for i in range(bench.num_prompts)]


def arrival_times(bench: ServeBench) -> list[float]:
    """Returns the time at which each request is sent, in seconds from the start. Gaps are gamma-distributed
    with mean 1 / request_rate."""
    if math.isinf(bench.request_rate):
        return [0.0] * bench.num_prompts
    random, now, times = Random(bench.seed + 1), 0.0, []
    for _ in range(bench.num_prompts):
        times.append(now)
        now += random.gammavariate(bench.burstiness, 1 / (bench.request_rate * bench.burstiness))
    return times


def command(bench: ServeBench, result_file: str | None, plot_file: str | None) -> dict[str, Any]:
    """Runs the command: measures, prints the table, and writes the requested files."""
    import asyncio
    import os

    from tqdm import tqdm

    if bench.api_key is None and (key := os.environ.get("OPENAI_API_KEY")):
        bench = replace(bench, api_key=key)
    if plot_file is not None:
        import_figure()  # Fails before the measurement, which may take an hour.
    with tqdm(total=bench.num_prompts, disable=None) as bar:
        result = asyncio.run(run(bench, lambda answer: bar.update()))
    print(table(result, bench.percentiles))
    if result_file is not None:
        Path(result_file).write_text(json.dumps(result))
    if plot_file is not None:
        plot(result, plot_file)
    return result


async def run(
    bench: ServeBench, progress: Callable[[Answer], object] = lambda answer: None
) -> dict[str, Any]:
    """Sends all requests and returns the figures (see `summarize`). Ctrl-C ends the measurement: finished
    requests count, running ones are aborted. Raises UnavailableError if the server cannot be reached."""
    # Imported here, because every command imports this file for its flags.
    import asyncio

    import aiohttp

    asks, arrivals = make_requests(bench), arrival_times(bench)
    headers = {"Authorization": f"Bearer {bench.api_key}"} if bench.api_key else {}
    free = asyncio.Semaphore(bench.max_concurrency or len(asks))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(
        bench.base_url.rstrip("/"),
        connector=connector,
        headers=headers,
        read_bufsize=MAX_LINE_BYTES,
        timeout=aiohttp.ClientTimeout(total=bench.timeout),
    ) as session:
        model = bench.model or await _first_model(session, bench.base_url)
        warmups: list[Ask] = []
        if bench.num_warmups:
            warmups = make_requests(replace(bench, num_prompts=bench.num_warmups, seed=bench.seed - 1))
        await asyncio.gather(*(_ask(session, bench, model, ask, 0.0) for ask in warmups))
        start = time.perf_counter()

        async def one(ask: Ask, at: float) -> Answer:
            await asyncio.sleep(start + at - time.perf_counter())
            async with free:
                answer = await _ask(session, bench, model, ask, start)
            progress(answer)
            return answer

        tasks = [asyncio.create_task(one(ask, at)) for ask, at in zip(asks, arrivals, strict=True)]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: [task.cancel() for task in tasks])
        await asyncio.wait(tasks)
        loop.remove_signal_handler(signal.SIGINT)
        duration = time.perf_counter() - start
        answers = [task.result() for task in tasks if not task.cancelled()]
    return summarize(bench, model, answers, duration)


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Returns the first model that the server lists. Raises UnavailableError without a model."""
    import aiohttp

    try:
        async with session.get("/v1/models") as response:
            text = await response.text()
            if response.status != 200:
                raise UnavailableError(
                    f"{url}/v1/models answered {response.status}: {text[:300]}; name the model, or give its "
                    "key"
                )
            return json.loads(text)["data"][0]["id"]
    except (aiohttp.ClientConnectionError, OSError) as error:
        raise UnavailableError(
            f"no server answers at {url} ({error}); is it up? `shoal serve` starts one"
        ) from None
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise UnavailableError(
            f"{url}/v1/models must list a model, and does not ({type(error).__name__}: {error}); name it "
            "with --model"
        ) from None


async def _ask(
    session: aiohttp.ClientSession, bench: ServeBench, model: str, ask: Ask, start: float
) -> Answer:
    """Sends one request and reads its answer. An error of the server or of the connection is not raised, but
    becomes the answer's `error`."""
    import aiohttp

    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if bench.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = ask.prompt
    if bench.temperature is not None:
        body["temperature"] = bench.temperature
    if bench.ignore_eos:
        body["ignore_eos"] = True
    sent = time.perf_counter()
    answer = Answer(sent=sent - start)
    try:
        async with session.post(PATHS[bench.endpoint], json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read(response.content, answer, sent)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(stream: aiohttp.StreamReader, answer: Answer, sent: float) -> None:
    """Reads a stream of server-sent events until [DONE], into the answer. `sent` is when the request was
    sent."""
    usage: dict[str, Any] | None = None
    last = sent
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        now = time.perf_counter()
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = f"in the stream: {chunk['error']}"[:300]
            return
        usage = chunk.get("usage") or usage
        if not any(_has_text(choice) for choice in chunk.get("choices") or ()):
            continue
        if not answer.ttft:
            answer.ttft = now - sent
        else:
            answer.itls.append(now - last)
        last = now
        answer.latency = now - sent
    else:
        answer.error = "the stream ended without [DONE]"
        return
    if usage is None:
        answer.error = (
            "no usage in the stream, so its tokens cannot be counted; the server must honour "
            "stream_options.include_usage"
        )
    elif not answer.ttft:
        answer.error = f"an answer of {usage.get('completion_tokens')} tokens without text"
    else:
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile, interpolated between the two nearest values, as numpy does. Without values it is
    0."""
    if not values:
        return 0.0
    ordered, at = sorted(values), (len(values) - 1) * percent / 100
    low = math.floor(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def summarize(bench: ServeBench, model: str, answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """Returns the figures under the names of vLLM's result file. Latencies are in milliseconds. The lists at
    the end have an entry for each request, in seconds."""
    good = [a for a in answers if a.error is None]
    total_input, total_output = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": bench.endpoint,
        "base_url": bench.base_url,
        "model_id": model,
        "dataset_name": bench.dataset_name,
        "num_prompts": bench.num_prompts,
        "request_rate": bench.request_rate if math.isfinite(bench.request_rate) else "inf",
        "burstiness": bench.burstiness,
        "max_concurrency": bench.max_concurrency,
        "seed": bench.seed,
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_concurrent_requests": _peak(answers),
    }
    series = {
        "ttft": [a.ttft for a in good],
        "tpot": [a.tpot for a in good if a.output_tokens > 1],
        "itl": [gap for a in good for gap in a.itls],
        "e2el": [a.latency for a in good],
    }
    for name, values in series.items():
        mean = math.fsum(values) / max(1, len(values))
        result[f"mean_{name}_ms"] = mean * 1e3
        result[f"median_{name}_ms"] = percentile(values, 50) * 1e3
        result[f"std_{name}_ms"] = (
            math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(1, len(values))) * 1e3
        )
        for p in bench.percentiles:
            result[f"p{p:g}_{name}_ms"] = percentile(values, p) * 1e3
    return result | {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.output_tokens for a in answers],
        "start_times": [a.sent for a in answers],
        "ttfts": [a.ttft for a in answers],
        "itls": [a.itls for a in answers],
        "errors": [a.error or "" for a in answers],
    }


def _peak(answers: Iterable[Answer]) -> int:
    """Returns the most requests in flight at one moment."""
    changes = sorted(change for a in answers for change in ((a.sent, 1), (a.sent + a.latency, -1)))
    now = peak = 0
    for _, step in changes:
        now += step
        peak = max(peak, now)
    return peak


def table(result: dict[str, Any], percentiles: Sequence[float]) -> str:
    """Returns the figures as vLLM prints them, then the errors with their counts."""
    rows = [f"{' Serving Benchmark Result ':=^50}"]

    def row(label: str, value: float | int) -> None:
        rows.append(f"{label + ':':<40} {f'{value:.2f}' if isinstance(value, float) else value:<10}".rstrip())

    row("Successful requests", result["completed"])
    row("Failed requests", result["failed"])
    if result["max_concurrency"] is not None:
        row("Maximum request concurrency", result["max_concurrency"])
    if result["request_rate"] != "inf":
        row("Request rate configured (RPS)", float(result["request_rate"]))
    row("Benchmark duration (s)", result["duration"])
    row("Total input tokens", result["total_input_tokens"])
    row("Total generated tokens", result["total_output_tokens"])
    row("Request throughput (req/s)", result["request_throughput"])
    row("Output token throughput (tok/s)", result["output_throughput"])
    row("Peak concurrent requests", result["max_concurrent_requests"])
    row("Total token throughput (tok/s)", result["total_token_throughput"])
    for name, title in LATENCIES.items() if result["completed"] else ():
        rows.append(f"{title:-^50}")
        for statistic in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            row(f"{statistic.title()} {name.upper()} (ms)", result[f"{statistic}_{name}_ms"])
    rows.append("=" * 50)
    errors = Counter(filter(None, result["errors"])).most_common()
    rows += [f"{count} x {error}" for error, count in errors[:SHOWN_ERRORS]]
    if len(errors) > SHOWN_ERRORS:
        rows.append(
            f"and {sum(count for _, count in errors[SHOWN_ERRORS:])} others (--save-result keeps them all)"
        )
    return "\n".join(rows)


def import_figure() -> Any:
    """Returns matplotlib's class Figure. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib; pip install 'shoal[bench]'") from None
    return Figure


def save_picture(figure: Any, path: str) -> None:
    """Writes a PNG file, whatever the suffix of its name is."""
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


def plot(result: dict[str, Any], path: str) -> None:
    """Writes a PNG with the distributions of TTFT, ITL and TPOT, and with tokens per second over time. Raises
    ConfigError without matplotlib."""
    figure = import_figure()(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2)
    done = [i for i, error in enumerate(result["errors"]) if not error]
    spans = {i: sum(result["itls"][i]) for i in done}
    tpots = [spans[i] / (result["output_lens"][i] - 1) for i in done if result["output_lens"][i] > 1]
    series = {
        "Time to first token": [result["ttfts"][i] for i in done],
        "Time per output token": tpots,
        "Inter-token latency": [gap for i in done for gap in result["itls"][i]],
    }
    for axis, (title, values) in zip(axes.flat, series.items(), strict=False):
        ordered = sorted(1e3 * v for v in values)
        axis.plot(
            ordered,
            [100 * (i + 1) / len(ordered) for i in range(len(ordered))],
            color="#0b6b74",
            drawstyle="steps-post",
        )
        axis.set(title=title, xlabel="ms", ylabel="% of values at most this", ylim=(0, 101))
    # A chunk has one token or more. Each chunk counts with its answer's mean, so that the area is the token
    # count.
    width, tokens = max(result["duration"] / 60, 1e-9), Counter[int]()
    for i in done:
        at = result["start_times"][i] + result["ttfts"][i]
        each = result["output_lens"][i] / (len(result["itls"][i]) + 1)
        tokens[int(at / width)] += each  # type: ignore[assignment]
        for gap in result["itls"][i]:
            at += gap
            tokens[int(at / width)] += each  # type: ignore[assignment]
    axes[1][1].bar(
        [b * width for b in tokens],
        [n / width for n in tokens.values()],
        width,
        align="edge",
        color="#0b6b74",
    )
    axes[1][1].set(title="Output tokens a second", xlabel="s")
    rate = result["request_rate"] if result["request_rate"] == "inf" else f"{result['request_rate']:g}/s"
    figure.suptitle(
        f"{result['model_id']}: {result['completed']} requests at {rate}, {result['failed']} failed, "
        f"{result['output_throughput']:.0f} output tokens/s"
    )
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)
