"""Conditions under which a core counts as hung, without a clock."""

import pytest

from shoal.config import ServerConfig
from shoal.engine.process.watchdog import CPU_PATIENCE, Watchdog
from shoal.errors import ConfigError
from shoal.wire import BEAT_S, Beat


def after(seconds, watchdog, doing, *, progress=lambda i: 7, cpu=lambda i: 0.0):
    """Returns the watchdog's verdict after `seconds` of equal beats."""
    said = None
    for i in range(round(seconds / BEAT_S)):
        watchdog.beat(Beat(progress(i), doing, cpu(i)))
        said = watchdog.tick(BEAT_S)
    return said


def test_a_core_without_beats_is_hung_after_its_time():
    watchdog = Watchdog(10.0)
    said = [watchdog.tick(1.0) for _ in range(10)]
    assert said[:9] == [None] * 9 and "no sign of life for 10 s" in said[9]


def test_a_watcher_that_stood_still_blames_nobody():
    watchdog = Watchdog(10.0)
    assert watchdog.tick(3600.0) is None
    watchdog.beat(Beat(1, "", 0.0))
    assert watchdog.unheard_s == 0.0


@pytest.mark.parametrize("doing", ["", "update_weights", "wake_up"])
def test_a_core_without_work_and_one_that_is_called_may_take_their_time(doing):
    assert after(1000, Watchdog(10.0), doing) is None


def test_a_quick_command_that_does_not_end_is_noticed():
    assert after(9, Watchdog(10.0), "memory_usage") is None
    assert "busy with memory_usage for 10 s" in after(12, Watchdog(10.0), "memory_usage")


def test_one_quick_command_after_the_other_is_work():
    assert after(1000, Watchdog(10.0), "stats", progress=lambda i: i) is None


def test_a_step_that_does_not_end_is_noticed():
    assert after(9, Watchdog(10.0), "step") is None
    assert "completed no step for 10 s" in after(12, Watchdog(10.0), "step")


def test_steps_that_end_are_no_silence():
    assert after(1000, Watchdog(10.0), "step", progress=lambda i: i // 10) is None


def test_a_step_that_computes_on_the_cpu_gets_longer_than_one_that_waits():
    def busy(i):
        return i * BEAT_S

    assert after(9 * CPU_PATIENCE, Watchdog(10.0), "step", cpu=busy) is None
    assert after(12 * CPU_PATIENCE, Watchdog(10.0), "step", cpu=busy)
    assert after(12, Watchdog(10.0), "step"), "a step that waits"


def test_without_a_timeout_nothing_is_hung():
    watchdog = Watchdog(0)
    assert after(10_000, watchdog, "step") is None and not any(watchdog.tick(1.0) for _ in range(1000))


def test_a_timeout_shorter_than_a_busy_machines_pauses_is_refused():
    with pytest.raises(ConfigError, match=r"engine_timeout must be .*, got 0\.5"):
        ServerConfig(engine_timeout=0.5)
