"""Async tests without a plugin."""

import asyncio
import functools


def within(seconds):
    """A decorator that runs an async test; what hangs longer fails."""

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            return asyncio.run(asyncio.wait_for(test(*args, **kwargs), seconds))

        return run

    return decorate
