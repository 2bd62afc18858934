"""`shoal run-batch` in front of an engine without a model: its files, and what it continues."""

import json
import subprocess
import sys

import pytest

from shoal.cli import batch
from shoal.cli.batch_files import AnswerFile, read_lines
from shoal.config import ServerConfig
from shoal.errors import ConfigError, EngineDeadError, UnavailableError
from shoal.server.app import create_app
from shoal.server.served.catalog import Catalog
from shoal.server.served.model import LoadedModel, ServedModel
from tests.fake_server import END, NAME, byte_tokenizer, engine_saying


class Machine:
    """A stand-in for the engine that `run_batch` starts. `most` lines are in flight at once."""

    def __init__(self):
        self.most, self.num_runs, self.prepare = 4, 0, lambda engine: None
        self.num_seen = []  # requests that the engine got, by run
        self.stops_after = None  # answers, after which Ctrl-C is pressed

    async def run(self, source, answers, options, config, progress):
        engine = engine_saying("I see.")
        engine.ends = True
        self.prepare(engine)
        self.num_runs += 1
        model = ServedModel(
            [NAME],
            engine,
            LoadedModel(
                byte_tokenizer(), max_model_len=256, vocab_size=300, eos_token_ids=(END,), max_num_seqs=256
            ),
            max_queued_requests=config.max_queued_requests,
        )
        add = answers.add

        def counted(answer):
            add(answer)
            if len(answers.places) == self.stops_after:
                raise KeyboardInterrupt

        answers.add = counted
        try:
            server = create_app(Catalog([model]), config)
            await batch.answer(server, read_lines(source), answers, progress, self.most)
        finally:
            self.num_seen.append(len(engine.seen))


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(batch, "_run", machine.run)
    return machine


@pytest.fixture
def run(machine, tmp_path):
    """run(lines) -> the output's lines, after a run over input.jsonl with these lines."""

    def run(lines, *, code=0):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "input.jsonl").write_text("\n".join(texts))
        config = ServerConfig(**batch.LIMITS)
        assert batch.run_batch(f"{tmp_path}/input.jsonl", f"{tmp_path}/output.jsonl", {}, config) == code
        return [json.loads(line) for line in (tmp_path / "output.jsonl").read_text().splitlines()]

    return run


def chat(name, text="hello", **body):
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": NAME, "messages": messages, **body},
    }


def content(answer):
    return answer["response"]["body"]["choices"][0]["message"]["content"]


def test_each_line_is_answered_in_the_inputs_order(run, machine, capsys):
    answers = run([chat(f"{i}", "x" * (1 + 40 * (i % 3)), max_tokens=1 + i) for i in range(20)])
    assert [answer["custom_id"] for answer in answers] == [f"{i}" for i in range(20)]
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    assert content(answers[9]) == "I see." and answers[0]["id"] != answers[1]["id"]
    assert "20 lines, 0 of them with an error" in capsys.readouterr().err


def test_the_other_endpoints_are_the_servers(run):
    answers = run(
        [
            {**chat("a"), "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 3}},
            {**chat("b"), "url": "/v1/responses", "body": {"input": "a"}},
        ]
    )
    assert answers[0]["response"]["body"]["choices"][0]["text"] == "I s"
    assert answers[1]["response"]["body"]["output"][0]["content"][0]["text"] == "I see."


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"custom_id": "b", "method"', "line 2 must be an object with custom_id, method, url and body"),
        ("[]", "line 2 must be an object"),
        ("\udc80".encode("utf-8", "surrogateescape").decode("latin-1"), "line 2 must be an object"),
        (
            {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions"},
            "missing required field `body`",
        ),
        ({**chat("b"), "custom_id": 7}, "Expected `str`, got `int` - at `$.custom_id`"),
        ({**chat("b"), "method": "GET"}, "method must be POST, got 'GET'"),
        ({**chat("b"), "url": "/v1/models"}, "url must be one of /v1/chat/completions, "),
        (chat("a"), "custom_id must be unique, got 'a' in lines 1 and 2"),
        (chat("b", stream=True), "body.stream must be false or absent"),
        (chat("b", model="other"), "'other' does not exist"),
        (chat("b", temperature=-1), "temperature"),
        (chat("b", "x" * 400), "maximum context length"),
        ({**chat("b"), "body": []}, "object"),
    ],
)
def test_an_error_stands_in_its_own_line_and_the_others_are_answered(run, line, message, capsys):
    answers = run([chat("a"), line, chat("c")])
    assert [content(answers[0]), content(answers[2])] == ["I see.", "I see."]
    assert message in answers[1]["error"]["message"] and answers[1]["error"]["code"]
    response = answers[1]["response"]
    assert response["status_code"] >= 400 and message in response["body"]["error"]["message"]
    assert "3 lines, 1 of them with an error" in capsys.readouterr().err


