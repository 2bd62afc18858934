"""Commands of a chat: settings, files, long texts; and a model in this process."""

import contextlib
import io
import json
import signal
import sys
import types

import pytest

from shoal.cli.chat import COMMANDS, LEAVE, Chat
from shoal.cli.keyboard import PASTED, Keyboard
from shoal.cli.speakers import ContextFullError, LocalSpeaker, Piece
from shoal.errors import CheckpointError, RequestError


class Scripted:
    """Answers with the pieces, or the errors, that it is given. It counts characters."""

    name, place = "scripted", "here"

    def __init__(self, *answers, context_len=None, max_tokens=None, defaults=None):
        self.answers, self.context_len, self.max_tokens = list(answers), context_len, max_tokens
        self.asked = []
        self._defaults = defaults or {}

    def defaults(self):
        return self._defaults

    def models(self):
        return ["scripted", "other"]

    def use(self, name):
        if name not in self.models():
            raise RequestError(f"model {name!r} not found")
        self.name = name

    def count(self, messages):
        return sum(len(message["content"]) for message in messages)

    def answer(self, messages, settings):
        self.asked.append([message["content"] for message in messages])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield from answer


def saying(text, reason="stop"):
    return [Piece(text), Piece("", "", 1, reason)]


FULL = ContextFullError("the context is full")


def chat(*answers, **speaker):
    return Chat(Scripted(*answers, **speaker), Keyboard(False), None, {})


# Turns


def test_old_turns_are_dropped_only_for_a_message_that_fits_without_them(capsys):
    talk = chat(saying("1"), saying("2"), FULL, FULL, FULL, FULL, saying("3"))
    for text in ("one", "two", "much"):
        talk.say(text)
    assert [m["content"] for m in talk.turns] == ["one", "1", "two", "2"]
    said = capsys.readouterr().err
    assert "dropped" not in said and "the context is full" in said
    talk.say("three")
    assert [m["content"] for m in talk.turns] == ["two", "2", "three", "3"]
    assert talk.speaker.asked[-2:] == [["one", "1", "two", "2", "three"], ["two", "2", "three"]]
    assert "the oldest turn was dropped" in capsys.readouterr().err


def test_what_was_dropped_for_an_answer_without_text_comes_back(capsys):
    talk = chat(saying("1"), FULL, saying(""))
    talk.say("one")
    talk.say("two")
    assert [m["content"] for m in talk.turns] == ["one", "1"] and "dropped" not in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_broken_off_is_said_to_be_and_counts_as_a_failure(reason, capsys):
    talk = chat(saying("Once upon", reason))
    talk.say("a story")
    assert f"broken off here: {reason}" in capsys.readouterr().err and talk.num_failures == 1
    assert talk.turns[-1]["content"] == "Once upon"


def test_a_context_is_never_fuller_than_full(capsys):
    talk = chat(saying("y" * 50, "length"), context_len=40)
    talk.say("x")
    talk.command("/show")
    said = capsys.readouterr().err
    assert "the context is full" in said and "40 of 40 tokens, 2 messages" in said


def test_bytes_that_are_no_text_are_told_and_not_sent(capsys):
    talk = chat()
    talk.say("caf\udce9")
    talk.command("/system caf\udce9")
    assert capsys.readouterr().err.count("not UTF-8") == 2
    assert talk.num_failures == 1 and talk.system is None and not talk.turns


# Settings


@pytest.mark.parametrize("max_tokens", [None, 1024])
def test_min_tokens_is_compared_with_the_max_tokens_that_is_in_force(max_tokens, capsys):
    talk = chat(max_tokens=max_tokens)
    talk.command("/set min_tokens 20")
    talk.command("/set max_tokens 10")
    assert "min_tokens 20 > max_tokens 10" in capsys.readouterr().err
    talk.command("/set max_tokens 200")
    talk.command("/set min_tokens 150")
    assert talk.settings == {"min_tokens": 150, "max_tokens": 200}
    talk.command("/set min_tokens 300")
    assert "min_tokens 300 > max_tokens 200" in capsys.readouterr().err
    assert talk.settings == {"min_tokens": 150, "max_tokens": 200}


