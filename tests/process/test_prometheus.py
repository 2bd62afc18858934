"""Alerts and dashboards before a real Prometheus: its own checks and unit tests, and every expression evaluated over
what it has scraped from a real fleet with a planner."""

import json
import runpy
import subprocess
import urllib.parse
import urllib.request

import pytest
import yaml

from tests import exported_metrics, prometheus
from tests.fleet_up import Fleet
from tests.serving import ROOT, free_port
from tests.waiting import eventually

FOLDER = ROOT / "deploy/prometheus"
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARDS = runpy.run_path(str(ROOT / "deploy/grafana/dashboards.py"))
TWO_WORKERS = """
model = "smollm2"
[[workers]]
count = 2
options = { dtype = "float32", max_model_len = 1024, kv_cache_memory_bytes = 200_000_000 }
[planner]
enabled = true
max_gpu_budget = 2
adjustment_interval = 2.0
"""
# What this fleet has nothing of: tiers, workers that exchange KV blocks, prefill workers.
ABSENT = (
    "shoal:kv_tier_",
    "shoal:kv_transfer_",
    "shoal:router_prefill_fallbacks",
    "dynamo_frontend_model_migr",
)


def promtool(*words):
    return subprocess.run(
        [prometheus.find("promtool"), *words], cwd=FOLDER, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "alerts.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(words):
    done = promtool(*words)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """Prometheus over our rules, which scrapes this port. Ends with the block."""

    def __init__(self, folder, port):
        self.url = f"http://127.0.0.1:{free_port()}"
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "alerts.yaml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.process = subprocess.Popen(
            [
                prometheus.find("prometheus"),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def query(self, expression):
        """The samples. Raises HTTPError for what Prometheus cannot parse."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=30) as answer:
            return json.load(answer)["data"]["result"]

    def scrapes(self, expression):
        try:
            return self.query(expression)
        except OSError:  # it does not listen yet
            return []


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """A Prometheus that has scraped a fleet of two workers, which have answered something."""
    folder = tmp_path_factory.mktemp("scraped")
    with Fleet(folder, TWO_WORKERS) as fleet, Prometheus(folder, fleet.ready().port) as server:
        eventually(lambda: server.scrapes("up == 1"))  # so that what follows is an increase
        for number in range(6):
            fleet.ask(f"Number {number} is", 8)
        eventually(lambda: server.scrapes('shoal:planner_decisions_total{kind="none"} > 1'))
        eventually(lambda: server.scrapes("rate(vllm:generation_tokens_total[30s]) > 0"))
        yield server


def filled(expression):
    """A dashboard's expression with its variables in place."""
    for name, value in (("$__rate_interval", "30s"), ("$instance", ".*"), ("$model", ".*")):
        expression = expression.replace(name, value)
    return expression


def is_absent(expression):
    return any(name.startswith(ABSENT) for name in exported_metrics.named_in(expression))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_its_metrics_and_does_not_fire_over_a_fleet_that_is_well(scraped, rule):
    scraped.query(rule["expr"])
    assert not scraped.query(f'ALERTS{{alertstate="firing", alertname="{rule["alert"]}"}}')
    for name in exported_metrics.named_in(rule["expr"]):
        assert is_absent(name) or scraped.query(name), name


@pytest.mark.parametrize("uid", DASHBOARDS["DASHBOARDS"])
def test_every_panel_of_a_dashboard_shows_something(scraped, uid):
    shown = 0
    for panel in DASHBOARDS["dashboard"](uid)["panels"]:
        for target in panel.get("targets", ()):
            found = scraped.query(filled(target["expr"]))
            assert found or is_absent(target["expr"]), (panel["title"], target["expr"])
            shown += bool(found)
    assert shown > 8
