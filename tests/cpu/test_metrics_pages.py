"""Pages about metrics: the table of docs/metrics.md has the exported metrics, and dashboards and alerts name nothing
else."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from tests import exported_metrics

ROOT = Path(__file__).parents[2]
DASHBOARDS = runpy.run_path(str(ROOT / "deploy/grafana/dashboards.py"))
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]


def test_the_table_of_metrics_is_what_is_exported():
    page = exported_metrics.PAGE.read_text()
    assert page == exported_metrics.page_with(page), "run: python -m tests.exported_metrics"


def test_every_metric_is_explained_in_a_sentence_without_breaking_the_table():
    for _, name, family in exported_metrics.families():
        assert family.documentation.endswith(".") and "|" not in family.documentation, name


# Dashboards


@pytest.mark.parametrize("uid", DASHBOARDS["DASHBOARDS"])
def test_a_dashboard_is_what_its_script_makes(uid):
    path = ROOT / f"deploy/grafana/{uid}.json"
    assert path.read_text() == DASHBOARDS["text_of"](uid), "run: python deploy/grafana/dashboards.py"


@pytest.mark.parametrize("uid", DASHBOARDS["DASHBOARDS"])
def test_every_query_of_a_dashboard_names_metrics_that_exist(uid):
    dashboard = DASHBOARDS["dashboard"](uid)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    known = exported_metrics.names()
    assert len(queries) > 8
    for query in queries:
        named = exported_metrics.named_in(query)
        assert named <= known and (named or "process_" in query), query


@pytest.mark.parametrize("uid", DASHBOARDS["DASHBOARDS"])
def test_two_routers_do_not_double_what_both_say_of_a_worker(uid):
    """Regression: a share of cached tokens was 180 %, and each worker was listed twice."""
    for panel in DASHBOARDS["dashboard"](uid)["panels"]:
        for target in panel.get("targets", ()):
            if re.search("worker_state|router_kv_hit_rate", target["expr"]):
                assert re.search(r"avg by \([\w, ]*worker_id\)", target["expr"]), panel["title"]


@pytest.mark.parametrize("uid", DASHBOARDS["DASHBOARDS"])
def test_panels_lie_side_by_side_with_ids_of_their_own(uid):
    panels = DASHBOARDS["dashboard"](uid)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("uid", DASHBOARDS["DASHBOARDS"])
def test_a_dashboard_is_one_by_grafanas_own_schema(uid):
    """Its types are generated from Grafana's schema: what they do not know is lost on the way through them."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    given = json.loads(DASHBOARDS["text_of"](uid))
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert not list(lost(given, kept))


def lost(given, kept, path=""):
    """Returns the paths at which a part of `given` is missing in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from lost(value, kept.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept)):
            yield from lost(one, other, f"{path}[{number}]")
    elif given != kept:
        yield path, given, kept


def test_a_mistake_in_a_dashboard_would_be_found():
    assert list(lost({"a": [{"b": 1}]}, {"a": [{"c": 1}]})) == [(".a[0].b", 1, None)]


# Alerts


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_names_metrics_that_exist_says_how_bad_it_is_and_has_advice(rule):
    named = exported_metrics.named_in(rule["expr"])
    assert named <= exported_metrics.names(), rule["expr"]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    assert f"`{rule['alert']}`" in (ROOT / "docs/operating.md").read_text(), "say there what to do"


def test_every_alert_has_a_unit_test():
    cases = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yaml").read_text())["tests"]
    names = [case["name"] for case in cases]
    assert names == [f"{rule['alert']} fires" for rule in RULES] + ["nothing fires where nothing is wrong"]
