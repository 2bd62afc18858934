"""`predict`: forecasts a series of numbers, such as the requests of each interval. Pure. sla_rules.py keeps
the series and decides how far ahead to forecast.

Each predictor is a function of the series alone, so that a planner's record replays. Two need statsmodels,
from the extra `planner`.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections.abc import Callable, Sequence

from shoal.errors import ConfigError

TREND_POINTS = 6  # last values of the series for the line of `linear`
# Variances of the level, its trend, and the measurement, as in NVIDIA Dynamo's predictor. Forecasts depend
# only on their ratios.
KALMAN_LEVEL, KALMAN_TREND, KALMAN_NOISE = 1.0, 0.1, 10.0
NEEDS_STATSMODELS = ("holt_winters", "kalman")


def predict(name: str, values: Sequence[float], num_steps: int, season: int = 0) -> list[float]:
    """Returns the next `num_steps` values of a non-empty series, each at least 0. `season`: period of the
    series in values, for `holt_winters`. With fewer than least_points(season) values, or three for `kalman`,
    the forecast is the one of `linear`."""
    found = PREDICTORS[name](values, num_steps, season)
    # In place of NaN or infinity, the last value is the forecast.
    return [max(0.0, value) if math.isfinite(value) else values[-1] for value in found]


def least_points(season: int) -> int:
    """Returns the number of values that `holt_winters` needs: two seasons, and the minimum of statsmodels."""
    return max(2 * season, 10 + 2 * (season // 2))


def check_predictor(name: str) -> None:
    """Raises ConfigError for a predictor whose package is not installed."""
    if name in NEEDS_STATSMODELS and importlib.util.find_spec("statsmodels") is None:
        raise ConfigError(
            f"load_predictor {name!r} needs statsmodels; pip install 'shoal[planner]', or choose constant or "
            "linear"
        )


def _constant(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    return [values[-1]] * num_steps


def _linear(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    """Forecasts by the least-squares line through the last few values."""
    last = values[-TREND_POINTS:]
    if len(last) < 2:
        return [values[-1]] * num_steps
    slope, begin = statistics.linear_regression(range(len(last)), last)
    return [begin + slope * (len(last) + step) for step in range(num_steps)]


def _kalman(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    """Forecasts by a local linear trend: a drifting level and slope with noise."""
    if len(values) < 3:
        return _linear(values, num_steps, season)
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    model = UnobservedComponents(list(map(float, values)), level="local linear trend")
    return _floats(model.filter([KALMAN_NOISE, KALMAN_LEVEL, KALMAN_TREND]).forecast(num_steps))


def _holt_winters(values: Sequence[float], num_steps: int, season: int) -> list[float]:
    """Forecasts by exponential smoothing with an additive season (Winters 1960)."""
    if season < 2 or len(values) < least_points(season):
        return _linear(values, num_steps, season)
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    with warnings.catch_warnings():
        # It warns if the optimizer does not converge; the best fit so far is still a forecast.
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
