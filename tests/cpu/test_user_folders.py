"""Where the user's folders are: as the environment says, and an error where nobody's home is known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.user_folders import cache_folder, state_folder

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
