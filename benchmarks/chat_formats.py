"""Microseconds that reading an answer takes for each streamed token, by family: words, reasoning, and a call
whose argument is a long text.

    python benchmarks/chat_formats.py [--length 4] [--runs 30]

A token has `--length` characters. Each number is the best of some runs, as the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from shoal.text.formats.registry import BY_NAME, THOUGHTS_BY_NAME
    from shoal.text.reading.reader import Expected, Reader
    from shoal.text.reading.thoughts import Start
    from tests.cpu.text.chat_families import FAMILIES, SCHEMAS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    prose = " ".join(f"some words of line {i}," for i in range(200))

    def microseconds(text: str, family_name: str, is_open: bool) -> float:
        family = FAMILIES[family_name]
        thoughts = THOUGHTS_BY_NAME[family.thoughts] if family.thoughts else None
        start = Start.INSIDE if is_open else Start.UNKNOWN
        expected = Expected(SCHEMAS, thoughts=thoughts, start=start)
        pieces = [text[i : i + arguments.length] for i in range(0, len(text), arguments.length)]
        best = float("inf")
        for _ in range(arguments.runs):
            reader = Reader(BY_NAME[family.form], expected)
            begun = time.perf_counter()
            for piece in pieces:
                reader.push(piece)
            best = min(best, time.perf_counter() - begun)
            reader.push("", "stop")
        return best / len(pieces) * 1e6

    print(f"{'us a token':26} words  reasoning  call")
    for name, family in FAMILIES.items():
        words = microseconds(family.say(prose), name, False)
        thoughts = "       -"
        if family.think is not None:
            thoughts = f"{microseconds(family.think(prose, family.say('Yes.')), name, family.opens):8.2f}"
        call = microseconds(family.call([("write", {"path": "a", "content": prose})]), name, False)
        print(f"{name:26} {words:5.2f} {thoughts} {call:7.2f}", flush=True)


if __name__ == "__main__":
    main()
