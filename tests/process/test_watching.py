"""Monitoring of a router and a native worker as in docs/watching.md: GET /fleet, `shoal top` and /dashboard."""

import json
import os
import subprocess
import sys

from tests.fleet_processes import Processes
from tests.tiny import write_model
from tests.waiting import eventually


def test_a_fleet_that_works_is_seen_by_all_three(tmp_path):
    model = write_model(tmp_path, "llama")
    with Processes(tmp_path) as fleet:
        fleet.route()
        options = ("--served-model-name", "smollm2", "--max-model-len", "512")
        fleet.serve("w1", *options, model=model)
        fleet.wait_state("w1", "ready")
        eventually(lambda: json.loads(fleet.ask("/v1/models")[1])["data"])

        def seen():
            answer = fleet.stream("/v1/completions", prompt=[5, 6, 7] * 20, max_tokens=20, ignore_eos=True)
            assert answer.answer()["error"] is None, answer.answer()
            view = json.loads(fleet.ask("/fleet?since=0")[1])
            [worker], [of_model] = view["workers"], view["models"]
            has_all = all(one["recent"].get("itl") for one in (worker, of_model, view))
            return view if has_all and worker["recent"].get("hit_rate") else None

        view = eventually(seen)
        [worker] = view["workers"]
        assert worker["kv"]["device"]["total_blocks"] > 0 and worker["requests"] >= 2
        assert worker["recent"]["output_tokens_s"] > 0 and worker["recent"]["ttft"]["p50"] > 0
        assert view["policy"] == "kv" and view["models"][0]["name"] == "smollm2"
        assert view["history"][-1]["output_tokens_s"] >= 0 and len(view["history"]) >= 2
        of_worker = json.loads(fleet.ask("/fleet?since=0&worker=w1")[1])["history"]
        assert any(point.get("itl") for point in of_worker)
        assert json.loads(fleet.ask("/fleet", admin=True)[1])["workers"][0]["id"] == "w1"

        top = subprocess.run(
            [sys.executable, "-m", "shoal", "top", f"http://127.0.0.1:{fleet.port}", "--once"],
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "80"},
        )
        assert top.returncode == 0 and "policy kv" in top.stdout and "w1" in top.stdout, top.stderr
        status, page = fleet.ask("/dashboard")
        assert status == 200 and "<title>Shoal: dashboard</title>" in page
