"""What comes next in a series of numbers, such as the requests of each interval.

Each predictor is a function of the series alone, so a planner's record replays. Two need statsmodels, which
is the extra `planner`.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections.abc import Callable, Sequence

from shoal.errors import ConfigError

TREND_POINTS = 6  # of the series' end, through which the line of `linear` goes
# Variances of the level, of its trend, and of what is measured, as in NVIDIA Dynamo's predictor. Forecasts
# depend on their ratios alone.
KALMAN_LEVEL, KALMAN_TREND, KALMAN_NOISE = 1.0, 0.1, 10.0
NEEDS_STATSMODELS = ("holt_winters", "kalman")


def predict(name: str, values: Sequence[float], num_steps: int, season: int = 0) -> list[float]:
    """The next `num_steps` values of a series of at least one, none of them below 0. `season`: after how many
    values `holt_winters` takes the series to repeat itself. Until it has seen least_points(season), and
    `kalman` three values, they predict as `linear` does."""
    found = PREDICTORS[name](values, num_steps, season)
    # A forecast that is no number says nothing: the last value stands.
    return [max(0.0, value) if math.isfinite(value) else values[-1] for value in found]


def least_points(season: int) -> int:
    """The values that `holt_winters` needs: two seasons, and what statsmodels begins with."""
    return max(2 * season, 10 + 2 * (season // 2))


def check_predictor(name: str) -> None:
    """Raises ConfigError for a predictor whose package is not installed."""
    if name in NEEDS_STATSMODELS and importlib.util.find_spec("statsmodels") is None:
        raise ConfigError(
            f"load_predictor {name!r} needs statsmodels: pip install 'shoal[planner]'; or choose constant or "
            "linear"
        )


def _constant(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    return [values[-1]] * num_steps


def _linear(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    """The least-squares line through the last few values."""
    last = values[-TREND_POINTS:]
    if len(last) < 2:
        return [values[-1]] * num_steps
    slope, begin = statistics.linear_regression(range(len(last)), last)
    return [begin + slope * (len(last) + step) for step in range(num_steps)]


def _kalman(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    """A level with a trend, both of which wander, under noise."""
    if len(values) < 3:
        return _linear(values, num_steps, season)
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    model = UnobservedComponents(list(map(float, values)), level="local linear trend")
    return _floats(model.filter([KALMAN_NOISE, KALMAN_LEVEL, KALMAN_TREND]).forecast(num_steps))


def _holt_winters(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    """Exponential smoothing of a level and of a season that is added to it (Winters 1960)."""
    if season < 2 or len(values) < least_points(season):
        return _linear(values, num_steps, season)
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    with warnings.catch_warnings():
        # It warns where the best smoothing is not found within its limits; the best so far is a forecast too.
        warnings.simplefilter("ignore")
        model = ExponentialSmoothing(
            list(map(float, values)),
            seasonal="add",
            seasonal_periods=season,
            initialization_method="heuristic",
        )
        return _floats(model.fit().forecast(num_steps))


def _floats(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values]


PREDICTORS: dict[str, Callable[[Sequence[float], int, int], list[float]]] = {
    "constant": _constant,
    "linear": _linear,
    "holt_winters": _holt_winters,
    "kalman": _kalman,
}
