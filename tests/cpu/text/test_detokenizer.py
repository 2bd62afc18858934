"""Text from tokens as they come: whole characters only, the text of decode in the end, and stop strings that
are never seen in part."""

import codecs
import random
import time

import pytest

from shoal.sampling_params import SamplingParams
from shoal.text.detokenizer import Detokenizer
from shoal.text.tokenizer import Tokenizer
from tests import texts

SPECIAL = ("<s>", "</s>")
BYTE_LEVEL = Tokenizer(texts.byte_level_backend(SPECIAL), {"bos_token": "<s>", "eos_token": "</s>"})
KINDS = {
    "byte-level": BYTE_LEVEL,
    "sentencepiece": Tokenizer.from_gguf(texts.sentencepiece_metadata(add_bos_token=False)),
}


def in_steps(ids, r=None):
    """One id a step, or several by r."""
    at = 0
    while at < len(ids):
        size = r.randint(1, 4) if r else 1
        yield list(ids[at : at + size])
        at += size


def run(tokenizer, ids, r=None, prompt=(), **params):
    """(pieces, stop string) of an answer that ends with the last id, or earlier by a stop string."""
    detokenizer, pieces, steps = (
        Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params), prompt),
        [],
        list(in_steps(ids, r)),
    )
    for i, step in enumerate(steps):
        text, stop = detokenizer.push(step, last=i == len(steps) - 1)
        pieces.append(text)
        if stop is not None:
            return pieces, stop
    return pieces, None


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_joined_are_the_decoded_text(kind, skip):
    tokenizer, r = KINDS[kind], random.Random(2)
    some = [tokenizer.encode(t) for t in texts.TEXTS + texts.random_texts(seed=4)]
    # some beyond the vocabulary
    some += [r.choices(range(len(tokenizer) + 20), k=r.randint(1, 20)) for _ in range(200)]
    some += [r.choices(range(259), k=8) for _ in range(200)]  # mostly bytes
    for ids in some:
        for steps in (None, r):
            pieces, _ = run(
                tokenizer, ids, steps, skip_special_tokens=skip, stop=[], min_tokens=r.choice((0, 3))
            )
            assert "".join(pieces) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_in_several_tokens_appears_whole(kind):
    tokenizer = KINDS[kind]
    pieces, _ = run(tokenizer, tokenizer.encode("a🚀b東é"))
    assert "".join(pieces) == "a🚀b東é" and not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_such():
    ids = BYTE_LEVEL.encode("🚀")
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams())
    assert detokenizer.push(ids[:-1]) == ("", None)
    assert detokenizer.push([], last=True) == ("\ufffd", None)


def test_a_character_begun_in_the_prompt_is_finished_in_the_answer():
    ids = BYTE_LEVEL.encode("a🚀b")
    pieces, _ = run(BYTE_LEVEL, ids[2:], prompt=ids[:2])
    assert "".join(pieces) == "🚀b"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_follows_its_prompt_wherever_that_ends(kind):
    tokenizer, r = KINDS[kind], random.Random(5)
    some = [tokenizer.encode(t) for t in texts.random_texts(seed=6)]
    some += [r.choices(range(259), k=12) for _ in range(200)]  # mostly bytes
    for ids in some:
        end = r.randint(1, max(1, len(ids) - 1))
        shown = [b"".join(tokenizer.token_bytes[i] for i in part) for part in (ids[:end], ids[end:])]
        if len(shown[0]) < 4:
            continue  # whether such a prompt shows anything is another test
        errors = tokenizer.token_bytes.errors
        first, used = codecs.utf_8_decode(shown[0], errors)
        # half a character that stays one is the prompt's
        expected = (shown[0][used:] + shown[1]).decode(errors=errors)
        expected = expected.removeprefix(shown[0][used:].decode(errors=errors))
        pieces, _ = run(tokenizer, ids[end:], prompt=ids[:end], skip_special_tokens=False)
        assert first and "".join(pieces) == expected, (ids, end)


def test_a_replacement_character_that_the_answer_completes_is_the_answers():
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("a\ufffdb", add_special_tokens=False)
    assert len(ids) == 5
    for end in range(1, 4):
        assert "".join(run(tokenizer, ids[end:], prompt=ids[:end])[0]) == "\ufffdb"


