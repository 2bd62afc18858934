"""The user's folders: from the environment, and an error without a home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.files.user_dirs import cache_folder, kernel_folder, state_folder

VARIABLES = ("SHOAL_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME")


@pytest.mark.parametrize(
    "variables, cache, state",
    [
        ({"HOME": "/c"}, "/c/.cache/shoal", "/c/.local/state/shoal"),
        ({"HOME": "/c", "XDG_CACHE_HOME": "/b"}, "/b/shoal", "/c/.local/state/shoal"),
        ({"HOME": "/c", "XDG_CACHE_HOME": "/b", "SHOAL_CACHE": "/a"}, "/a", "/c/.local/state/shoal"),
        ({"HOME": "/c", "XDG_STATE_HOME": "/b"}, "/c/.cache/shoal", "/b/shoal"),
    ],
)
def test_the_folders_follow_the_environment(variables, cache, state, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (cache_folder(), state_folder()) == (Path(cache), Path(state))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom passwd does not have
    with pytest.raises(ConfigError, match=r"HOME is not set; set it, or SHOAL_CACHE"):
        cache_folder()
    with pytest.raises(ConfigError, match=r"HOME is not set; set it, or XDG_STATE_HOME"):
        state_folder()
    monkeypatch.setenv("SHOAL_CACHE", "/a")
    assert cache_folder() == Path("/a")


@pytest.mark.parametrize("variables", [{"SHOAL_CACHE": "/proc/not/there"}, {"HOME": "/proc/not"}, {}])
def test_without_a_cache_folder_kernels_lie_in_a_private_temporary_one(variables, tmp_path, monkeypatch):
    """Regression: C kernels were left out there, and answers came 14 times slower."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if not variables:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = kernel_folder()
    assert folder == tmp_path / f"shoal-{os.getuid()}" == kernel_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="must be this user's and closed to others; set SHOAL_CACHE"):
        kernel_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be this user's and closed to others"):
        kernel_folder()


def test_kernels_lie_in_the_cache_folder_where_it_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "new"))
    assert kernel_folder() == tmp_path / "new" == cache_folder()
