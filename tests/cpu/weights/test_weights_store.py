"""Models under a URL of fsspec, copied to this machine. The store is fsspec's own memory, or a web server;
another machine is another cache folder."""

import asyncio
import contextlib
import errno
import functools
import http.server
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import fsspec
import pytest
from aiohttp import ClientResponseError, web
from fsspec.implementations.memory import MemoryFileSystem

from shoal.cli.main import main
from shoal.doctor import fleet_file
from shoal.errors import CheckpointError
from shoal.weights import store
from shoal.weights.source import is_model_file, resolve
from tests.serving import ROOT
from tests.tiny import write_model

URL = "memory://bucket/qwen/little"
CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 50, "tokenizer.json": b"[1]"}


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """An empty store, and an empty cache folder. Ranges are small."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "RANGE_BYTES", 5000)
    monkeypatch.setattr(store, "AGAIN_S", 0.0)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


def put(memory, url=URL, **content):
    for name, data in (content or CONTENT).items():
        memory.pipe_file(f"{url.removeprefix('memory:/')}/{name}", data)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != store.RECEIPT}


def failing(monkeypatch, method, error, after=0):
    """Makes the store's method raise after `after` calls that succeed."""
    real, calls = getattr(MemoryFileSystem, method), []

    def fail(self, *args, **options):
        calls.append(args)
        if len(calls) > after:
            raise error
        return real(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, method, fail)


def test_a_model_is_copied_whole_and_once(memory, monkeypatch, tmp_path):
    put(memory)
    put(memory, **{"README.md": b"words", "consolidated.safetensors": b"the same again"})
    put(memory, f"{URL}/original", **{"model.safetensors": b"in another layout"})
    folder = resolve(URL).folder
    assert contents(folder) == CONTENT
    assert folder.parent == tmp_path / "cache" / "models" and folder.name.startswith("little-")
    failing(monkeypatch, "cat_file", OSError("nothing is to be read"))
    assert resolve(URL).folder == folder
    assert not list(folder.parent.glob("*.part"))


def test_a_gguf_file_is_copied_by_itself(memory):
    put(memory, **{"little.gguf": b"GGUF" + bytes(5000), "other.gguf": b"GGUF"})
    files = resolve(f"{URL}/little.gguf")
    assert files.kind == "gguf" and files.path.name == "little.gguf"
    assert contents(files.folder) == {"little.gguf": b"GGUF" + bytes(5000)}


def test_what_changes_gets_a_folder_of_its_own(memory):
    put(memory)
    first = resolve(URL).folder
    put(memory, **{"tokenizer.json": b"[2]"})
    second = resolve(URL).folder
    assert second != first and contents(first) == CONTENT
    assert contents(second) == CONTENT | {"tokenizer.json": b"[2]"}
    memory.rm_file(f"{URL.removeprefix('memory:/')}/tokenizer.json")
    assert "tokenizer.json" not in contents(resolve(URL).folder)


def test_download_dir_holds_it(memory, tmp_path):
    put(memory)
    assert resolve(URL, None, str(tmp_path / "here")).folder.parent == tmp_path / "here"


def test_a_copy_that_broke_off_goes_on_with_its_whole_files(memory, monkeypatch):
    put(memory)
    with monkeypatch.context() as patch:
        patch.setattr(store, "THREADS", 1)
        failing(patch, "cat_file", ConnectionError("the line is dead\nand more"), after=3)
        with pytest.raises(CheckpointError, match=f"{URL}.*ConnectionError: the line is dead[);]"):
            resolve(URL)
    [part] = store.models_folder(None).glob("*.part")
    assert contents(part)["config.json"] == b"{}" and "model.safetensors" not in contents(part)
    asked = []
    real = MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "cat_file",
        lambda self, path, **part: asked.append(path) or real(self, path, **part),
    )
    assert contents(resolve(URL).folder) == CONTENT
    assert not any(path.endswith("config.json") for path in asked)