def test_an_interrupted_run_continues_and_runs_nothing_twice(run, machine, capsys):
    lines = [chat(f"{i}", max_tokens=1 + i) for i in range(12)] + ["{"]
    machine.stops_after = 5
    with pytest.raises(KeyboardInterrupt):
        run(lines)
    assert "interrupted after 5 of 13 lines; the same command continues" in capsys.readouterr().err
    machine.stops_after = None
    answers = run(lines)
    assert [answer["custom_id"] for answer in answers] == [*(f"{i}" for i in range(12)), None]
    assert "5 of 13 lines are answered" in capsys.readouterr().err and machine.num_seen[1] == 7
    assert run(lines) == answers and machine.num_runs == 2  # no engine is started for nothing


def test_an_answer_that_was_cut_off_is_run_again(run, machine, tmp_path):
    first = run([chat("a"), chat("b")])
    whole = (tmp_path / "output.jsonl").read_text()
    (tmp_path / "output.jsonl").write_text(whole[:-20])
    again = run([chat("a"), chat("b")])
    assert again[0] == first[0] and content(again[1]) == "I see." and again[1]["id"] != first[1]["id"]
    assert machine.num_seen == [2, 1]


def test_a_line_that_was_mended_is_run_and_its_error_goes(run, machine):
    run([chat("a"), "{"])
    answers = run([chat("a"), chat("b"), chat("c")])
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"] and machine.num_seen == [1, 2]


def test_an_engine_that_dies_ends_the_run_and_leaves_its_lines_to_the_next(run, machine, tmp_path):
    def die(engine):
        async def stats():
            raise EngineDeadError("the engine died")

        def generate(*_, **__):
            raise EngineDeadError("the engine died")

        engine.generate = generate

    run([chat("a")])
    machine.prepare = die
    with pytest.raises(UnavailableError, match="the engine died; the same command continues"):
        run([chat("a"), chat("b"), chat("c")])
    assert len((tmp_path / "output.jsonl").read_text().splitlines()) == 1
    machine.prepare = lambda engine: None
    assert len(run([chat("a"), chat("b"), chat("c")])) == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("hello\n", "must have only answers of a batch, got "),
        ('{"id": "x", "custom_id": "z", "response": null, "error": null}\n', "has an answer for 'z'"),
    ],
)
def test_a_file_of_something_else_is_not_overwritten(run, tmp_path, text, message):
    (tmp_path / "output.jsonl").write_text(text)
    with pytest.raises(ConfigError) as refused:
        run([chat("a")])
    assert message in str(refused.value) and (tmp_path / "output.jsonl").read_text() == text


def test_two_runs_do_not_write_one_file(tmp_path):
    with AnswerFile(tmp_path / "output.jsonl"), pytest.raises(ConfigError, match="written by another run"):
        AnswerFile(tmp_path / "output.jsonl")


@pytest.mark.parametrize(
    "files, message",
    [
        (("none.jsonl", "output.jsonl"), "input_file must be a file that can be read, got 'none.jsonl'"),
        ((".", "output.jsonl"), "is a directory"),
        (("input.jsonl", "none/output.jsonl"), "output_file must be a file that can be written"),
        (("input.jsonl", "input.jsonl"), "another file than input_file"),
    ],
)
def test_files_that_cannot_be_are_told_before_an_engine_is_started(files, message, tmp_path):
    (tmp_path / "input.jsonl").write_text("")
    command = [sys.executable, "-m", "shoal", "run-batch", "-i", files[0], "-o", files[1], "--model", "none"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_empty_input_and_empty_lines_have_no_answers(run, machine):
    assert run([]) == [] and machine.num_runs == 0
    assert [answer["custom_id"] for answer in run(["\ufeff", "", chat("a"), "  "])] == ["a"]


def test_a_key_of_this_machines_servers_does_not_close_the_batch(run, monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEY", "secret")
    assert run([chat("a")])[0]["error"] is None


def test_many_lines_are_under_way_but_no_more_than_the_engine_has_use_for(run, machine):
    most = []

    def watch(engine):
        engine.token_seconds = 0.01
        generate = engine.generate

        def watched(*args, **kwargs):
            most.append(len(engine._running))
            return generate(*args, **kwargs)

        engine.generate = watched

    machine.prepare = watch
    run([chat(f"{i}") for i in range(12)])
    assert 2 <= max(most) <= 4
