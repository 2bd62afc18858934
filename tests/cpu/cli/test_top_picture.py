"""The picture of `shoal top`, by Rich's recording console: 80 columns, with and without colour, hostile
names."""

import io

import pytest
from rich.console import Console

from shoal.cli.top_picture import Picture, clean, duration, size, sparkline
from shoal.fleet_views import (
    DecisionView,
    FleetView,
    ModelView,
    PlannerView,
    Point,
    QueueView,
    TierView,
    WorkerView,
)
from shoal.telemetry.served import Quantiles, RecentRates

RECENT = RecentRates(
    prompt_tokens_s=1234.0,
    output_tokens_s=567.8,
    hit_rate=0.78,
    ttft=Quantiles(0.12, 1.5),
    itl=Quantiles(0.0213, 0.055),
)


def worker(name, **more):
    tiers = {"device": TierView(0.45, 45, 100), "host": TierView(0.2, 2, 10), "disk": TierView(None, 7)}
    return WorkerView(
        **{
            "id": name,
            "url": f"http://{name}:9000",
            "role": "decode",
            "model": "m",
            "state": "ready",
            "kv": tiers,
            "recent": RECENT,
            "running": 3,
            "waiting": 1,
            "blocks_in": 40,
            "bytes_in": 4_000_000,
            "transfer_failures": {"timeout": 2},
            **more,
        }
    )


def fleet(*workers, **more):
    models = [ModelView(name="m", failed=4, recent=RECENT), ModelView(name="other", refused=5)]
    decision = DecisionView(130.0, "m", "add 1 decode", "KV caches are at 0.9")
    planner = PlannerView("load", "m: the load is between the thresholds", {"decode": 2}, True, [decision])
    return FleetView(
        **{
            "policy": "kv",
            "workers": list(workers) or [worker("w1"), worker("prefill-1", role="prefill", state="draining")],
            "queue": QueueView(6, 2.5),
            "prefill_queue": QueueView(2, 0.1),
            "planner": planner,
            "models": models,
            "recent": RECENT,
            "version": "1.0",
            "at": 1_700_000_000.0,
            **more,
        }
    )


def text_of(picture, width=80, **options):
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, emoji=False, highlight=False, **options)
    console.print(picture)
    return out.getvalue()


def points(count=20):
    return [Point(at=float(n), running=n, output_tokens_s=float(n), itl=RECENT.itl) for n in range(count)]


def test_80_columns_hold_all_that_matters():
    picture = Picture("http://10.0.0.1:8000", fleet())
    picture.past.extend(points())
    text = text_of(picture)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "policy kv",
        "1 of 2 ready",
        "6 running, 10 waiting",
        "6 for a worker, 2.5s",
        "2 at workers; 6 for a worker, 2.5s; 2 for prefill, 100ms",
        "4 failed",
        "5 refused",
        "cached 78%",
        "p50 120ms, p99 1.5s",
        "p50 21.3ms, p99 55ms",
        "80 blocks, 8MB, 4 failed",
        "w1",
        "prefill-1",
        "draining",
        "45%",
        "20%",
        "other",
        "add 1 decode",
        "2min ago",
        "wants 2 decode",
        "(changing)",
    ):
        assert part in text, (part, text)
    assert "21ms" in text  # the last column, too, is whole
    header = next(line for line in text.splitlines() if "state" in line)
    assert header.split() == [
        "worker",
        "role",
        "state",
        "run",
        "wait",
        "dev",
        "host",
        "disk",
        "hit",
        "out/s",
        "TTFT",
        "ITL",
    ]


def test_a_wide_terminal_shows_more_and_a_narrow_one_breaks_no_line():
    picture = Picture("http://10.0.0.1:8000", fleet())
    assert {"in/s", "p99", "failed"} <= set(text_of(picture, 140).split())
    assert max(map(len, text_of(picture, 60).splitlines())) <= 60


def test_without_colour_there_is_no_escape_sequence(monkeypatch):
    coloured = text_of(
        Picture("http://h:1", fleet(), trouble="gone"), force_terminal=True, color_system="256"
    )
    assert "\x1b[" in coloured and "31m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = text_of(Picture("http://h:1", fleet(), trouble="gone"), force_terminal=True, color_system="256")
    assert "31m" not in plain and "32m" not in plain
    assert "\x1b" not in text_of(Picture("http://h:1", fleet(), trouble="gone"))


def test_a_terminal_without_blocks_gets_letters():
    class Ascii(io.StringIO):
        encoding = "ascii"

    out, picture = Ascii(), Picture("http://h:1", fleet())
    picture.past.extend(points())
    Console(file=out, width=80, legacy_windows=False).print(picture)
    assert "@" in out.getvalue() and not any(letter in out.getvalue() for letter in "█─")


HOSTILE = "[red]x[/red]\x1b[2J\x07\r\u202e"


def test_names_steer_neither_terminal_nor_markup():
    view = fleet(worker(HOSTILE, model=HOSTILE, why=HOSTILE, url=HOSTILE, role="both"))
    view.models[0].name, view.planner.last_decision = HOSTILE, HOSTILE
    for picture in (
        Picture("http://h:1", view),
        Picture("http://h:1", view, selected=HOSTILE, is_detailed=True),
        Picture(HOSTILE, view, trouble=HOSTILE),
    ):
        text = text_of(picture, 200)
        assert "[red]x[/red]" in text
        assert not any(letter in text for letter in "\x1b\x07\r\u202e")


def test_one_worker_in_detail():
    picture = Picture("http://h:1", fleet(), selected="w1", is_detailed=True)
    picture.past.extend(points())
    text = text_of(picture)
    for part in (
        "http://w1:9000",
        "KV device",
        "45 blocks of 100",
        "KV disk",
        "7 blocks",
        "40 blocks (4MB)",
        "2 timeout",
        "78% lately",
        "▁",
    ):
        assert part in text, (part, text)
    assert "prefill-1" not in text


def test_a_single_server_has_no_queue_beside_its_engines():
    one = worker("m", role="both")
    view = fleet(one, policy="", queue=QueueView(1), prefill_queue=QueueView(), planner=None)
    text = text_of(Picture("http://h:1", view))
    assert (
        "one server" in text
        and "3 running, 1 waiting," in text
        and "queue" not in text
        and "role" not in text
    )


def test_a_server_that_is_gone_is_told_with_the_age_of_the_picture():
    text = text_of(Picture("http://h:1", fleet(), trouble="refused"), 200)
    assert "no answer: refused; the picture is" in text and "w1" in text
    assert "no answer: refused; trying again" in text_of(Picture("http://h:1", None, trouble="refused"))


@pytest.mark.parametrize(
    "values, room, bars",
    [
        ([0, 1, 3], 8, "039"),
        ([0.0] * 4, 8, "0000"),
        ([], 8, ""),
        ([None, 5.0], 8, " 9"),
        ([0, 2, 3, 3, 0, 0], 3, "390"),
    ],
)
def test_a_sparkline_is_as_high_as_its_values(values, room, bars):
    assert sparkline(values, "0123456789", room) == bars


def test_numbers_have_three_digits_and_a_unit():
    assert [duration(s) for s in (0.00014, 0.0213, 1.5, 59, 130, 8000)] == [
        "0.14ms",
        "21.3ms",
        "1.5s",
        "59s",
        "2min",
        "2h",
    ]
    assert [size(n) for n in (0, 999, 1500, 2_340_000, 5e9, 7e12)] == [
        "0B",
        "999B",
        "1.5kB",
        "2.34MB",
        "5GB",
        "7TB",
    ]
    assert clean("a\x1bb\nc") == "a?b?c"