def test_a_default_that_other_settings_exclude_is_refused(capsys):
    talk = chat(max_tokens=1024)
    talk.command("/set max_tokens 3000")
    talk.command("/set min_tokens 2000")
    talk.command("/set max_tokens default")
    assert "min_tokens 2000 > max_tokens 1024" in capsys.readouterr().err
    assert talk.settings == {"min_tokens": 2000, "max_tokens": 3000}


def test_a_setting_that_is_like_none_has_no_neighbour(capsys):
    chat().command("/set stop x")
    said = capsys.readouterr().err
    assert "did you mean" not in said and "temperature" in said


def test_the_defaults_of_settings_are_shown(capsys):
    """Regression: /show and /set said `default`, and not which value that is."""
    talk = chat(defaults={"temperature": 0.2, "seed": None, "top_p": 0.9})
    talk.command("/set top_p 0.5")
    talk.command("/set temperature")
    talk.command("/show")
    said = capsys.readouterr().err
    assert "temperature: 0.2 (default) (" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line}
    assert "0.2 (default)" in rows["temperature"] and "none (default)" in rows["seed"]
    assert "default" not in rows["top_p"] and "0.5" in rows["top_p"] and "default" in rows["min_p"]


def test_set_takes_ollamas_words(capsys):
    talk = chat()
    talk.command("/set parameter temperature 0.5")
    talk.command("/set system Be brief.")
    assert talk.settings == {"temperature": 0.5} and talk.system == "Be brief."


# The last message


def contents(talk):
    return [message["content"] for message in talk.turns]


@pytest.mark.parametrize("command", ["/regenerate", "/regen"])
def test_regenerate_answers_the_last_message_again(command):
    talk = chat(saying("1"), saying("2"), saying("3"))
    talk.say("one")
    talk.say("two")
    talk.command(command)
    assert contents(talk) == ["one", "1", "two", "3"] and talk.speaker.asked[-1] == ["one", "1", "two"]


@pytest.mark.parametrize("answer", [RequestError("no"), saying("")])
@pytest.mark.parametrize("command", ["/regenerate", "/edit more"])
def test_an_earlier_answer_stays_if_no_other_comes(command, answer, capsys):
    talk = chat(saying("1"), answer)
    talk.say("one")
    talk.command(command)
    assert contents(talk) == ["one", "1"]


def test_a_loaded_message_without_an_answer_can_be_answered(tmp_path):
    talk = loaded(tmp_path, {"messages": [HI]})
    talk.speaker.answers = [saying("hello")]
    talk.command("/regenerate")
    assert contents(talk) == ["hi", "hello"]


def test_undo_removes_the_last_message_and_its_answer(capsys):
    talk = chat(saying("1"), saying("2"))
    talk.say("one")
    talk.say("two\nlines")
    talk.command("/undo")
    assert contents(talk) == ["one", "1"] and "removed, with its answer: two ..." in capsys.readouterr().err
    talk.command("/undo")
    talk.command("/undo")
    assert contents(talk) == [] and "there is no message to undo yet" in capsys.readouterr().err


def test_edit_changes_the_last_message_and_answers_that(capsys):
    talk = chat(saying("1"), saying("2"))
    talk.command("/edit x")
    assert "no message to edit yet" in capsys.readouterr().err
    talk.say("one")
    talk.command("/edit")
    assert "needs the new text" in capsys.readouterr().err
    talk.command("/edit /two")
    assert contents(talk) == ["/two", "2"] and talk.speaker.asked == [["one"], ["/two"]]


# The model


def test_the_models_are_listed_and_another_continues_the_conversation(capsys):
    talk = chat(saying("1"), saying("2"))
    talk.say("one")
    talk.command("/model")
    assert "* scripted\n  other\n" in capsys.readouterr().err
    talk.command("/model other")
    assert "other here" in capsys.readouterr().err
    talk.say("two")
    assert talk.speaker.asked[-1] == ["one", "1", "two"]
    talk.command("/model third")
    assert "'third' not found" in capsys.readouterr().err and talk.speaker.name == "other"


