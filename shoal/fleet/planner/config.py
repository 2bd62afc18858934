"""`PlannerConfig`: the options of the planner, `[planner]` of a fleet's file. file/fleet_file.py reads the
file; planner.py, scaling/loop.py and the simulator use the options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.fleet.planner.predictors import PREDICTORS, check_predictor, least_points
from shoal.options.fields import check_fields, option

MODES = ("load", "sla")
ON_THIS_HOST = ("process", "circus")  # connectors whose workers are processes of the router's host
DAY_S, YEAR_S = 86_400, 31_536_000
QUICK_S = 5.0  # between two checks of the targets
CONNECTORS = (*ON_THIS_HOST, "ray", "kubernetes", "virtual")


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """`[planner]` of a fleet's file. Raises ConfigError."""

    enabled: bool = option(False, "size the fleet by its load", section="planner")
    mode: str = option(
        "load", "rules of the planner: by load, or for the latencies ttft and itl", choices=MODES
    )
    connector: str = option("process", "connector that starts and ends workers", choices=CONNECTORS)
    metric_pulling_interval: float = option(1.0, "seconds between two observations", low=0.01)
    adjustment_interval: float = option(10.0, "seconds between two decisions", above=0)
    prefill_queue_scale_up_threshold: float = option(5.0, "mean queue above which prefill grows", low=0)
    prefill_queue_scale_down_threshold: float = option(0.2, "mean queue below which prefill shrinks", low=0)
    decode_kv_scale_up_threshold: float = option(0.9, "mean KV load above which decode grows", low=0)
    decode_kv_scale_down_threshold: float = option(0.5, "mean KV load below which decode shrinks", low=0)
    min_endpoint: int = option(
        1, "least number of workers of a role; with 0, one decode worker (or one for both) still stays", low=0
    )
    max_gpu_budget: int = option(8, "most GPUs of all workers together", low=1)
    decode_engine_num_gpu: int = option(1, "GPUs per decode worker, or per worker for both roles", low=1)
    prefill_engine_num_gpu: int = option(1, "GPUs per prefill worker", low=1)
    grace_freezes_both: bool = option(
        False, "block growth of decode, too, in the intervals after a worker was added"
    )
    checks_remaining_load: bool = option(True, "remove a worker only if the others can carry its load")
    no_operation: bool = option(False, "advise, and change nothing")
    start_timeout: float = option(600.0, "seconds for a new worker to become ready", above=0)
    park_level: int | None = option(
        None,
        "sleep level of a worker that is not needed, which wakes when it is; default: the worker ends",
        low=1,
        high=2,
    )
    change_roles: bool = option(
        False, "change the role of workers without a restart, if one role shrinks while another grows"
    )
    record: str | None = option(None, "file to which observations and decisions are appended, as JSON lines")
    ttft: float = option(0.5, 'mode "sla": seconds to the first token, for nine of ten requests', above=0)
    itl: float = option(0.05, 'mode "sla": mean seconds from one token to the next', above=0)
    profile: str | dict[str, str] | None = option(
        None, 'mode "sla": file with the profile of a worker (shoal plan --profile); several models: a table'
    )
    load_predictor: str = option(
        "linear", 'mode "sla": forecast of the load of later intervals', choices=tuple(PREDICTORS)
    )
    load_prediction_window_size: int = option(
        50, 'mode "sla": number of past intervals for the forecast', low=1
    )
    load_season: float = option(0.0, 'period of the load in seconds, for "holt_winters"', low=0, high=YEAR_S)
    load_adjustment_interval: float | None = option(
        None,
        'mode "sla": seconds between two checks of the targets; default: 5, within the other two intervals',
        above=0,
    )
    startup_time: float = option(
        30.0, 'mode "sla": start-up time of a worker in seconds; also the forecast horizon', low=0, high=DAY_S
    )
    no_correction: bool = option(
        False, 'mode "sla": use the profile without correction by observed latencies'
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for kind in ("prefill_queue", "decode_kv"):
            up = getattr(self, f"{kind}_scale_up_threshold")
            down = getattr(self, f"{kind}_scale_down_threshold")
            if down >= up:
                raise ConfigError(
                    f"{kind}_scale_down_threshold {down:g} is not below {kind}_scale_up_threshold {up:g}; a "
                    "fleet would grow and shrink at the same load"
                )
        if self.park_level is not None and self.connector not in ON_THIS_HOST:
            raise ConfigError(
                f"park_level is for workers of this host, and connector is {self.connector!r}; leave one of "
                "them out"
            )
        if self.change_roles:
            self._check_role_changes()
        least = self.least("decode")
        if (gpus := least * self.decode_engine_num_gpu) > self.max_gpu_budget:
            raise ConfigError(
                f"the workers that always stay ({least} of decode_engine_num_gpu "
                f"{self.decode_engine_num_gpu}) have {gpus} GPUs, and max_gpu_budget is "
                f"{self.max_gpu_budget}; {self._more_room()}"
            )
        if self.adjustment_interval < self.metric_pulling_interval:
            raise ConfigError(
                f"adjustment_interval {self.adjustment_interval:g} is shorter than metric_pulling_interval "
                f"{self.metric_pulling_interval:g}; a decision needs an observation"
            )
        if self.mode == "sla":
            self._check_sla()

    def _check_role_changes(self) -> None:
        if self.connector == "virtual":
            raise ConfigError(
                "change_roles does not go with connector 'virtual', whose orchestrator counts workers by the "
                "role that it started them with; leave one of them out"
            )
        if self.prefill_engine_num_gpu != self.decode_engine_num_gpu:
            raise ConfigError(
                f"change_roles needs workers with equally many GPUs, and prefill_engine_num_gpu is "
                f"{self.prefill_engine_num_gpu}, decode_engine_num_gpu {self.decode_engine_num_gpu}; give "
                "both the same, or leave change_roles out"
            )

    def _check_sla(self) -> None:
        check_predictor(self.load_predictor)
        quick = self.load_adjustment_interval
        if quick is not None and not self.metric_pulling_interval <= quick <= self.adjustment_interval:
            raise ConfigError(
                f"load_adjustment_interval {quick:g} is not from "
                f"metric_pulling_interval {self.metric_pulling_interval:g} to adjustment_interval "
                f"{self.adjustment_interval:g}; choose a time between them"
            )
        if self.load_predictor == "holt_winters":
            if self.season < 2:
                raise ConfigError(
                    f"load_season {self.load_season:g} has no two intervals of {self.adjustment_interval:g} "
                    "s (adjustment_interval); give the seconds after which the load repeats itself, such as "
                    "86400"
                )
            if self.load_prediction_window_size < (least := least_points(self.season)):
                raise ConfigError(
                    f"load_prediction_window_size {self.load_prediction_window_size} has no room for the "
                    f"{least} intervals that a season of {self.season} of them is learnt from; give {least} "
                    "or more, or a longer adjustment_interval"
                )

    @property
    def season(self) -> int:
        """`load_season` in intervals."""
        return round(self.load_season / self.adjustment_interval)

    @property
    def judging_interval(self) -> float:
        """Seconds between two decisions of any kind."""
        if self.mode == "load":
            return self.adjustment_interval
        if self.load_adjustment_interval is not None:
            return self.load_adjustment_interval
        return max(self.metric_pulling_interval, min(QUICK_S, self.adjustment_interval))

    def check_workers(self, groups: Iterable[tuple[str, int]]) -> None:
        """Checks the budget of GPUs. `groups`: role and initial count of each kind of worker. Raises
        ConfigError if the initial workers, or the least numbers of workers, exceed the budget. With
        `no_operation` any fleet is allowed."""
        if self.no_operation:
            return
        kinds = list(groups)
        for what, needed, remedy in (
            (
                "all workers that are there at first",
                sum(self.gpus_of(role) * count for role, count in kinds),
                "lower the one or raise the other",
            ),
            (
                f"the workers that always stay (min_endpoint {self.min_endpoint}, {len(kinds)} kinds)",
                sum(self.gpus_of(role) * self.least(role) for role, _ in kinds),
                self._more_room(),
            ),
        ):
            if needed > self.max_gpu_budget:
                raise ConfigError(
                    f"{what} have {needed} GPUs, and max_gpu_budget is {self.max_gpu_budget}; {remedy}"
                )

    def _more_room(self) -> str:
        """Returns the advice for least numbers of workers that exceed the budget."""
        return "raise max_gpu_budget" + (", or lower min_endpoint" if self.min_endpoint > 1 else "")

    def least(self, role: str) -> int:
        """Returns the least number of workers of a role. At least one decode worker stays: without it
        requests are refused, so no queue could cause a new worker."""
        return self.min_endpoint if role == "prefill" else max(1, self.min_endpoint)

    def gpus_of(self, role: str) -> int:
        return self.prefill_engine_num_gpu if role == "prefill" else self.decode_engine_num_gpu
