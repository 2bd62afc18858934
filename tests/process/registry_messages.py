"""Messages of test_registry.py and its processes."""

import msgspec


class Note(msgspec.Struct):
    n: int
    text: str = ""
