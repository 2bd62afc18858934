"""Control's commands: equal as messages, as methods, and in the engines that run them."""

import asyncio
import inspect
import threading
import typing
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import create_autospec

import msgspec
import pytest
import zmq

from shoal.control import (
    COMMANDS,
    AnyCommand,
    CheckWeights,
    Control,
    MemoryUsage,
    ReadSleepState,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
    name_of,
    result_type,
)
from shoal.engine.core import EngineCore
from shoal.engine.process.core_main import CoreLoop, Outbox
from shoal.errors import ConfigError, RequestError
from shoal.fake_engine import FakeEngine
from shoal.server.operator.admin import ADMIN_ROUTES, command_of
from shoal.stats import MemoryReport, SleepState
from shoal.wire import (
    Beat,
    Call,
    CheckIntegrity,
    FlushKv,
    ReadStats,
    decode_from_core,
    decode_to_core,
    encode,
)

EXAMPLES = (
    Sleep(2, ["kv_cache"], "keep"),
    WakeUp(["weights"]),
    ReadSleepState(),
    ResetPrefixCache(),
    UpdateWeights("/models/other"),
    CheckWeights(),
    MemoryUsage(),
    StartProfile("/traces"),
    StopProfile(),
)
each_command = pytest.mark.parametrize("command", EXAMPLES, ids=name_of)


def arguments(command):
    return [getattr(command, name) for name in command.__struct_fields__]


class Recorder(Control):
    def __init__(self):
        self.seen = []

    async def control(self, command):
        self.seen.append(command)
        return "the answer"


def test_every_verb_is_tried_here():
    assert {type(command) for command in EXAMPLES} == set(COMMANDS)


def test_each_verb_has_a_method_of_its_name_with_its_arguments_defaults_and_result():
    methods = {name: method for name, method in vars(Control).items() if inspect.iscoroutinefunction(method)}
    assert methods.keys() - {"control"} == {name_of(kind) for kind in COMMANDS}
    for command in EXAMPLES:
        method, kind = methods[name_of(command)], type(command)
        parameters = list(inspect.signature(method).parameters.values())[1:]
        defaults = [parameter.default for parameter in parameters if parameter.default is not inspect._empty]
        assert tuple(parameter.name for parameter in parameters) == kind.__struct_fields__
        assert tuple(defaults) == kind.__struct_defaults__
        hints = typing.get_type_hints(method)
        result = hints.pop("return")
        assert hints == {field.name: field.type for field in msgspec.structs.fields(kind)}
        assert result_type(command) == (type(None) if result is None else result)


@each_command
def test_a_method_makes_its_command_and_returns_the_answer(command):
    recorder = Recorder()
    answer = asyncio.run(getattr(recorder, name_of(command))(*arguments(command)))
    assert recorder.seen == [command] and answer in ("the answer", None)


@each_command
def test_a_command_crosses_a_process_and_a_network(command):
    assert decode_to_core(encode(Call(1, command))) == Call(1, command)
    assert msgspec.json.decode(msgspec.json.encode(command), type=AnyCommand) == command


@each_command
def test_an_answer_crosses_a_network(command):
    async def ask():
        engine = FakeEngine(300)
        await engine.start_profile("/before")
        return await engine.control(command)

    answer = asyncio.run(ask())
    crossed = msgspec.convert(msgspec.json.decode(msgspec.json.encode(answer)), result_type(command))
    assert crossed == answer and type(crossed) is type(answer)


def carried_out(command):
    """(the core, the reply)"""
    core, outbox = create_autospec(EngineCore, instance=True), SimpleQueue()
    core.error = None
    core.update_weights.return_value = core  # It goes on with the new weights itself.
    core.weights = SimpleNamespace(version=3)
    CoreLoop(core, SimpleQueue(), outbox)._handle(Call(7, command))
    return core, outbox.get_nowait()


@each_command
def test_the_core_carries_a_command_out_by_its_own_method(command):
    core, reply = carried_out(command)
    method = getattr(core, name_of(command))
    method.assert_called_once_with(*arguments(command))
    result = 3 if isinstance(command, UpdateWeights) else method.return_value
    assert (reply.call_id, reply.result, reply.error) == (7, result, None)


@pytest.mark.parametrize("command", [ReadStats(), FlushKv(), CheckIntegrity()], ids=name_of)
def test_the_core_carries_out_what_its_parent_alone_asks(command):
    core, reply = carried_out(command)
    getattr(core, name_of(command)).assert_called_once_with()
    assert (reply.call_id, reply.error) == (7, None)


@pytest.mark.parametrize(
    "asked", [{"level": 9}, {"level": True}, {"tags": ["disk"]}, {"mode": "nap"}], ids=str
)
def test_an_impossible_sleep_is_refused_before_it_is_sent(asked):
    recorder = Recorder()
    with pytest.raises(ConfigError, match=next(iter(asked))):
        asyncio.run(recorder.sleep(**asked))
    with pytest.raises(ValueError):
        msgspec.json.decode(msgspec.json.encode({"verb": "sleep", **asked}), type=AnyCommand)
    assert recorder.seen == []


def test_the_admin_port_offers_each_command_that_names_a_route():
    offered = {(route.method, route.path) for route in ADMIN_ROUTES}
    named = {(kind.route.method, kind.route.path) for kind in COMMANDS if kind.route is not None}
    assert len(named) >= 6 and named <= offered and len(offered) == len(ADMIN_ROUTES)


def test_a_query_becomes_a_command():
    query = {"level": ["2"], "tags": ["weights", "kv_cache"], "mode": ["keep"]}
    assert command_of(Sleep, query) == Sleep(2, ["weights", "kv_cache"], "keep")
    assert command_of(WakeUp, {"model": ["of another"]}) == WakeUp()
    for kind, wrong, param in (
        (Sleep, {"level": ["two"]}, "level"),
        (Sleep, {"mode": ["wait", "keep"]}, "mode"),
        (StartProfile, {}, "folder"),
    ):
        with pytest.raises(RequestError, match=param) as error:
            command_of(kind, wrong)
        assert error.value.field == param


def test_json_may_leave_out_what_has_a_default():
    assert msgspec.json.decode(b'{"verb": "sleep", "level": 2}', type=AnyCommand) == Sleep(2, None, "abort")
    assert result_type(Sleep()) is MemoryReport and result_type(ReadSleepState()) is SleepState


def test_messages_of_all_threads_reach_the_parent_in_each_ones_order(tmp_path):
    with zmq.Context() as context, context.socket(zmq.PULL) as parent:
        parent.bind(f"ipc://{tmp_path}/out")
        outbox = Outbox(str(tmp_path))

        def send(name):
            for i in range(50):
                outbox.put(Beat(i, name, 0.0))

        threads = [threading.Thread(target=send, args=(f"thread {i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        came = {}
        for _ in range(4 * 50):
            assert parent.poll(30_000)
            beat = decode_from_core(parent.recv())
            came.setdefault(beat.doing, []).append(beat.progress)
        for thread in threads:
            thread.join()
        outbox.close()
    assert came == {f"thread {i}": list(range(50)) for i in range(4)}
