"""Requests that no proper client sends, made from a random generator: raw HTTP and JSON bodies."""

from __future__ import annotations

import json
import random

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}},
}
# For each route that takes a body one that is right.
BODIES = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
        "tools": [{"type": "function", "function": TOOL}],
        "stream": False,
        "seed": 1,
        "n": 2,
    },
    "/v1/chat/completions/batch": {
        "messages": [MESSAGES, MESSAGES],
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["x"],
        "logprobs": True,
    },
    "/v1/completions": {
        "prompt": "Hi",
        "max_tokens": 3,
        "logprobs": 1,
        "stop_token_ids": [3],
        "allowed_token_ids": [72, 105],
        "structured_outputs": {"choice": ["a", "b"]},
        "priority": 1,
        "cache_salt": "s",
        "request_id": "r",
    },
    "/v1/responses/input_tokens": {"input": "Hi", "instructions": "Be brief."},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}],
        "max_output_tokens": 3,
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 3,
        "system": "s",
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
    },
    "/v1/messages/count_tokens": {"messages": MESSAGES, "system": [{"type": "text", "text": "s"}]},
    "/v1/embeddings": {"input": ["Hi", "you"], "encoding_format": "base64", "dimensions": 4},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [72, 105]},
    "/inference/v1/generate": {
        "token_ids": [72, 105],
        "sampling_params": {"max_tokens": 2, "logprobs": 1},
        "version": 1,
    },
    "/api/chat": {
        "messages": MESSAGES,
        "stream": False,
        "format": "json",
        "options": {"num_predict": 2, "stop": ["x"]},
        "tools": [{"type": "function", "function": TOOL}],
        "keep_alive": "5m",
    },
    "/api/generate": {
        "prompt": "Hi",
        "system": "s",
        "options": {"num_predict": 2, "temperature": 0.5},
        "context": [72],
    },
    "/api/embed": {"input": ["Hi", "you"], "dimensions": 4, "truncate": True},
    "/api/embeddings": {"prompt": "Hi", "options": {"num_ctx": 9}},
    "/api/show": {"model": "tiny", "verbose": True},
    "/update_weights": {"path": "/there/is/none"},
}
ADMIN_PATHS = {"/update_weights"}

# JSON

VALUES = [
    "null",
    "true",
    "0",
    "-1",
    "-0",
    "1.5",
    "1e308",
    "1e400",
    "-1e-400",
    "9" * 400,
    "2147483648",
    "-9223372036854775809",
    "1E5",
    "18446744073709551616",
    "NaN",
    "Infinity",
    "-Infinity",
    "01",
    "+1",
    ".5",
    "1.",
    "0x10",
    '""',
    '"x"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\ud83d"',
    '"\\ud83d\\ude00"',
    '"\\uFFFF"',
    '"\x7f"',
    '"\t"',
    '"\x00"',
    '"\\x"',
    '"' + "é" * 3000 + '"',
    "[]",
    "{}",
    "[[]]",
    "[{}]",
    '{"":""}',
    "[null]",
    '["x",1]',
    "[" * 900 + "]" * 900,
    '{"a":' * 900 + "1" + "}" * 900,
    "[" * 200_000,
    "[" + "0," * 20_000 + "0]",
    '["' + '","' * 5000 + '"]',
    "'x'",
    "undefined",
    "",
]
LEADS = [
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\x00",
    b" \r\n\t",
    b"//\n",
    b"\x1f\x8b\x08",
    b"null,",
    b"[",
    b"--x\r\n",
]
BYTES = [
    b"\x00",
    b"\xff",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b'"',
    b"\\",
    b"{",
    b"}",
    b",",
    b"\n",
    b"\xf4\x90\x80\x80",
]


def spoilt_json(rng: random.Random, body: dict) -> bytes:
    """`body` as JSON with one to three mistakes in it, some of them none."""
    mark = f"<{rng.getrandbits(40):x}>"
    found = json.loads(json.dumps(body))
    path = _random_place(rng, found)
    value = rng.choice(VALUES)
    if rng.random() < 0.7 and path is not None:
        holder, key = path
        holder[key] = mark
    text = json.dumps(found, ensure_ascii=rng.random() < 0.5)
    data = text.replace(f'"{mark}"', value).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:  # a name twice, the second time with another value
        name = rng.choice(list(body))
        data = data[:-1] + f',"{name}":{rng.choice(VALUES)}'.encode() + b"}"
    if rng.random() < 0.1:
        data = rng.choice(LEADS) + data
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))]
    if rng.random() < 0.15:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(BYTES) + data[at + rng.randrange(3) :]
    if rng.random() < 0.05:
        data += rng.choice([b"x", data, b"\x00", b" " * 5000, b"]"])
    return data


