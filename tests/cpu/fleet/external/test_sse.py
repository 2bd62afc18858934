"""Server-sent events, however the bytes come in."""

import random
import time

import pytest

from shoal.errors import WorkerFailedError
from shoal.fleet.external import sse
from shoal.fleet.external.sse import SseReader


def events_of(stream: bytes, rng: random.Random) -> list[bytes]:
    reader, found, at = SseReader(), [], 0
    while at < len(stream):
        size = rng.choice((1, 2, 3, 10, 100, 5000))
        found += reader.feed(stream[at : at + size])
        at += size
    return found


@pytest.mark.parametrize("seed", range(20))
def test_events_are_the_same_for_any_boundaries_of_pieces(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    sent, stream = [], b""
    for _ in range(50):
        end = rng.choice((b"\n", b"\r\n"))
        lines = [
            bytes(rng.choices(b"abc {}:\xe9\xb1\xbc", k=rng.randrange(60)))
            for _ in range(rng.choice((1, 1, 1, 3)))
        ]
        if rng.random() < 0.3:
            stream += b": a comment" + end
        if rng.random() < 0.3:
            stream += b"event: message" + end
        for line in lines:
            # One space behind the colon is not of the data.
            colon = b"data:" if rng.random() < 0.3 and not line.startswith(b" ") else b"data: "
            stream += colon + line + end
        stream += end
        sent.append(b"\n".join(lines))
    assert events_of(stream, rng) == sent


def test_what_has_no_end_is_no_event():
    reader = SseReader()
    assert reader.feed(b"data: one\n\ndata: two\n") == [b"one"]
    assert reader.feed(b"\n") == [b"two"]


def test_a_line_of_megabytes_passes_in_time_that_grows_with_its_length():
    line = b"data: " + b"7," * (8 << 20)
    reader, seconds = SseReader(), time.process_time()
    for at in range(0, len(line), 1 << 12):
        assert reader.feed(line[at : at + (1 << 12)]) == []
    assert reader.feed(b"\n\n") == [line[6:]]
    assert time.process_time() - seconds < 20, "each piece has copied all before it"


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    reader = SseReader()
    with pytest.raises(WorkerFailedError, match="1000 bytes"):
        for _ in range(20):
            reader.feed(b"data: " + b"x" * 80 + b"\n")


def test_an_event_of_empty_lines_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    reader = SseReader()
    with pytest.raises(WorkerFailedError, match="1000 bytes"):
        for _ in range(2000):
            reader.feed(b"data:\n")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_end_in_three_ways_and_a_byte_order_mark_may_come_first(end, mark):
    stream = mark + end.join(
        [b"data: a", b"", b": comment", b"data: b", b"data: c", b"", b"data: d", b"", b""]
    )
    for size in (1, 2, 3, len(stream)):
        reader = SseReader()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [data for piece in pieces for data in reader.feed(piece)] == [b"a", b"b\nc", b"d"]
