"""The fleet key in both registries: processes with it meet each other, and others can neither send nor receive."""

import asyncio
import subprocess

import pytest

from shoal.errors import ConfigError
from shoal.fleet.key import FleetKey
from shoal.fleet.registry.open import check_plane, open_registry
from shoal.fleet.registry.registry import Member
from tests import nats_server
from tests.asynchronous import within
from tests.process.registry_messages import Note
from tests.serving import free_port

PATIENCE_S = 60
asynchronous = within(PATIENCE_S)
LEASE_S = 2.5
KEY, OTHER_KEY = FleetKey(b"k" * 32), FleetKey(b"x" * 32)


@pytest.fixture(params=["tcp", "ipc", "nats"])
def url(request, tmp_path):
    if request.param == "ipc":
        yield f"ipc://{tmp_path}/plane"
    elif request.param == "tcp":
        yield f"tcp://127.0.0.1:{free_port()}"
    else:
        port = free_port()
        command = [nats_server.find(), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(tmp_path)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        yield f"nats://127.0.0.1:{port}"
        server.kill()
        server.wait()


def open_with(url, key, may_host=False):
    return open_registry(url, lease_s=LEASE_S, key=key, may_host=may_host)


def member(name):
    return Member(id=name, role="both", address="http://127.0.0.1:1")


async def until(registry, *ids):
    async for members in registry.watch():
        if set(members) == set(ids):
            return


@asynchronous
async def test_a_process_with_the_key_can_use_the_whole_registry(url):
    first, second = open_with(url, KEY, may_host=True), open_with(url, KEY)
    await second.register(member("w"))
    await until(first, "w")
    notes = await first.subscribe("notes", Note)
    await second.publish("notes", Note(1))
    assert (await anext(notes)).n == 1

    async def square(note):
        return Note(note.n * note.n)

    async with second.serving("w", Note, square):
        assert (await first.request("w", Note(3), Note)).n == 9
    await second.close()
    await until(first)
    await first.close()


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["none", "another"])
@asynchronous
async def test_a_process_with_another_key_or_without_one_changes_nothing(url, key):
    registry, stranger = open_with(url, KEY, may_host=True), open_with(url, key)
    await registry.register(member("w"))
    notes = await registry.subscribe("notes", Note)
    attempts = [
        asyncio.create_task(stranger.register(member("impostor"))),
        asyncio.create_task(stranger.publish("notes", Note(666))),
    ]
    await asyncio.sleep(LEASE_S / 2)
    await registry.publish("notes", Note(1))
    assert (await anext(notes)).n == 1, "a stranger's note is not among them"
    assert set(registry.members) == {"w"} and "w" not in stranger.members
    for task in attempts:
        task.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)
    for one in (stranger, registry):
        await one.close()


def test_a_seal_is_valid_for_its_subject_alone():
    sealed = KEY.seal("a", b"payload")
    assert KEY.unseal("a", sealed) == b"payload"
    assert KEY.unseal("b", sealed) is None and OTHER_KEY.unseal("a", sealed) is None
    assert KEY.unseal("a", sealed[:-1] + b"!") is None and KEY.unseal("a", b"") is None


@pytest.mark.parametrize(
    "url",
    ["nats://10.0.0.1:4222", "nats://127.0.0.1:4222,nats://nats.example:4222", "tls://nats.example:4222"],
)
def test_nats_beyond_this_machine_needs_a_key(url):
    with pytest.raises(ConfigError, match="--fleet-key-file"):
        check_plane(url, None)
    check_plane(url, KEY)


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with one"])
def test_an_embedded_registry_beyond_this_machine_is_refused_with_the_way_out(key):
    with pytest.raises(ConfigError, match=r"one host.*nats://.*--fleet-key-file"):
        check_plane("tcp://0.0.0.0:5600", key)


def test_an_unusable_key_file_is_named(tmp_path):
    assert FleetKey.read(None) is None
    with pytest.raises(ConfigError, match=r"must be readable.*openssl rand"):
        FleetKey.read(str(tmp_path / "none"))
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ConfigError, match="at least 16 characters, got 3"):
        FleetKey.read(str(tmp_path / "short"))
