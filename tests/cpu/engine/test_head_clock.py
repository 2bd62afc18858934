"""The seconds of a draft head: one number for each step, in their order, and a bounded number of them."""

from shoal.engine.drafting.head_clock import MOST_STEPS, HeadClock


def test_steps_that_nobody_takes_do_not_pile_up():
    """Regression: ranks other than 0, which measure and never take, kept the seconds of all steps."""
    clock = HeadClock(runs=True)
    for _ in range(3 * MOST_STEPS):
        with clock.measure():
            pass
    taken = 0
    while clock.take():
        taken += 1
    assert taken == MOST_STEPS


def test_a_clock_that_does_not_run_gives_no_seconds():
    clock = HeadClock(runs=False)
    with clock.measure():
        pass
    assert clock.take() == 0.0
