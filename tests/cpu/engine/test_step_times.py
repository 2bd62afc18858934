"""The seconds of a step, from which parts of an engine learn what steps cost."""

import time

import pytest

from shoal import LLM, SamplingParams
from shoal.api import Request
from shoal.engine.step_part import StepPart
from tests import tiny

SLOW_S = 0.5  # what a step with a prompt takes here in addition; other steps take far less


class Times(StepPart):
    def __init__(self, config, ranks, scheduler):
        self.has_prompt, self.seconds = False, []

    def after_schedule(self, plan):
        self.has_prompt = plan is not None and plan.num_decodes < len(plan.scheduled)
        return []

    def completed(self, plan, seconds):
        self.seconds.append((plan.num_decodes < len(plan.scheduled), seconds))


@pytest.mark.parametrize("is_async", [False, True])
def test_each_step_has_its_own_time(is_async, tmp_path):
    """Regression: with asynchronous scheduling on a CPU, where a step has run when it is launched, each step had the
    time of the next one."""
    folder = tiny.write_model(tmp_path, "qwen3")
    options = dict(device="cpu", max_model_len=128, skip_tokenizer_init=True, async_scheduling=is_async)
    with LLM(str(folder), more_parts=[Times], **options) as llm:
        core = llm.core
        times, run = core.parts.find(Times), core.ranks.step

        def run_slowly(packed, options):
            time.sleep(SLOW_S if times.has_prompt else 0)
            return run(packed, options)

        core.ranks.step = run_slowly
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for number in range(3):
            core.add(Request(str(number), list(range(number, number + 40)), params))
            for _ in range(4):
                core.step()
        while core.has_work:
            core.step()
    assert [has_prompt for has_prompt, _ in times.seconds].count(True) == 3
    for has_prompt, seconds in times.seconds:
        assert (seconds >= SLOW_S) == has_prompt, times.seconds
