"""Messages between processes decode to equal objects."""

import pytest

from shoal.api import FinishReason, Logprob, Output, Request
from shoal.config import EngineConfig
from shoal.control import Sleep, UpdateWeights
from shoal.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    RequestError,
    ShoalError,
    UnavailableError,
)
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.wire import (
    Abort,
    Add,
    Call,
    Dead,
    Failure,
    FlushKv,
    ModelInfo,
    Outputs,
    Ready,
    Refused,
    Reply,
    Start,
    dead,
    decode_from_core,
    decode_to_core,
    encode,
    refusal,
)

PARAMS = SamplingParams(
    temperature=0.5,
    seed=2**64 - 1,
    stop=["a", "b"],
    logit_bias={3: -100.0},
    allowed_token_ids=[1],
    logprobs=-1,
    max_tokens=None,
    structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": {}}),
)
REQUEST = Request(
    "r-ü",
    [1, 2, 3],
    PARAMS,
    priority=-1,
    arrival=1.5,
    cache_salt="s",
    embed=True,
    eos_token_ids=(2, 7),
    bad_word_ids=((1,), (2, 3)),
)
INFO = ModelInfo("m", 1, 2, 3, 4, (5,), {"top_p": 0.9}, 6, 42, 7, 8, "cpu", "float32")


@pytest.mark.parametrize(
    "message",
    [
        Start(EngineConfig(max_model_len=9, cudagraph_capture_sizes=[1, 2])),
        Add(REQUEST),
        Abort(["a", "b"]),
        Call(3, Sleep(1, ["weights"], "keep")),
        Call(4, FlushKv()),
    ],
    ids=lambda m: type(m).__name__,
)
def test_messages_to_the_core(message):
    assert decode_to_core(encode(message)) == message


def test_an_error_travels_whose_file_has_a_name_that_is_no_text():
    dead = Dead(Failure.of(OSError("no such file: /models/\udcff")))
    assert decode_from_core(encode(dead)) == dead and "/models/\\udcff" in dead.error.message


@pytest.mark.parametrize(
    "message",
    [
        Ready(INFO),
        Dead(Failure("ConfigError", "no")),
        Refused("r", Failure("RequestError", "no")),
        Reply(1, {"a": 1}),
        Reply(2, None),
        Outputs(
            [
                Output("a", [1]),
                Output(
                    "b",
                    [2, 3],
                    [{2: Logprob(-0.5, 1)}, {3: Logprob(float("-inf"), 2)}],
                    [None, {1: Logprob(-1.0)}],
                    FinishReason.STOP,
                    "x",
                    4,
                ),
                Output("c", [], embedding=[0.5], error="e"),
            ]
        ),
    ],
    ids=lambda m: type(m).__name__,
)
def test_messages_from_the_core(message):
    assert decode_from_core(encode(message)) == message


@pytest.mark.parametrize(
    "kind", [ConfigError, RequestError, CheckpointError, UnavailableError, EngineDeadError, ShoalError]
)
def test_errors_keep_their_kind_and_words(kind):
    error = kind("so and so")
    built = Failure.of(error).build()
    assert type(built) is type(error) and str(built) == str(error)


def test_a_user_error_keeps_its_field():
    built = Failure.of(RequestError("messages[0] must be an object", field="messages[0]")).build()
    assert isinstance(built, RequestError) and built.field == "messages[0]"
    assert Failure.of(UnavailableError("asleep")).field is None


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), MemoryError()])
def test_errors_of_others_keep_their_name(error):
    built = Failure.of(error).build()
    assert type(built) is ShoalError and type(error).__name__ in str(built)


def test_the_engines_end_is_one_line_with_the_rest_as_a_note():
    error = dead(Failure("EngineDeadError", "rank 1 died\nTraceback: ..."))
    assert str(error) == "rank 1 died" and error.__notes__ == ["Traceback: ..."]


def test_a_request_that_cannot_be_read_is_refused_by_its_name():
    data = encode(Add(Request("r", [1], SamplingParams(), priority="high")))
    with pytest.raises(ValueError) as error:
        decode_to_core(data)
    answer = refusal(data, error.value)
    assert answer.request_id == "r" and isinstance(answer.error.build(), RequestError)


@pytest.mark.parametrize("command", [UpdateWeights(5), {"verb": "dance"}, {}], ids=str)
def test_a_command_that_cannot_be_read_is_answered_with_an_error(command):
    data = encode(Call(3, command))
    with pytest.raises(ValueError) as error:
        decode_to_core(data)
    answer = refusal(data, error.value)
    assert answer.call_id == 3 and isinstance(answer.error.build(), ConfigError)


def test_nobody_waits_for_an_answer_to_an_abort():
    assert refusal(encode(Abort([])), ValueError("no")) is None