def test_a_store_that_is_away_leaves_the_last_copy(memory, monkeypatch, caplog):
    put(memory)
    folder = resolve(URL).folder
    failing(monkeypatch, "ls", ConnectionError("no route"))
    with caplog.at_level(logging.WARNING):
        assert resolve(URL).folder == folder
    assert "no route" in caplog.text and str(folder) in caplog.text
    with pytest.raises(CheckpointError, match="no route"):
        resolve(f"{URL}-other")


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("forbidden")])
def test_a_store_that_refuses_is_no_store_that_is_away(memory, monkeypatch, error):
    put(memory)
    resolve(URL)
    failing(monkeypatch, "ls", error)
    with pytest.raises(CheckpointError, match=str(error)):
        resolve(URL)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), ConnectionError("reset")])
def test_a_new_version_that_cannot_be_copied_is_an_error_and_not_the_old_one(memory, monkeypatch, error):
    put(memory)
    resolve(URL)
    put(memory, **{"model.safetensors": b"new"})
    failing(monkeypatch, "cat_file", error)
    with pytest.raises(CheckpointError, match=str(error.args[-1])):
        resolve(URL)


def test_a_range_that_fails_is_asked_for_again(memory, monkeypatch):
    put(memory)
    real, failed = MemoryFileSystem.cat_file, []

    def stumble(self, path, **part):
        if part.get("start") == 5000 and len(failed) < store.RANGE_TRIES - 1:
            failed.append(path)
            raise ConnectionError("reset")
        return real(self, path, **part)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", stumble)
    assert contents(resolve(URL).folder) == CONTENT and len(failed) == store.RANGE_TRIES - 1


def test_a_server_that_knows_no_ranges_is_asked_once(memory, monkeypatch):
    put(memory)
    real, asked = MemoryFileSystem.cat_file, []
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda self, path, **part: asked.append(path) or real(self, path)
    )
    with pytest.raises(CheckpointError, match="its server knows no ranges"):
        resolve(URL)
    assert len(asked) == 1


def test_a_version_that_is_named_is_taken_from_here_or_from_the_store_and_no_other_is(memory, monkeypatch):
    put(memory)
    first = resolve(URL)
    put(memory, **{"tokenizer.json": b"[2]"})
    second = resolve(URL)
    assert resolve(URL, second.revision) == second != first
    with monkeypatch.context() as patch:
        failing(patch, "ls", ConnectionError("the store is not even asked"))
        assert resolve(URL, first.revision) == first
    shutil.rmtree(first.folder)
    shutil.rmtree(second.folder)
    assert resolve(URL, second.revision) == second
    with pytest.raises(CheckpointError, match=f"version {second.revision} now, and {first.revision} is not"):
        resolve(URL, first.revision)
    shutil.rmtree(second.folder)
    real, changes = MemoryFileSystem.cat_file, iter([b"[3]"])

    def change_once(self, path, **part):
        for data in changes:
            put(memory, **{"tokenizer.json": data})
        return real(self, path, **part)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", change_once)
    with pytest.raises(CheckpointError, match=f"now, and {second.revision} is not"):
        resolve(URL, second.revision)


def test_a_router_copies_what_it_reads_and_no_weights(memory, monkeypatch):
    put(memory)
    text = resolve(URL, with_weights=False).folder
    assert contents(text) == {name: data for name, data in CONTENT.items() if name != "model.safetensors"}
    failing(monkeypatch, "ls", ConnectionError("away"))
    with pytest.raises(CheckpointError, match="away"):  # the copy without weights does not count
        resolve(URL)


def test_a_model_that_is_being_written_is_refused(memory, monkeypatch):
    put(memory)
    real = MemoryFileSystem.cat_file

    def write_on(self, path, **part):
        put(memory, **{"tokenizer.json": b"[1]"})  # at another time
        return real(self, path, **part)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", write_on)
        with pytest.raises(CheckpointError, match="changes while it is copied"):
            resolve(URL)
    folder = resolve(URL).folder
    assert contents(folder) == CONTENT and not list(folder.parent.glob("*.part"))


