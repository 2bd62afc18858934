"""Random sleeps, wake-ups, updates and requests of a CPU engine against a small model of what they mean."""

import random

import pytest
from safetensors.torch import load_file

from shoal import LLM, SamplingParams
from shoal.engine.runner.rank_memory import CpuRegions
from shoal.errors import CheckpointError, UnavailableError
from tests import tiny

COUNT = 10
PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((3, 17, 40))]
TAGS = ("weights", "kv_cache")


@pytest.fixture(scope="module")
def expected(folder, root):
    """The answers of each of two models to the prompts."""
    folders = [folder, tiny.write_model(root, "llama")]
    return {path: [tiny.greedy(path, p, COUNT) for p in PROMPTS] for path in folders}


class Fuzz:
    """The engine beside the model: `level` asked for, what is `asleep`, where weights are `kept`, whether
    they are `lost`, the `folder` of the engine's model, and the streams that live or were aborted."""

    def __init__(self, folder, expected, rng, offload):
        self.llm = LLM(
            str(folder),
            dtype="float32",
            max_model_len=128,
            device="cpu",
            enable_sleep_mode=True,
            kv_cache_memory_bytes=4 << 20,
            sleep_offload=offload,
            async_scheduling=rng.random() < 0.5,
        )
        self.expected, self.rng, self.offload = expected, rng, offload
        self.folder = folder
        self.is_files = True  # whether memory holds what the file does, as far as the engine knows
        self.level, self.asleep, self.kept, self.lost, self.version = None, set(), "", False, 0
        self.streams = []  # [iterator, the tokens that it should give, its last output]
        self.actions = [
            *4 * [self.sleep],
            *6 * [self.wake_up],
            self.pause,
            *3 * [self.update],
            self.tensors,
            *3 * [self.become_another],
            *6 * [self.begin],
            *2 * [self.advance],
            self.leave,
            self.failing_sleep,
            self.failing_wake,
        ]

    @property
    def runs(self):
        return self.level is None and not self.lost

    def sleep(self):
        level, tags, mode = (
            self.rng.choice([0, 1, 1, 2]),
            self.rng.choice([None, ["weights"], ["kv_cache"], list(TAGS)]),
            self.mode(),
        )
        self.llm.sleep(level, tags, mode)
        self.settle(mode)
        chosen = set(tags or TAGS) if level else set()
        if "weights" in chosen:
            if level == 2:
                self.lost, self.kept = True, ""
            elif "weights" not in self.asleep:
                self.kept = "file" if self.offload == "file" and self.is_files and not self.lost else "host"
        self.asleep |= chosen
        self.level = max(level, self.level or 0)

    def failing_sleep(self):
        """Host memory is short: nothing has changed."""
        if "weights" in self.asleep:
            return
        self.once("release", lambda: self.llm.sleep(1, ["weights"], "abort"))

    def failing_wake(self):
        if self.asleep:
            self.once("take", self.llm.wake_up)

    def once(self, name, call):
        def fails(*arguments):
            raise MemoryError("no room")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(UnavailableError, match="no room"):
            patch.setattr(CpuRegions, name, fails)
            call()

    def pause(self):
        mode = self.mode()
        self.llm.sleep(level=0, mode=mode)
        self.settle(mode)
        self.level = self.level or 0

    def wake_up(self):
        tags = self.rng.choice([None, None, ["weights"], ["kv_cache"]])
        self.llm.wake_up(tags)
        self.asleep -= set(tags or TAGS)
        if "weights" not in self.asleep:
            self.kept = ""
        if not self.asleep:
            self.level = None

    def update(self):
        if "weights" in self.asleep:
            with pytest.raises(UnavailableError, match="asleep"):
                self.llm.update_weights(self.folder)
            return
        if self.rng.random() < 0.2:
            with pytest.raises(CheckpointError):
                self.llm.update_weights("/no/such/folder")
        self.llm.update_weights(self.folder)
        self.version, self.lost, self.is_files = self.version + 1, False, True

    def tensors(self):
        if "weights" not in self.asleep:
            weights = list(load_file(self.folder / "model.safetensors").items())
            half = len(weights) // 2
            self.rng.shuffle(weights)
            for part in (weights[:half], weights[half:]):
                self.llm.update_weights_from_tensors(dict(part))
            self.version, self.lost, self.is_files = self.version + 2, False, False

    def become_another(self):
        [other] = [path for path in self.expected if path != self.folder]
        if not (self.lost and "kv_cache" in self.asleep):
            with pytest.raises(CheckpointError, match=r"sleep at level 2"):
                self.llm.update_weights(other)
            return
        if self.rng.random() < 0.3:
            self.once("holding", lambda: self.llm.update_weights(other))
            self.level, self.asleep, self.kept = 2, set(TAGS), ""
            return
        self.llm.update_weights(other)
        for entry in list(self.streams):
            *_, entry[2] = [entry[2], *entry[0]]
            self.end(entry)  # One that nobody has read to its end may have all of its tokens.
        self.folder, self.version, self.is_files, self.lost = other, self.version + 1, True, False
        self.level, self.asleep, self.kept = 2, {"kv_cache"}, ""

    def begin(self):
        number = self.rng.randrange(len(PROMPTS))
        stream = self.llm.stream(
            PROMPTS[number], SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        )
        if not self.runs:
            with pytest.raises(UnavailableError):
                next(stream)
        else:
            self.streams.append([stream, self.expected[self.folder][number], next(stream)])

    def advance(self):
        if self.streams and self.runs:
            entry = self.rng.choice(self.streams)
            entry[2] = next(entry[0], entry[2])
            if entry[2].outputs[0].finish_reason:
                self.end(entry, "length")

    def leave(self):
        """Closing the iterator aborts the request, asleep or awake."""
        if self.streams:
            self.streams.pop(self.rng.randrange(len(self.streams)))[0].close()

    def mode(self):
        return self.rng.choice(["abort", "keep", "keep", "wait"])

    def settle(self, mode):
        """Applies the effect of a call in this mode to the streams: under "wait" they end, unless they can't run."""
        if mode == "abort" or (mode == "wait" and self.runs):
            for entry in list(self.streams):
                *_, entry[2] = [entry[2], *entry[0]]
                self.end(entry, "length" if mode == "wait" else None)

    def end(self, entry, reason=None):
        self.streams.remove(entry)
        output, wanted = entry[2].outputs[0], entry[1]
        assert output.finish_reason == (reason or output.finish_reason) and output.finish_reason in (
            "length",
            "abort",
        )
        assert list(output.token_ids) == wanted[: len(output.token_ids)]
        assert output.finish_reason == "abort" or len(output.token_ids) == COUNT

    def check(self):
        core, usage = self.llm.core, self.llm.memory_usage()
        core.check()
        assert self.llm.is_sleeping == (self.level is not None) and core.sleep_state().level == self.level
        assert core.sleep_state().asleep == self.asleep and self.llm.weights_version == self.version
        assert {tag for tag in TAGS if not usage[tag]["device_bytes"]} == self.asleep
        assert (
            bool(usage["weights"]["host_bytes"]) == (self.kept == "host")
            and not usage["kv_cache"]["host_bytes"]
        )
        assert (core.paused is None) == self.runs
        if not self.runs and core.has_work:
            self.llm._step()  # reports ended requests, and then there is no work
            assert not core.has_work

    def finish(self):
        self.llm.wake_up()
        self.asleep, self.level = set(), None
        if self.lost:
            self.llm.update_weights(self.folder)
            self.lost = False
        for entry in list(self.streams):
            *_, entry[2] = [entry[2], *entry[0]]
            self.end(entry, "length")
        params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        assert [list(o.outputs[0].token_ids) for o in self.llm.generate(PROMPTS, params)] == self.expected[
            self.folder
        ]
        stats = self.llm.stats()
        assert stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("offload", ["host", pytest.param("file", marks=pytest.mark.slow)])
def test_sleep_wake_update_and_requests_against_a_model(folder, expected, offload):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(3):
        fuzz = Fuzz(folder, expected, rng, offload)
        done = []
        try:
            for _ in range(80):
                action = rng.choice(fuzz.actions)
                done.append(action.__name__)
                action()
                fuzz.check()
            fuzz.finish()
        except BaseException:
            print(done)
            raise
        finally:
            fuzz.llm.exit()