def _random_place(rng: random.Random, value: dict | list) -> tuple | None:
    """(object or list, key in it) of something in `value`."""
    place = None
    while value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        place = (value, key)
        if not isinstance(value[key], dict | list) or rng.random() < 0.3:
            break
        value = value[key]
    return place


# HTTP

GOOD_BODY = b'{"prompt":"a","max_tokens":2}'
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
METHODS = [
    b"GET",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"DELETE",
    b"PATCH",
    b"TRACE",
    b"CONNECT",
    b"PRI",
    b"SOURCE",
    b"M-SEARCH",
    b"get",
    b"GETGETGET",
    b"",
    b"G\x00T",
    b"\xffET",
    b"POST\t",
    b"A" * 5000,
]
TARGETS = [
    b"/version",
    b"/v1/completions",
    b"/",
    b"*",
    b"",
    b"//",
    b"/../../etc/passwd",
    b"/%00",
    b"/%2e%2e/",
    b"/\xff\xfe",
    b"/a b",
    b"/#x",
    b"/?",
    b"/?a=%zz",
    b"http://other.example/version",
    b"http://other.example:99999/",
    b"other.example:443",
    b"version",
    b"/\x00",
    b"/v1/models/%ff",
    b"/v1/models/" + b"a" * 3000,
    b"/" + b"a/" * 2000,
    b"/version;x",
    b"/VERSION",
    b"/version/",
    b"\\version",
    b"http://[::1/version",
    b"/sleep?level=1",
    b"/metrics?x=" + b"%41" * 1000,
]
VERSIONS = [
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"HTTP/11",
    b"HTTP/1.",
    b"http/1.1",
    b"HTTPS/1.1",
    b"",
    b"HTTP/1.1 ",
    b"HTTP/1.1\x00",
    b"ICE/1.0",
    b"RTSP/1.0",
]
ENDS = [b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r", b"\x00\r\n", b" \r\n", b""]
HEADERS = [
    b"Host: x",
    b"Host:",
    b"Host: x\r\nHost: y",
    b": x",
    b"x",
    b"X : y",
    b" X: y",
    b"X: y\r\n folded",
    b"X:\x00",
    b"X\x00: y",
    b"X: \xff\xfe",
    b"\xff: x",
    b"X: " + b"y" * 20_000,
    b"Connection: keep-alive, close",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ",
    b"Upgrade: x",
    b"Expect: 100-continue",
    b"Expect: x",
    b"Cookie: " + b"a=b; " * 300,
    b"X-Request-Id: \x7f\x01",
    b"X-Request-Id: " + b"r" * 300,
    b"Origin: null",
    b"Origin: \xe9",
    b"Authorization: Bearer \xff",
    b"Authorization: \x80",
    b"Accept: " + b"*" * 100,
    b"Range: bytes=0-" + b"9" * 30,
    b"X: a\rb",
    b"X: a\nb",
    b"\r: x",
    b"Content-Type: text/\x00",
    b"Trailer: Content-Length",
    b"Keep-Alive: timeout=-1",
    b"Content-Encoding: gzip",
    b"Access-Control-Request-Method: \xff\r\nOrigin: http://a",
]
LENGTHS = [
    b"%d" % len(GOOD_BODY),
    b"0",
    b"-1",
    b"+%d" % len(GOOD_BODY),
    b"1e1",
    b"0x1d",
    b"29 ",
    b"2 9",
    b"29,29",
    b"29, 30",
    b"9" * 30,
    b"18446744073709551616",
    b"4294967325",
    b"",
    b"x",
    b"\xb2\xb9",
    b"029",
    b"28",
    b"30",
    b"100000",
]
CODINGS = [
    b"chunked",
    b"Chunked",
    b"chunked, chunked",
    b"identity",
    b"gzip, chunked",
    b"chunked, gzip",
    b"xchunked",
    b"chunked\x0b",
    b"",
    b",chunked",
    b'"chunked"',
    b"chunked;q=1",
    b"cow",
]
SIZES = [
    b"%x",
    b"0%x",
    b"0x%x",
    b"%x ",
    b" %x",
    b"+%x",
    b"-%x",
    b"%x;a=b",
    b"%x;" + b"e" * 500,
    b"%x\x00",
    b"f" * 17 + b"%x",
    b"%xg",
    b"%x\t;a",
]
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD_BODY), GOOD_BODY)