def test_a_store_that_gives_too_little_is_noticed(memory, monkeypatch):
    put(memory)
    real = MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda self, path, **part: real(self, path, **part)[:-1]
    )
    with pytest.raises(CheckpointError, match=r"gave \d+ bytes for \d+"):
        resolve(URL)


def test_a_disk_without_room_is_named_before_anything_is_copied(memory, monkeypatch):
    put(memory)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    failing(monkeypatch, "cat_file", AssertionError("copied"))
    with pytest.raises(
        CheckpointError, match=r"needs 0.0 GB more in .*models, where 0.0 are free; .*SHOAL_CACHE"
    ):
        resolve(URL)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"{URL}/nothing", "FileNotFoundError"),
        ("memory://key:secret@bucket/model", "has a password"),
        ("memory://user@bucket/model", "FileNotFoundError"),
        ("dir://bucket/model", "can't be opened"),
        ("nosuch://bucket/model", "nosuch"),
        ("memory://", "holds no config.json"),
    ],
)
def test_a_url_that_cannot_be_used_is_named(memory, url, says):
    with pytest.raises(CheckpointError, match=says) as failed:
        resolve(url)
    [finding] = fleet_file.models(asked_of(url))
    assert "secret" not in f"{failed.value} {finding}" and finding.found == str(failed.value)


def test_a_folder_of_nobody_is_named(memory):
    put(memory)
    with pytest.raises(CheckpointError, match="~nobody-here/x"):
        resolve(URL, None, "~nobody-here/x")


