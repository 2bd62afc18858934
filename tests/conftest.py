"""Engines on tiny checkpoints, for tests of any folder. Nothing heavy is imported before a test asks for
it."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

# A command that a shell has put into the background ignores Ctrl-C, and so would the processes of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Files of tests of processes, which wait a lot, lie spread among the others, so that the cores have work
    all the time. None comes last (tests/gpu is skipped in no time), where one worker would be left alone with
    it."""
    waits = {path: "process" in path.parts for path in dict.fromkeys(item.path for item in items)}
    place = {}
    for kind, share in ((True, 0.75), (False, 1.0)):
        files = [path for path in waits if waits[path] == kind]
        place |= {path: share * number / len(files) for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests make millions of objects, none of which is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


frozen = None


def pytest_runtest_setup(item):
    """Freezes the objects that exist before a file's first test, and again after a test that has imported much, so
    that collections leave them out. An engine collects at its end, and to look at all that torch and transformers
    have made takes it a hundred times as long as a tiny engine's whole life else."""
    global frozen
    if frozen != (now := (item.path, len(sys.modules) // 100)):
        gc.collect()
        gc.freeze()
        frozen = now


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns the folder in which checkpoints are written."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def folder(root):
    """The checkpoint that most tests are content with."""
    from tests import tiny

    return tiny.write_model(root, "qwen3")


@pytest.fixture
def engine_options():
    """Default arguments of `build`; modules override it. The cache is small, as its books are proven block by block
    after each test."""
    return {"dtype": "float32", "max_model_len": 256, "device": "cpu", "kv_cache_memory_bytes": 32 << 20}


@pytest.fixture
def build(root, engine_options):
    """Builds an LLM of a tiny checkpoint. After the test its books are proven, and it is ended."""
    from shoal import LLM
    from tests import tiny

    engines = []

    def make(name="qwen3", **options):
        engines.append(LLM(str(tiny.write_model(root, name)), **engine_options | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.core.check()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks, "requests are left"
        engine.exit()


@pytest.fixture(scope="session")
def forks():
    from tests.quick_starts import Forks

    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def quick_starts(forks):
    """Engines' processes are forked, not started; for modules that start many. See tests/quick_starts.py."""
    from shoal.engine.process import core_process
    from shoal.engine.ranks import workers

    with pytest.MonkeyPatch.context() as patch:
        for module in (core_process, workers):
            patch.setattr(module, "subprocess", forks.subprocess)
        yield


@pytest.fixture
def new_children():
    """The children that this process has got since the test began. Others may live on: multiprocessing's, and
    processes that several files share."""
    import psutil

    before = psutil.Process().children()
    return lambda: [process for process in psutil.Process().children() if process not in before]


@pytest.fixture
def trainer():
    """Starts trainers as tests.trainer.start does; all are ended after the test."""
    from tests.trainer import start

    started = []

    def start_one(*arguments):
        started.append(start(*arguments))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def no_triton(tmp_path):
    """An environment for processes in which `import triton` fails, as it does beside a CPU wheel of torch."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