def test_the_first_space_is_the_answers_own_only_after_a_prompt():
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("the fox")
    assert "".join(run(tokenizer, ids)[0]) == "the fox"
    assert "".join(run(tokenizer, ids, prompt=tokenizer.encode("see"))[0]) == " the fox"
    half = [next(i for i in range(len(tokenizer)) if tokenizer.token_bytes[i] == b"\xc3")]
    assert "".join(run(tokenizer, ids, prompt=half)[0]) == " the fox"
    assert "".join(run(tokenizer, ids, prompt=[tokenizer.bos_token_id])[0]) == "the fox", (
        "an empty prompt counts as a missing one"
    )


# Stop strings


def first_stop(text, stops):
    """By definition: the text grows by one character; the first stop string that it ends with wins, the
    longest if there are several."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def test_any_stop_strings_in_any_text_end_it_where_they_are_first_complete():
    r = random.Random(8)
    print("seed 8")
    stopped = 0
    for _ in range(1500):
        text = "".join(r.choices("abc é", k=r.randint(1, 40)))
        stops = ["".join(r.choices("abc é", k=r.randint(1, 5))) for _ in range(r.randint(1, 4))]
        include = r.random() < 0.5
        pieces, stop = run(
            BYTE_LEVEL, BYTE_LEVEL.encode(text), r, stop=stops, include_stop_str_in_output=include
        )
        want = first_stop(text, stops)
        if want is None:
            assert ("".join(pieces), stop) == (text, None)
        else:
            stopped += 1
            assert ("".join(pieces), stop) == (text[: want[0] + len(want[1]) * include], want[1])
    assert 300 < stopped < 1400


def test_a_stream_never_shows_the_start_of_a_stop_string():
    text, seen = "one STO two STOP three", ""
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=["STOP", "OPEN"]))
    for i in BYTE_LEVEL.encode(text):
        piece, stop = detokenizer.push([i])
        seen += piece
        assert not any(seen.endswith("STOP"[:n]) for n in range(1, 5))
        if stop:
            break
    assert (seen, stop) == ("one STO two ", "STOP")


@pytest.mark.parametrize("stop", [" quick", "uic", "quick brown", "k b"])
def test_a_stop_string_may_lie_in_a_token_or_span_several(stop):
    text = "the quick brown fox"
    pieces, found = run(BYTE_LEVEL, BYTE_LEVEL.encode(text), stop=[stop])
    assert ("".join(pieces), found) == (text[: text.index(stop)], stop)


def test_text_held_back_comes_with_the_last_token():
    assert run(BYTE_LEVEL, BYTE_LEVEL.encode("say STO"), stop=["STOP"])[0][-1].endswith("STO")


def test_stop_strings_count_only_after_min_tokens():
    ids = [BYTE_LEVEL.encode(c)[0] for c in "ab.ab.ab."]
    for min_tokens, want in (
        (0, "ab"),
        (2, "ab"),
        (3, "ab.ab"),
        (5, "ab.ab"),
        (6, "ab.ab.ab"),
        (9, "ab.ab.ab."),
    ):
        for r in (None, random.Random(min_tokens), random.Random(-1)):
            assert "".join(run(BYTE_LEVEL, ids, r, stop=["."], min_tokens=min_tokens)[0]) == want
    # One that begins before and ends after counts; one inside text held back for another does not.
    assert run(BYTE_LEVEL, ids, stop=["b.a"], min_tokens=3) == (["a", "", ""] + [""], "b.a")
    assert "".join(run(BYTE_LEVEL, ids[:4], stop=[".", "b.x"], min_tokens=3)[0]) == "ab.a"


def test_a_stop_token_is_shown_only_with_stop_strings():
    for include, want in ((False, "a"), (True, "ab")):
        detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(include_stop_str_in_output=include))
        assert detokenizer.push(
            BYTE_LEVEL.encode("a") + BYTE_LEVEL.encode("b"), last=True, drop_last=True
        ) == (want, None)


def test_a_token_costs_the_same_however_long_the_answer():
    ids = BYTE_LEVEL.encode("the quick brown fox STO " * 400)
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=["STOP", "x" * 50]))

    def microseconds(times):
        start = time.perf_counter()
        for _ in range(times):
            for i in ids:
                detokenizer.push([i])
        return (time.perf_counter() - start) / times / len(ids) * 1e6

    early, late = microseconds(1), min(microseconds(2), microseconds(2))
    assert late < 3 * early + 5, (early, late)
