"""The core stays small enough to be read: core_size.py counts what a reader must know to follow one token."""

from tests.cpu.core_size import LIMIT, code_lines, counted


def test_one_token_is_followed_through_few_lines():
    total = sum(lines for files in counted().values() for lines in files.values())
    assert total <= LIMIT, f"{total} lines: move what a token does not pass out of these files"


def test_lines_with_code_are_counted_and_others_not(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Docs.\n\nmore\n"""\n\n# a comment\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Docs."""\n    return """a\nb"""\n'
    )
    assert code_lines(file) == 3 + 1 + 2
