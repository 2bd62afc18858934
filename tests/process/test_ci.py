"""The second try that CI gives to tests that fail (.ci/twice)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TWICE = Path(__file__).parents[2] / ".ci" / "twice"
PASSES_THE_SECOND_TIME = """
import pathlib
def test_one():
    mark = pathlib.Path("mark")
    seen, _ = mark.exists(), mark.touch()
    assert seen
"""
NEVER_PASSES = """
def test_two():
    assert False
"""


@pytest.fixture
def run(tmp_path):
    """Runs .ci/twice in a project of one test file, and returns the finished process."""
    (tmp_path / "tests").mkdir()
    (tmp_path / ".ci").mkdir()
    shutil.copy(TWICE, tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "Makefile").write_text(f"test:\n\t{sys.executable} -m pytest tests\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take two seconds to import, for each pytest

    def run(tests):
        (tmp_path / "tests" / "test_some.py").write_text(tests)
        command = [sys.executable, ".ci/twice", "test"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_a_test_that_passes_the_second_time_is_printed_as_flaky(run):
    done = run(PASSES_THE_SECOND_TIME)
    assert done.returncode == 0
    assert "flaky: tests/test_some.py::test_one" in done.stdout.splitlines()


def test_a_test_that_fails_twice_fails_the_run(run):
    done = run(PASSES_THE_SECOND_TIME + NEVER_PASSES)
    assert done.returncode != 0
    flaky = [line for line in done.stdout.splitlines() if line.startswith("flaky: ")]
    assert flaky == ["flaky: tests/test_some.py::test_one"]


def test_files_that_cannot_be_imported_fail_the_run(run):
    assert run("import nothing_of_this_name").returncode != 0
