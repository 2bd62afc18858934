"""Kernels run in Triton's interpreter here: there is no GPU. triton_compile.py compiles them for one, in a
process of its own."""

import os
import sys

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, so before any test module is
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would only wait for each other


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter():
    if "triton.runtime.interpreter" in sys.modules:
        from quick_interpreter import quicken

        quicken()


@pytest.fixture(scope="module")
def served():
    """A server that knows tools and thoughts, over a fake engine; modules that want another override it."""
    from tests.fake_server import tool_server

    with tool_server() as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    import openai

    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60)


def pytest_collection_modifyitems(items):
    """A module's first test waits until all its kernels are compiled, which takes minutes on a busy machine."""
    for item in items:
        if "compiled" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="module")
def compiled(request):
    """The kernels of each case of a module's LAUNCHES, compiled for GPUs that are not here."""
    from triton_compile import compile_launches

    return compile_launches(request.module.__file__)
