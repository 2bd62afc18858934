"""`shoal chat` with servers that are not ours: a small one that says what a test wants."""

import http.server
import json
import threading

import pytest

from shoal.cli.chat import Chat
from shoal.cli.keyboard import Keyboard
from shoal.cli.speakers import ContextFullError, RemoteSpeaker
from shoal.cli.top import Source
from shoal.errors import ConfigError, RequestError, UnavailableError


class Stub(http.server.BaseHTTPRequestHandler):
    """`models` is what /models answers, `whole` what other paths do; `answers` hold chunks to stream, or
    (status, error)."""

    elsewhere = ""
    keys: list = []
    models = {"data": [{"id": "first"}, {"id": "second", "context_length": 4096}]}
    answers: list = []
    whole: dict = {}
    seen: list = []

    def do_GET(self):
        self.keys.append(self.headers["authorization"])
        self.reply(200, json.dumps(self.models))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path in self.whole:
            self.reply(200, json.dumps(self.whole[self.path]))
            return
        self.seen.append(body | {"path": self.path})
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            self.reply(answer[0], json.dumps({"error": answer[1]}))
        else:
            chunks = (chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in answer)
            self.reply(200, "".join(f"data: {chunk}\n\n" for chunk in chunks))

    def reply(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class Elsewhere(Stub):
    """Redirects every request to the server at `Stub.elsewhere`."""

    def do_GET(self):
        self.send_response(307)
        self.send_header("location", f"{Stub.elsewhere}{self.path}")
        self.end_headers()

    do_POST = do_GET


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    Stub.answers, Stub.seen = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def delta(reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


WHOLE = [
    delta(role="assistant", content=""),
    delta(content="Good "),
    delta(content="day"),
    delta("stop"),
    "[DONE]",
]
FULL = (400, {"message": "This model's maximum context length is 100 tokens."})
HELLO = [{"role": "user", "content": "hello"}]


def test_the_model_is_the_first_listed_or_the_one_named(url):
    assert RemoteSpeaker(url, None, None).name == "first"
    named = RemoteSpeaker(url + "/v1/", "second", None)
    assert (named.name, named.context_len, named.place) == ("second", 4096, f"at {url}/v1")
    assert RemoteSpeaker(url, "unlisted", None).context_len is None


@pytest.mark.parametrize(
    "models, words",
    [
        ({"data": []}, "has no model yet: a router has one when a worker is ready; try again"),
        ({"hello": "world"}, "must be a list of models; give the address of an OpenAI-compatible server"),
        ([1, 2], "must be a list of models; give the address of an OpenAI-compatible server"),
    ],
)
def test_a_router_without_workers_is_told_from_another_kind_of_server(url, models, words, monkeypatch):
    """Regression: a router whose workers were starting was asked whether it spoke OpenAI's API."""
    monkeypatch.setattr(Stub, "models", models)
    with pytest.raises(UnavailableError, match=words):
        RemoteSpeaker(url, None, None)


@pytest.mark.parametrize("of", [lambda url, key: RemoteSpeaker(url, "m", key), Source], ids=["chat", "top"])
@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "ftp://x",
        "http://",
        "http://[",
        "http://x:abc",
        "http://x:0",
        "http://x/é",
        "http://x/a b",
    ],
)
def test_what_is_no_address_of_a_server_is_refused(of, address):
    with pytest.raises(ConfigError, match="must be an http or https URL, got"):
        of(address, None)


@pytest.mark.parametrize("of", [lambda url, key: RemoteSpeaker(url, "m", key), Source], ids=["chat", "top"])
@pytest.mark.parametrize("address", ["http://user:sesame@x", "http://user:ses/ame@x", "http://u:sesame@["])
def test_a_password_in_an_address_is_refused_and_not_shown(of, address):
    with pytest.raises(ConfigError, match="--api-key") as refused:
        of(address, None)
    assert "ses" not in str(refused.value)


