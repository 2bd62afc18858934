"""`shoal plan --profile`: what is measured is a profile that a planner takes, for a model here and for the
simulator's."""

import itertools
from types import SimpleNamespace

import pytest

from shoal import LLM
from shoal.bench import worker_profile
from shoal.bench.worker_profile import NUM_STEPS, measure_profile
from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.fleet.planner.engine_profile import EngineProfile, read_profile


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        str(folder), dtype="float32", device="cpu", max_model_len=256, num_gpu_blocks_override=60
    ) as llm:
        yield llm


def test_a_profile_has_the_points_that_there_is_room_for(llm, monkeypatch):
    """By a clock that ticks at each look: on a machine with other work, times contradict each other."""
    monkeypatch.setattr(worker_profile, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    data = measure_profile(llm, [8, 32, 128, 4096], [16, 4096], [0.02, 0.1, 0.3, 0.95])
    assert [point.input_length for point in data.prefill] == [8, 32, 128]
    assert {point.context_length for point in data.decode} == {16 + NUM_STEPS // 2}
    usages = [point.kv_usage for point in data.decode]
    assert usages == sorted(usages) and len(usages) == 3 and usages[-1] == pytest.approx(0.3, abs=0.05)
    assert data.max_kv_tokens == 60 * llm.core.config.block_size and data.num_gpus == 1
    assert EngineProfile(data).itl_s(0.1, 30) > 0
    llm.core.check()


class Noisy:
    """A clock that ticks at each look, and makes these looks late."""

    def __init__(self, *late):
        self.late, self.looks, self.now = late, 0, 0.0

    def perf_counter(self):
        self.looks += 1
        self.now += 100.0 if self.looks in self.late else 1.0
        return self.now


def looks_until(prompts=0, points=0):
    """Two at each measurement: one of a warm-up, three of each prompt, one of each point."""
    return 2 * (1 + worker_profile.NUM_RUNS * prompts + points)


@pytest.mark.parametrize(
    "late",
    [
        [looks_until(1)],  # too few of one prompt's runs to count
        [looks_until(1), looks_until(1) - 2],  # two of three
        [looks_until(3, 1)],
        [looks_until(3, 1), looks_until(3, 2)],
        [looks_until(3, 1), looks_until(3, 4)],  # when it is measured again, too
    ],
)
def test_a_point_that_other_work_made_slow_is_measured_again(llm, monkeypatch, late):
    """Regression: one slow point discarded the whole measurement."""
    clock = Noisy(*late)
    monkeypatch.setattr(worker_profile, "time", clock)
    data = measure_profile(llm, [8, 32, 128], [16], [0.02, 0.1, 0.3])
    assert clock.looks > max(late)
    assert {point.ttft_s for point in data.prefill} == {1.0}
    assert {point.itl_s for point in data.decode} == {1.0 / NUM_STEPS}
    llm.core.check()


def test_a_point_that_stays_slow_is_given_up_after_a_few_measurements(llm, monkeypatch):
    clock = Noisy(*(looks_until(3, number) for number in (1, *range(4, 100))))
    monkeypatch.setattr(worker_profile, "time", clock)
    with pytest.raises(ConfigError, match="measure again"):
        measure_profile(llm, [8, 32, 128], [16], [0.02, 0.1, 0.3])
    assert clock.looks == looks_until(3, 3 + worker_profile.MOST_AGAIN)


def test_too_few_points_are_told(llm):
    with pytest.raises(ConfigError, match="--input-lengths must have two"):
        measure_profile(llm, [8, 4096], [16], [0.1])


def test_the_command_writes_a_profile_of_a_published_shape(tmp_path, capsys):
    file, picture = tmp_path / "p.json", tmp_path / "p.picture"
    words = ["plan", "--profile", "qwen3-8b", "--gpu", "h200", "--output", str(file), "--plot", str(picture)]
    assert main([*words, "--max-num-seqs", "64"]) == 0
    assert read_profile(file).data.max_num_seqs == 64 and picture.read_bytes()[:4] == b"\x89PNG"
    assert "qwen3-8b on simulated h200" in capsys.readouterr().out
    assert main(["plan", "--profile", "qwen9", "--gpu", "h200"]) == 1
    assert "qwen9" in capsys.readouterr().err


def test_a_simulated_profile_heeds_the_options_of_the_worker(tmp_path, capsys):
    """Regression: only the number of sequences had an effect, and other options were ignored silently."""
    file = tmp_path / "p.json"

    def profile(*words):
        command = ["plan", "--profile", "qwen3-8b", "--gpu", "h200", "--output", str(file), *words]
        assert main(command) == 0, capsys.readouterr().err
        return read_profile(file).data

    plain = profile()
    assert profile("--num-gpu-blocks-override", "4096", "--block-size", "32").max_kv_tokens == 4096 * 32
    assert profile("--kv-cache-memory-bytes", "1000000000").max_kv_tokens == 1_000_000_000 // (
        36 * 8 * 128 * 4
    )
    assert profile("--gpu-memory-utilization", "0.5").max_kv_tokens < plain.max_kv_tokens
    chunked = profile("--max-num-batched-tokens", "2048")
    for whole, parts in zip(plain.prefill, chunked.prefill):
        assert (parts.ttft_s > whole.ttft_s) == (whole.input_length > 2048)
    few = profile(
        "--input-lengths", "100", "200", "--context-lengths", "300", "400", "--kv-usages", "0.1", "0.2"
    )
    assert [point.input_length for point in few.prefill] == [100, 200]
    assert {point.context_length for point in few.decode} == {300, 400}
    assert main(["plan", "--profile", "qwen3-8b", "--gpu", "h200", "--max-model-len", "512"]) == 1
    assert "--max-model-len 512 changes nothing with --gpu h200" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        (["--replay", "r", "--output", "o"], "--output 'o' goes with --profile only"),
        (["--replay", "r", "--gpu", ""], "--gpu '' goes with --profile only"),
        (["--profile", "m", "--fleet", "f"], "--fleet 'f' goes with --replay only"),
    ],
)
def test_an_option_of_another_form_is_refused(words, told, capsys):
    assert main(["plan", *words]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        (["--kv-usages", "0.1", "nan"], "--kv-usages must be in (0, 1], got nan"),
        (["--kv-usages", "inf"], "--kv-usages must be in (0, 1], got inf"),
        (["--kv-usages", "0"], "--kv-usages must be in (0, 1], got 0"),
        (["--kv-usages", "1.5"], "--kv-usages must be in (0, 1], got 1.5"),
        (["--context-lengths", "0", "10"], "--context-lengths must be >= 1, got 0"),
        (["--input-lengths", "10", "-5"], "--input-lengths must be >= 1, got -5"),
    ],
)
def test_impossible_points_are_reported_in_a_line(words, told, capsys):
    assert main(["plan", "--profile", "qwen3-8b", "--gpu", "h200", *words]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        (
            ["--input-lengths", "5000000"],
            "up to the limit of 791484 tokens (max_model_len, KV cache), got none and 128, 512, ",
        ),
        (["--input-lengths", "100"], "got 100 and 128, 512, "),
        (["--input-lengths", "100", "100"], "got 100 and 128, 512, "),
        (["--context-lengths", "5000000"], "16384, 32768 and none; give shorter ones, or raise the limit"),
        (["--kv-usages", "0.0000001"], "--kv-usages must have a value between one and 1024 requests"),
        (["--kv-cache-memory-bytes", "1000000"], "up to the limit of 6 tokens"),
        (["--num-gpu-blocks-override", "3"], "up to the limit of 48 tokens"),
    ],
)
def test_a_profile_that_no_planner_takes_is_not_written(tmp_path, words, told, capsys):
    file = tmp_path / "p.json"
    command = ["plan", "--profile", "qwen3-8b", "--gpu", "h200", "--output", str(file)]
    assert main([*command, *words]) == 1 and not file.exists()
    assert told in capsys.readouterr().err


def test_a_length_that_is_given_twice_is_taken_once(tmp_path):
    file = tmp_path / "p.json"
    command = ["plan", "--profile", "qwen3-8b", "--gpu", "h200", "--output", str(file)]
    assert main([*command, "--context-lengths", "200", "100", "200", "--kv-usages", "0.1"]) == 0
    assert [point.context_length for point in read_profile(file).data.decode] == [100, 200]


def test_usages_that_have_no_room_are_told(llm):
    with pytest.raises(ConfigError, match="--kv-usages must have a value between one and"):
        measure_profile(llm, [8, 32], [16], [1.0])


@pytest.mark.parametrize("words", [[], ["--profile", "m", "--replay", "f"]])
def test_the_command_does_one_thing(words, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert "--replay" in capsys.readouterr().err
