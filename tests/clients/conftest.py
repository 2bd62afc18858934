"""One server with the default model for all clients. They live in an environment of their own
(requirements.txt), the server in the one of SHOAL_PYTHON; where the clients are not installed nothing is
collected, and `make test-slow` installs them."""

import os
from importlib.util import find_spec

import pytest

# Nothing beyond this machine is asked: not for litellm's list of prices, not through a proxy.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
collect_ignore_glob = [] if find_spec("instructor") else ["test_*.py"]


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    from tests.serving import Serve

    folder = tmp_path_factory.mktemp("serve")
    server = Serve(folder, "--device", "cpu", "--max-model-len", "2048", "--responses-store-bytes", "4000000")
    try:
        server.ready()
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def model():
    return "smollm2"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    from tests.serving import Scripted

    server = Scripted(tmp_path_factory.mktemp("scripted"))
    try:
        yield server
    finally:
        server.stop()