@pytest.mark.parametrize("of", [lambda url, key: RemoteSpeaker(url, "m", key), Source], ids=["chat", "top"])
@pytest.mark.parametrize("key", ["sesame\n", "s\u00e9same"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(of, key):
    with pytest.raises(ConfigError, match="--api-key") as refused:
        of("http://127.0.0.1:1", key)
    assert "same" not in str(refused.value)


def test_pieces_come_with_the_reason_of_the_end_and_without_usage(url):
    Stub.answers = [WHOLE]
    pieces = list(RemoteSpeaker(url, None, None).answer(HELLO, {"temperature": 0.5}))
    assert "".join(p.text for p in pieces) == "Good day"
    assert pieces[-1].finish_reason == "stop" and pieces[-1].num_tokens is None
    [body] = Stub.seen
    assert body["path"] == "/v1/chat/completions" and body["messages"] == HELLO
    assert body["temperature"] == 0.5 and body["stream"]


@pytest.mark.parametrize(
    "ask", [lambda url: RemoteSpeaker(url, None, "sk"), lambda url: Source(url, "sk").get()]
)
def test_a_key_does_not_go_where_a_server_sends_us(url, ask):
    Stub.elsewhere, Stub.keys = url, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UnavailableError, match=f"redirects to '{url}/.*307"):
            ask(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert not Stub.keys


@pytest.mark.parametrize(
    "answer, kind, hint",
    [
        (FULL, ContextFullError, "100 tokens"),
        ((404, {"message": "no such model"}), RequestError, "no such model"),
        ((401, {"message": "who are you"}), UnavailableError, "--api-key"),
        ((429, "slow down"), UnavailableError, "slow down"),
        ([delta(content="Go")], UnavailableError, "in the middle"),
        ([delta(content="Go"), {"error": {"message": "out of memory"}}], UnavailableError, "out of memory"),
        ([delta(content="Go"), "not JSON"], UnavailableError, "broke off"),
    ],
)
def test_what_goes_wrong_is_told(url, answer, kind, hint):
    Stub.answers = [answer]
    with pytest.raises(kind, match=hint):
        list(RemoteSpeaker(url, None, None).answer(HELLO, {}))


def chat(url):
    return Chat(RemoteSpeaker(url, None, None), Keyboard(is_terminal=False), "Be kind.", {})


def test_turns_are_dropped_until_a_server_that_tells_no_context_takes_the_rest(url, capsys):
    talk = chat(url)
    Stub.answers = [WHOLE, WHOLE, FULL, FULL, WHOLE]
    for text in ("one", "two", "three"):
        talk.say(text)
    assert [m["content"] for m in Stub.seen[-1]["messages"]] == ["Be kind.", "three"]
    assert [m["content"] for m in talk.turns] == ["three", "Good day"]
    assert "the 2 oldest turns were dropped" in capsys.readouterr().err


def test_nothing_is_dropped_or_refused_before_the_server_says_that_its_context_is_full(url, capsys):
    talk = Chat(RemoteSpeaker(url, "second", None), Keyboard(is_terminal=False), "Be kind.", {})
    usage = {"usage": {"prompt_tokens": 4000, "completion_tokens": 2}}  # few characters: only the template
    Stub.answers = [[*WHOLE[:-1], usage, "[DONE]"], WHOLE]
    talk.say("hi")
    talk.command("/show")
    assert "4002 of 4096 tokens, 2 messages" in capsys.readouterr().err
    talk.say("much " * 1000)
    assert [m["role"] for m in Stub.seen[-1]["messages"]] == ["system", "user", "assistant", "user"]
    talk.command("/show")
    said = capsys.readouterr().err
    assert "dropped" not in said and "? of 4096 tokens, 4 messages" in said


def test_a_message_that_never_fits_costs_no_turns(url, capsys):
    talk = chat(url)
    Stub.answers = [WHOLE, WHOLE, FULL, FULL, FULL]
    for text in ("one", "two", "much"):
        talk.say(text)
    assert [m["content"] for m in talk.turns] == ["one", "Good day", "two", "Good day"]
    said = capsys.readouterr().err
    assert "dropped" not in said and "100 tokens" in said


def test_a_message_that_does_not_fit_alone_is_taken_back(url, capsys):
    talk = chat(url)
    Stub.answers = [FULL]
    talk.say("much")
    assert talk.turns == [] and talk.num_failures == 1 and "maximum context length" in capsys.readouterr().err


def test_what_was_said_before_the_connection_broke_stays(url, capsys):
    talk = chat(url)
    Stub.answers = [[delta(content="Good ")]]
    talk.say("hello")
    assert talk.turns[-1] == {"role": "assistant", "content": "Good "}
    assert "in the middle" in capsys.readouterr().err


def test_thoughts_are_shown_aside_and_not_kept(url, capsys):
    talk = chat(url)
    Stub.answers = [[delta(reasoning_content="Let me see."), delta(content="Yes."), delta("stop"), "[DONE]"]]
    talk.say("hello")
    said = capsys.readouterr()
    assert said.out == "Yes.\n" and "Let me see." in said.err and talk.turns[-1]["content"] == "Yes."


def test_a_server_that_speaks_ollamas_api_tells_its_defaults(url, monkeypatch):
    shown = 'temperature 0.7\nnum_predict 128\nstop "x"\nrepeat_penalty 1.1\n'
    monkeypatch.setattr(Stub, "models", {"data": [{"id": "first", "owned_by": "library"}, {"id": "second"}]})
    monkeypatch.setattr(Stub, "whole", {"/api/show": {"parameters": shown}})
    speaker = RemoteSpeaker(url, None, None)
    assert speaker.defaults() == {"temperature": 0.7, "max_tokens": 128, "repetition_penalty": 1.1}
    monkeypatch.setattr(Stub, "whole", {"/api/show": []})
    assert speaker.defaults() == {}
    speaker.use("second")
    assert speaker.defaults() == {} and Stub.seen == []  # a stranger is not asked


def test_another_model_of_the_server_answers_from_then_on(url):
    Stub.answers = [WHOLE]
    speaker = RemoteSpeaker(url, None, None)
    assert speaker.models() == ["first", "second"] and speaker.context_len is None
    with pytest.raises(RequestError, match=r"did you mean second\?"):
        speaker.use("secnd")
    assert speaker.name == "first"
    speaker.use("second")
    assert (speaker.name, speaker.context_len) == ("second", 4096)
    list(speaker.answer(HELLO, {}))
    assert Stub.seen[-1]["model"] == "second"
