"""Requests of coding agents, as they sent them to Shoal with a scripted model: the first one, and the one with the
results of the calls. Texts of the clients are cut out of recorded/*.json; fields, tools and schemas are theirs.

For a new recording, run the client against `python -m tests.scripted_server` and keep the bodies of its requests.
"""

import json
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RECORDED = Path(__file__).parent / "recorded"
# The tool of each client that runs a command, its arguments, and the arguments' schema in its request.
CALLS = {
    "claude_code": [
        ("Bash", {"command": f"echo {word}", "description": "Echo"}) for word in ("zebra", "okapi")
    ],
    "codex": [("exec_command", {"cmd": f"echo {word}"}) for word in ("zebra", "okapi")],
    "cline": [("run_commands", {"commands": [f"echo {word}"]}) for word in ("zebra", "okapi")],
    "continue": [("Bash", {"command": f"echo {word}"}) for word in ("zebra", "okapi")],
}


def events(server, recorded, body):
    """Returns the events of a streamed answer."""
    headers = {**recorded["headers"], "content-type": "application/json"}
    request = urllib.request.Request(server.url + recorded["path"], json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.read().decode().splitlines()
    found = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def gathered(path, found):
    """Returns reasoning, words, calls and the reason of the end that the events add up to."""
    reasoning, words, calls, end = "", "", [], None
    for event in found:
        if "messages" in path:
            block, delta = event.get("content_block", {}), event.get("delta", {})
            if block.get("type") == "tool_use":
                calls.append([block["name"], ""])
            reasoning += delta.get("thinking", "")
            words += delta.get("text", "")
            if "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
            end = delta.get("stop_reason", end)
        elif "responses" in path:
            kind, item = event["type"], event.get("item", {})
            if kind == "response.output_item.added" and item["type"] == "function_call":
                calls.append([item["name"], ""])
            reasoning += event["delta"] if kind == "response.reasoning_text.delta" else ""
            words += event["delta"] if kind == "response.output_text.delta" else ""
            if kind == "response.function_call_arguments.delta":
                calls[-1][1] += event["delta"]
            end = event["response"]["status"] if kind == "response.completed" else end
        else:
            for choice in event["choices"]:
                delta = choice["delta"]
                reasoning += delta.get("reasoning_content") or ""
                words += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(calls):
                        calls.append([call["function"]["name"], ""])
                    calls[-1][1] += call["function"].get("arguments") or ""
                end = choice["finish_reason"] or end
    return reasoning.strip(), words.strip(), [(name, json.loads(text)) for name, text in calls], end


@pytest.mark.parametrize("client", sorted(CALLS))
def test_a_recorded_agent_gets_its_calls_and_its_answer(client, scripted):
    recorded = json.loads((RECORDED / f"{client}.json").read_text())
    first, path = recorded["first"], recorded["path"]
    assert first["stream"] is True
    written = "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in CALLS[client]
    )
    scripted.say([f"<think>I list.</think>I look.{written}", "", "<think>I know.</think>All done."])
    reasoning, words, calls, end = gathered(path, events(scripted, recorded, first))
    assert (reasoning, words, calls) == ("I list.", "I look.", CALLS[client])
    assert end in ("tool_calls", "tool_use", "completed")
    found = events(scripted, recorded, {**first, **recorded["then"]})
    assert gathered(path, found)[:3] == ("I know.", "All done.", [])
    assert gathered(path, found)[3] in ("stop", "end_turn", "completed")
    start, last = scripted.prompts()
    assert "Say zebra and okapi." in start and "<|tool|>" not in start
    # The tools, what the model wrote and the results are all in the second prompt.
    assert all(f'"{name}"' in last.partition("</tools>")[0] for name, _ in CALLS[client])
    assert last.count("<|tool|>") == 2 and last.count("<tool_call>") >= 2 and "I look." in last
    assert "zebra" in last.rpartition("I look.")[2] and "echo okapi" in last


def test_every_recording_is_replayed():
    assert {path.stem for path in RECORDED.glob("*.json")} == CALLS.keys()