def test_a_folder_of_gguf_files_says_how_to_name_one(memory):
    put(memory, **{"b.gguf": b"GGUF", "a.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match=f"name its file {URL}/a.gguf"):
        resolve(URL)


def test_a_file_url_is_read_where_it_lies(memory, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve(f"file://{tmp_path}").folder == tmp_path


def test_models_lists_and_removes_copies(memory, capsys):
    put(memory)
    resolve(URL)
    put(memory, **{"tokenizer.json": b"[2]"})
    newest = resolve(URL).folder
    (newest.with_name("broken-1-2.part")).mkdir()
    (newest.with_name("broken-1-2.part") / store.RECEIPT).write_text(json.dumps({"url": "memory://broken"}))
    hub = ("--download-dir", str(newest.parent))
    assert main(["models", "--json", *hub]) == 0
    found = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert found["memory://broken"]["path"].endswith(".part")
    assert not found["memory://broken"]["is_whole"] and found[URL]["is_whole"]
    assert main(["models", *hub]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "memory://broken" in line]
    assert "incomplete; `shoal pull` fetches the rest" in line and ".part" not in line
    assert (found[URL]["source"], found[URL]["path"]) == ("store", str(newest))
    assert found[URL]["size_bytes"] > 2 * sum(map(len, CONTENT.values()))
    assert main(["models", "rm", URL, "memory://broken", "--yes", *hub]) == 0
    assert not newest.exists() and store.local_copies(str(newest.parent)) == []


def asked_of(url):
    """Returns the doctor's question about a fleet with this model."""
    group = types.SimpleNamespace(model=url, options={})
    return types.SimpleNamespace(is_given=lambda name: True, own=[group])


def test_the_doctor_copies_nothing(memory, monkeypatch):
    put(memory)
    [found] = fleet_file.models(asked_of(URL))
    assert "copied at its first use (13 KiB)" in found.found and not store.models_folder(None).exists()
    assert store.find_local(URL, is_model_file) == (None, sum(map(len, CONTENT.values())))
    folder = resolve(URL).folder
    assert store.find_local(URL, is_model_file) == (folder, 0)
    failing(monkeypatch, "ls", ConnectionError("away"))
    assert store.find_local(URL, is_model_file) == (folder, 0)


def test_the_doctor_compares_the_free_room_with_what_is_still_to_be_copied(memory, monkeypatch):
    put(memory)
    with monkeypatch.context() as patch:
        patch.setattr(store, "THREADS", 1)
        failing(patch, "cat_file", ConnectionError("away"), after=5)  # tokenizer.json is the last file
        with pytest.raises(CheckpointError):
            resolve(URL)
    assert store.find_local(URL, is_model_file) == (None, len(CONTENT["tokenizer.json"]))
    for free, verdict in ((3, "works"), (2, "fails")):
        usage = shutil._ntuple_diskusage(10, 5, free)
        monkeypatch.setattr(fleet_file.shutil, "disk_usage", lambda path, usage=usage: usage)
        [found] = fleet_file.models(asked_of(URL))
        assert found.verdict == verdict
    assert f"{store.models_folder(None)}," in found.remedy and "SHOAL_CACHE or download_dir" in found.remedy


@pytest.mark.parametrize("status", [401, 403])
def test_a_web_server_that_refuses_is_no_store_that_is_away(memory, monkeypatch, status):
    put(memory)
    resolve(URL)
    failing(monkeypatch, "ls", ClientResponseError(types.SimpleNamespace(real_url=URL), (), status=status))
    with pytest.raises(CheckpointError, match=str(status)):
        resolve(URL)


def test_a_change_is_noticed_where_a_server_reports_dates_alone(tmp_path, memory):
    """Python's own web server reports a date as the only version."""
    model = tmp_path / "web" / "model"
    model.mkdir(parents=True)
    for name, data in {"config.json": b"{}", "tokenizer.json": b"[1]"}.items():
        (model / name).write_bytes(data)
        os.utime(model / name, (1e9, 1e9))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=model.parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/model"
        first = resolve(url).folder
        (model / "tokenizer.json").write_bytes(b"[2]")
        assert contents(resolve(url).folder)["tokenizer.json"] == b"[2]"
        assert contents(first)["tokenizer.json"] == b"[1]"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


COPY = "import sys; from shoal.weights.source import resolve; print(resolve(sys.argv[1]).folder)"


@contextlib.contextmanager
def web_server(folder):
    """Serves the folder on a web server of this host. Yields its URL, and the paths of GET requests."""
    asked = []

    @web.middleware
    async def note(request, handler):
        if request.method == "GET":
            asked.append(request.path)
        return await handler(request)

    async def serve():
        app = web.Application(middlewares=[note])
        app.router.add_static("/models", folder, show_index=True)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.append(site._server.sockets[0].getsockname()[1])
        ready.set()
        await asyncio.get_running_loop().run_in_executor(None, end.wait)
        await runner.cleanup()

    port, ready, end = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{port[0]}/models", asked
    finally:
        end.set()
        thread.join()


def test_processes_that_start_together_copy_a_model_once(tmp_path):
    write_model(tmp_path / "web", "qwen3")
    environment = os.environ | {"SHOAL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    with web_server(tmp_path / "web") as (url, asked):
        running = [
            subprocess.Popen(
                [sys.executable, "-c", COPY, f"{url}/qwen3"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        try:
            said = [process.communicate(timeout=120)[0] for process in running]
        finally:
            for process in running:
                process.kill()
    folder = Path(said[0].strip())
    assert [process.returncode for process in running] == [0, 0, 0] and len(set(said)) == 1
    assert contents(folder)["model.safetensors"] == (tmp_path / "web/qwen3/model.safetensors").read_bytes()
    assert sum(path.endswith("model.safetensors") for path in asked) == 1


def test_an_engine_serves_a_model_from_a_web_server(tmp_path, capsys, monkeypatch):
    model = write_model(tmp_path / "web", "qwen3")
    arguments = ["--max-tokens", "8", "--temperature", "0", "--kv-cache-memory-bytes", "1000000", "ab"]
    assert main(["generate", "--model", str(model), *arguments]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    with web_server(tmp_path / "web") as (url, _):
        assert main(["generate", "--model", f"{url}/qwen3", *arguments]) == 0
    assert capsys.readouterr().out == expected and expected.strip()