def request_for(target: bytes) -> bytes:
    """A request that is right but perhaps for its target."""
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % target
    return head + b"Content-Length: %d\r\n\r\n" % len(GOOD_BODY) + GOOD_BODY


def raw_request(rng: random.Random) -> bytes:
    """One request, wrong in one to three ways, and perhaps another behind it."""
    method, target, version, end = b"POST", b"/v1/completions", b"HTTP/1.1", b"\r\n"
    framing, body = [b"Content-Length: %d" % len(GOOD_BODY)], GOOD_BODY
    headers = [b"Host: x", b"Content-Type: application/json"]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(9)
        if kind == 0:
            method = rng.choice(METHODS)
        elif kind == 1:
            target = rng.choice(TARGETS)
        elif kind == 2:
            version = rng.choice(VERSIONS)
        elif kind == 3:
            headers.insert(rng.randrange(len(headers) + 1), rng.choice(HEADERS))
        elif kind == 4:
            framing = [b"Content-Length: " + rng.choice(LENGTHS) for _ in range(rng.choice((1, 1, 2)))]
        elif kind == 5:
            framing, body = [b"Transfer-Encoding: " + rng.choice(CODINGS)], WHOLE
            if rng.random() < 0.4:
                framing.insert(rng.randrange(2), b"Content-Length: " + rng.choice(LENGTHS))
        elif kind == 6:
            framing, body = [b"Transfer-Encoding: chunked"], _chunks(rng)
        elif kind == 7:
            end = rng.choice(ENDS)
        else:
            headers = [rng.choice(HEADERS) for _ in range(rng.randrange(6))]
    lines = [b" ".join((method, target, version)), *headers, *framing]
    rest = [b"\r\n"] * len(lines)
    rest[rng.randrange(len(rest))] = end  # one line end is another, if any is
    data = (
        b"".join(line + its_end for line, its_end in zip(lines, rest))
        + rng.choice((b"\r\n", b"\r\n", b"\r\n", end))
        + body
    )
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if rng.random() < 0.1:
        data = data[: rng.randrange(1, len(data))]
    if rng.random() < 0.1:
        data = bytes(rng.getrandbits(8) for _ in range(rng.randrange(1, 300))) + (
            data if rng.random() < 0.5 else b""
        )
    return data


def _chunks(rng: random.Random) -> bytes:
    """Chunked framing with something wrong in it."""
    parts, left = [], GOOD_BODY
    while left:
        part, left = left[: rng.randrange(1, 12)], left[len(left[:12]) :] if rng.random() < 0.5 else b""
        size = rng.choice(SIZES) if rng.random() < 0.5 else b"%x"
        parts.append(
            size % len(part)
            + rng.choice((b"\r\n", b"\r\n", b"\n"))
            + part
            + rng.choice((b"\r\n", b"\r\n", b"\n", b"", b"xx"))
        )
    last = rng.choice(
        (
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\nX: y\r\n\r\n",
            b"0\r\nContent-Length: 5\r\n\r\n",
            b"0\n\n",
            b"000\r\n\r\n",
            b"",
            b"-0\r\n\r\n",
        )
    )
    return b"".join(parts) + last


# Two programs could read each of these in two ways, and so one lets pass what the other then obeys: none may
# be taken.
SECOND = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
START = b"POST /ping HTTP/1.1\r\nHost: x\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n"
SMUGGLING = {
    "length and chunks": START
    + b"Content-Length: %d\r\n" % (5 + len(SECOND))
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": START + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SECOND),
    "a list of lengths": START + b"Content-Length: 0, %d\r\n\r\n" % len(SECOND),
    "chunked is not the last coding": START + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "another coding": START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": START + b"Content-Length : %d\r\n\r\n" % len(SECOND),
    "a bare CR in a field": START + b"X: a\rContent-Length: %d\r\n\r\n" % len(SECOND),
    "a bare LF behind a field": START + b"X: a\nContent-Length: %d\r\n\r\n" % len(SECOND),
    "NUL in a name": START + b"Content-Length\x00: %d\r\n\r\n" % len(SECOND),
    "a signed length": START + b"Content-Length: +0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"\r\n10000000000000000\r\n",
    "a chunk that is longer than it says": CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n",
    "a chunk size behind 0x": CHUNKED + b"\r\n0x0\r\n\r\n",
    "folded": START + b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
}