def test_help_lists_every_command(capsys):
    chat().command("/help")
    said = capsys.readouterr().err
    assert all(f"/{name}" in said for name in (*COMMANDS, *LEAVE))


# Files


def loaded(tmp_path, body):
    """A chat after /load of this body."""
    (tmp_path / "talk.json").write_text(body if isinstance(body, str) else json.dumps(body))
    talk = chat()
    talk.command(f"/load {tmp_path / 'talk.json'}")
    return talk


HI = {"role": "user", "content": "hi"}


def test_an_ordinary_body_is_read_as_a_server_reads_it(tmp_path, capsys):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk = loaded(
        tmp_path,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": parts, "name": None},
                {"role": "assistant", "content": "three"},
            ],
            "max_tokens": None,
            "min_tokens": 100,
            "stream": True,
            "stop": ["x"],
        },
    )
    assert talk.system == "Be kind." and [m["content"] for m in talk.turns] == ["one\ntwo", "three"]
    assert talk.settings == {"min_tokens": 100}
    assert capsys.readouterr().err.endswith("talk.json; left out: stop\n")
    talk.command(f"/save {tmp_path / 'talk.json'}")
    assert "exists; choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "messages, hint",
    [
        (
            [HI, {"role": "assistant", "content": None, "tool_calls": [{}]}],
            "messages[1].content must be text, got None",
        ),
        ([HI, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1] has 'tool_calls'"),
        ([HI, {"role": "tool", "content": "x"}], "messages[1] has the role 'tool'"),
        ([{"role": "system", "content": "a"}] * 2, "messages[1] has the role 'system'"),
        ([HI, {"role": "user", "content": "\ud800"}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content must be text, got None"),
        (["hi"], "messages[0] must be an object with role and content, got 'hi'"),
        (7, "not an object with a list `messages`"),
    ],
)
def test_a_body_that_a_chat_cannot_keep_is_refused_and_nothing_changes(messages, hint, tmp_path, capsys):
    talk = loaded(tmp_path, {"messages": messages})
    said = capsys.readouterr().err
    assert hint in said and "messages read" not in said and not talk.turns


@pytest.mark.parametrize(
    "body, why",
    [
        ("[]", "not an object with a list `messages`"),
        ("{}", "not an object with a list `messages`"),
        ("hello", "not JSON: line 1, column 1: Expecting value"),
        ("{", "not JSON: line 1, column 2"),
        ("[" * 100_000, "JSON that is nested too deeply"),
    ],
    ids=lambda text: text[:5],
)
def test_a_file_that_is_no_body_is_refused(body, why, tmp_path, capsys):
    loaded(tmp_path, body)
    said = capsys.readouterr().err
    assert (
        f"must be a body for /v1/chat/completions ({why}" in said and "give a file that /save wrote" in said
    )


@pytest.mark.parametrize(
    "command, said",
    [
        ("/save {}/none/talk.json", "cannot write {0}/none/talk.json: the folder {0}/none does not exist"),
        ("/save {}", "cannot write {}: it is a folder; name a file"),
        ("/save", "/save needs the name of a file"),
        (
            "/load {}/none",
            "cannot read {0}/none: no such file or directory; /model {0}/none changes the model",
        ),
        ("/load {}/none/talk.json", "the folder {}/none does not exist"),
        ("/load {}", "cannot read {}: it is a folder; name a file"),
        ("/load {}/bytes", "not text in UTF-8"),
        ("/load ~nobody-of-that-name/talk", "there is no such home folder"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_words(command, said, tmp_path, capsys):
    """Regression: `[Errno 2] No such file or directory` and the name of an exception's type were shown."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    chat().command(command.format(tmp_path))
    assert said.format(tmp_path) in capsys.readouterr().err


# What is typed


@pytest.mark.parametrize(
    "lines, message",
    [
        ([PASTED + '"""Returns x."""'], '"""Returns x."""'),
        ([PASTED + '"""Returns x.\n\nNever y.'], '"""Returns x.\n\nNever y.'),
        ([PASTED + "/etc/hosts\n/etc/passwd"], " /etc/hosts\n/etc/passwd"),
        (["What is " + PASTED + "/etc/hosts"], "What is /etc/hosts"),
        (["/system " + PASTED + "Be kind."], "/system Be kind."),
        (['"""' + PASTED + "/help", 'is a command"""'], " /help\nis a command"),
        (["/help"], "/help"),
    ],
)
def test_what_is_pasted_or_fenced_is_text_and_never_a_command(lines, message, monkeypatch):
    """Regression: a paste that began with / was taken for a command, one that began with a fence lost it."""
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0))
    keyboard = Keyboard(False)
    keyboard.is_terminal = True
    assert keyboard.read() == message and not lines


@pytest.mark.parametrize("lines", [['"""one', "two"], ["one\\", "two\\"]])
def test_a_text_that_ctrl_d_leaves_unfinished_is_dropped_and_one_of_a_pipe_is_sent(
    lines, monkeypatch, capsys
):
    typed = iter(lines)

    def press(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", press)
    keyboard = Keyboard(False)
    keyboard.is_terminal = True
    assert keyboard.read() == "" and "dropped" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert Keyboard(False).read().strip() == "one\ntwo"


# A model in this process


@pytest.fixture
def local(folder):
    """A model with a context of 256 bytes, and 16 per step."""
    from shoal import LLM

    with LLM(folder, max_model_len=256, max_num_seqs=1, max_num_batched_tokens=16) as llm:
        yield LocalSpeaker(llm)


def test_ctrl_c_stops_a_long_prompt_at_the_next_step(local, monkeypatch):
    llm, steps = local._llm, []
    step = llm._step

    def interrupted_step():
        steps.append(len(steps))
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        step()

    monkeypatch.setattr(llm, "_step", interrupted_step)
    question = [{"role": "user", "content": "x" * 200}]
    with pytest.raises(KeyboardInterrupt):
        list(local.answer(question, {"max_tokens": 4}))
    assert len(steps) == 2
    assert list(local.answer(question, {"max_tokens": 4}))[-1].finish_reason
    assert llm.stats().num_running == 0


def test_a_python_with_libedit_has_tab_and_history_and_no_paste_mode(monkeypatch, tmp_path, capsys):
    bound = []

    class Libedit(types.ModuleType):
        def __getattr__(self, name):
            return {"parse_and_bind": bound.append, "get_current_history_length": lambda: 0}.get(
                name, lambda *_: None
            )

    monkeypatch.setitem(sys.modules, "readline", Libedit("readline", "Python's readline, by libedit"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    keyboard = Keyboard(True)
    assert bound == ["bind ^I rl_complete"] and keyboard.can_edit and capsys.readouterr().err == ""


def test_another_model_in_this_process_takes_the_place_of_the_first(folder, tmp_path):
    from shoal import LLM

    options = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    (other := tmp_path / "other").symlink_to(folder)
    built = []

    def build(name):
        built.append(name)
        if len(built) == 2:
            raise KeyboardInterrupt
        return LLM(name, **options)

    speaker = LocalSpeaker(LLM(folder, **options), build)
    with contextlib.closing(speaker):
        assert str(folder) in speaker.models()
        with pytest.raises(CheckpointError):
            speaker.use(str(tmp_path / "none"))
        assert built == []  # the first one was not given up for a name that is wrong
        speaker.use(str(other))
        assert speaker.name == str(other)
        with pytest.raises(KeyboardInterrupt):
            speaker.use(str(folder))
        assert speaker.name == str(other) and built == [str(other), str(folder), str(other)]
        assert list(speaker.answer([{"role": "user", "content": "a"}], {"max_tokens": 1}))
        assert speaker.defaults()["max_tokens"] == 1024


def test_a_local_model_wants_room_for_an_answer_while_there_are_turns_to_drop(local):
    old = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    taken = local.count([{"role": "user", "content": ""}])  # by the template

    def reason(length, before, **settings):
        message = {"role": "user", "content": "x" * (length - taken)}
        return list(local.answer([*before, message], settings))[-1].finish_reason

    assert reason(200, old, max_tokens=1)
    with pytest.raises(ContextFullError):
        reason(200, old)
    assert reason(255, [])
    with pytest.raises(ContextFullError, match=r"has 256 tokens.*the context has 256; shorten it"):
        reason(256, [])
