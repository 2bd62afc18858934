"""Engine cores of tiny models (tiny_families.py), for tests that run steps themselves."""

import random
from contextlib import contextmanager

from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.weights.source import resolve
from tests.tiny_families import write_family


@contextmanager
def family_cores(root, **defaults):
    """Yields a function that builds the core of a family with these options and its own, and maybe with other fields
    of its config. At the end all cores are checked and ended."""
    made = []

    def make(name, fields=None, **options):
        given = {"dtype": "float32", "device": "cpu"} | defaults | options
        config = EngineConfig(model=str(write_family(root, name, **fields or {})), **given)
        made.append(EngineCore(config, resolve(config.model, None, None)))
        return made[-1]

    yield make
    for core in made:
        core.check()
        core.exit()
        core.check()


def numbers(count, seed):
    """Returns as many token ids below 100."""
    r = random.Random(seed)
    return [r.randrange(100) for _ in range(count)]
