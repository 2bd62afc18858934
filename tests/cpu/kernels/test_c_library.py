"""C sources become libraries once, and a person who waits is told why."""

import os
import pty
import sys


def test_a_person_at_a_terminal_reads_why_the_first_start_waits(tmp_path):
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    code = (
        "from pathlib import Path; from shoal.kernels import c_library; "
        f"print(c_library.build(Path({str(tmp_path)!r}), ['answer.c'], [], ('-fPIC',)).exists())"
    )
    outputs = []
    for _ in range(2):
        child, terminal = pty.fork()
        if not child:
            os.environ["SHOAL_CACHE"] = str(tmp_path / "cache")
            os.execv(sys.executable, [sys.executable, "-c", code])
        output = b""
        try:
            while part := os.read(terminal, 4096):
                output += part
        except OSError:  # Linux ends a terminal's output this way
            pass
        os.waitpid(child, 0)
        outputs.append(output.decode())
    first, second = outputs
    assert "compiling C kernels for this processor" in first and "True" in first
    assert "compiling" not in second and "True" in second
