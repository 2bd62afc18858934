"""docs/laptop-to-fleet.md, section by section, as a reader follows it: the commands that are run are the
page's."""

import contextlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import nats_server
from tests.ray_cluster import ENVIRONMENT as RAY
from tests.serving import PYTHON, ROOT, listens
from tests.walk import Step, sections, walk

PAGE = ROOT / "docs" / "laptop-to-fleet.md"
SECTIONS = sections(PAGE)
PORTS = (8000, 8001)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files of the repository that the page's commands read."""
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.fixture
def environment(tmp_path_factory):
    """The environment of a reader's terminal, with `shoal` in its path."""
    folder = tmp_path_factory.mktemp("home")
    shoal = folder / "shoal"
    shoal.write_text(f'#!/bin/sh\nexec {PYTHON} -m shoal "$@"\n')
    shoal.chmod(0o755)
    return RAY | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def has_namespaces():
    try:
        subprocess.run(["ip", "netns", "add", "shoal-probe"], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "delete", "shoal-probe"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_can_be_followed(title, checkout, environment):
    if taken := [port for port in PORTS if listens(port)]:
        pytest.skip(f"the page's ports {taken} are another program's on this machine")
    text = "".join(step.text for step in SECTIONS[title])
    if "--on ray" in text:
        pytest.importorskip("ray", reason="pip install ray")
    with contextlib.ExitStack() as stack:
        if "namespaces.sh" in text:
            if not has_namespaces():
                pytest.skip("this process may not make network namespaces (ip netns add)")
            environment["PATH"] += f":{Path(nats_server.find()).parent}"
            down = [checkout / "examples" / "fleet" / "namespaces.sh", "down"]
            subprocess.run(down, check=True)  # namespaces of an interrupted run
            stack.callback(subprocess.run, down, check=True)
        walk(SECTIONS[title], environment, checkout)


def test_a_line_between_two_commands_is_not_missed(tmp_path, environment):
    """Regression: two fleets were started one after the other, and where the first was up before the second terminal
    was there, its lines were awaited for ever."""
    early = Step("bash", "1", "echo ear''ly\n")
    walk([early, Step("bash", "2", "true\n"), Step("text", "1", "early\n")], environment, tmp_path)


def test_a_command_that_has_ended_is_not_waited_for(tmp_path, environment):
    """Regression: a line that a load's table lacked was awaited until the test's own timeout, which shows no screen."""
    steps = [Step("bash", "1", "echo failed: 1\n"), Step("text", "1", "failed: 0\n")]
    with pytest.raises(AssertionError, match=r"does not come: .*failed: 1"):
        walk(steps, environment, tmp_path)


def test_the_extras_that_the_page_asks_for_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for names in re.findall(r"\[([a-z,]+)\]'", PAGE.read_text()) for name in names.split(",")}
    assert {"ray", "nats"} <= named <= set(extras)
