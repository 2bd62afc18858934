"""A plot of a simulated fleet: its load, its number of workers, and the waits of requests over time."""

from __future__ import annotations

from collections import Counter

from shoal.bench.serving import import_figure, save_picture
from shoal.fleet.simulator.simulator import Simulation

BINS = 100  # number of intervals in which requests are counted


def plot(simulation: Simulation, path: str) -> None:
    """Draws a finished simulation into a PNG file. Raises ConfigError without matplotlib."""
    figure = import_figure()(figsize=(10, 7), layout="constrained")
    load, workers, waits = figure.subplots(3, 1, sharex=True)
    done, planner = simulation.finished, simulation.config.planner
    end = max(request.end_s for request in done)
    width = end / BINS
    arrived = Counter(int(request.arrival_s / width) for request in done)
    load.step(
        [bin * width for bin in range(BINS)], [arrived[bin] / width for bin in range(BINS)], where="post"
    )
    load.set(ylabel="requests/s", ylim=(0, None))
    sizes = simulation.sizes
    for model, role in sizes[0][1]:
        times, counts = [when for when, _ in sizes], [found[model, role] for _, found in sizes]
        workers.step([*times, end], [*counts, counts[-1]], where="post", label=f"{model}, {role}")
    workers.set(ylabel="workers", ylim=(0, None))
    workers.legend()
    arrivals = [request.arrival_s for request in done]
    waits.plot(arrivals, [request.first_token_s - request.arrival_s for request in done], ".", markersize=2)
    waits.axhline(planner.ttft, linestyle="--", label=f"ttft {planner.ttft:g}")
    waits.set(xlabel="s", ylabel="s to the first token", yscale="log")
    waits.legend()
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)
