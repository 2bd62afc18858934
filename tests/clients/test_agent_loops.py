"""Agents' loops with a scripted model: reasoning, words and calls of several tools, streamed, until it answers."""

import asyncio
import json
import os
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.slow
ASK = "Say zebra and okapi."


def call(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


SCRIPT = [
    f"<think>I ask twice.</think>I look.\n{call('echo', text='zebra', times=2)}\n{call('echo', text='okapi')}",
    "One result is not enough.",
    f"Once more.\n{call('echo', text='quagga « é')}",
    "<think>I know.</think>All three were said.",
]
CALLS = [("zebra", 2), ("okapi", 1), ("quagga « é", 1)]


@pytest.fixture
def server(scripted):
    return scripted


@pytest.fixture
def said(server):
    """Texts and times with which the agent called its tool."""
    server.say(SCRIPT)
    return []


def check(server, said, answer):
    assert sorted(said) == sorted(CALLS) and "All three were said." in answer
    first, *_, last = server.prompts()
    assert ASK in first and "<|tool|>" not in first
    assert last.count("<|tool|>") == 3 and all(f"you said {text}" in last for text, _ in CALLS)
    assert last.count("<tool_call>echo") == 3 and "I look." in last and "Once more." in last


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic", "ollama"])
def test_langchain(api, server, said):
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    @tool
    def echo(text: str, times: int = 1) -> str:
        """Says a text."""
        said.append((text, times))
        return f"you said {text}"

    if api == "anthropic":
        llm = ChatAnthropic(model="tiny", base_url=server.url, api_key="none", max_tokens=2000, max_retries=0)
    elif api == "ollama":
        llm = ChatOllama(model="tiny", base_url=server.url)
    else:
        llm = ChatOpenAI(
            model="tiny",
            base_url=server.url + "/v1",
            api_key="none",
            max_retries=0,
            use_responses_api=api == "responses",
        )
    llm, messages = llm.bind_tools([echo]), [HumanMessage(ASK)]
    for _ in range(4):
        answer = None
        for part in llm.stream(messages):
            answer = part if answer is None else answer + part
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [echo.invoke(one) for one in answer.tool_calls]
    check(server, said, messages[-1].text)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(api, server, said):
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    @function_tool
    def echo(text: str, times: int = 1) -> str:
        """Says a text."""
        said.append((text, times))
        return f"you said {text}"

    async def run():
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
        result = Runner.run_streamed(Agent("speaker", model=kind("tiny", client), tools=[echo]), ASK)
        kinds = [event.type async for event in result.stream_events()]
        assert kinds.count("raw_response_event") > 20
        return result.final_output

    check(server, said, asyncio.run(run()))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(api, server, said):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    agent = Agent(kind("tiny", provider=OpenAIProvider(base_url=server.url + "/v1", api_key="none")))

    @agent.tool_plain
    def echo(text: str, times: int = 1) -> str:
        """Says a text."""
        said.append((text, times))
        return f"you said {text}"

    async def run():
        # `run_stream` would end at the first words; the events of `run` go on to the last answer.
        num_events = 0

        async def count(_, events):
            nonlocal num_events
            async for _event in events:
                num_events += 1

        result = await agent.run(ASK, event_stream_handler=count)
        assert num_events > 20
        return result.output

    check(server, said, asyncio.run(run()))


# Its package brings a program of 150 MB for each kind of machine, so it is not among the clients that are installed.
@pytest.mark.skipif(not shutil.which("opencode"), reason="opencode was not found; npm install -g opencode-ai")
def test_opencode(server, tmp_path):
    def bash(word):
        return call("bash", command=f"echo you said {word}", description="Says a word")

    server.say([f"<think>I look.</think>I look.\n{bash('zebra')}\n{bash('okapi')}", "", "All done."])
    (tmp_path / "work").mkdir()
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": server.url + "/v1", "apiKey": "none"},
        "models": {"tiny": {"limit": {"context": 200_000, "output": 4000}, "tool_call": True}},
    }
    config = {"provider": {"shoal": provider}, "autoupdate": False, "permission": {"bash": "allow"}}
    (tmp_path / "opencode.json").write_text(json.dumps(config))
    done = subprocess.run(
        ["opencode", "run", "-m", "shoal/tiny", ASK],
        cwd=tmp_path / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OPENCODE_CONFIG": str(tmp_path / "opencode.json"),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "All done." in done.stdout + done.stderr, done.stderr
    last = server.prompts()[-1]
    assert last.count("<|tool|>") == 2 and "you said zebra" in last and "you said okapi" in last
