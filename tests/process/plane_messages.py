"""Messages of test_plane.py and its processes."""

import msgspec


class Note(msgspec.Struct):
    n: int
    text: str = ""
