"""Kernels compiled on one machine are fetched by the next. Another machine is another cache folder here."""

import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import textwrap
from io import BytesIO
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shoal import LLM
from shoal.cli.main import main
from shoal.engine import compile_cache
from shoal.engine.compile_cache import CompileCache, archive_of, extract, keep_kernels_together, local_names
from shoal.errors import ConfigError
from shoal.kernels import c_library


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(name)` moves to a machine of that name, with a cache folder of its own."""

    def move(name):
        monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / name))
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        keep_kernels_together()
        return tmp_path / name

    yield move
    os.environ.pop("TRITON_CACHE_DIR", None)


def compile_kernel(folder, name, files=("k.cubin", "k.json")):
    """As Triton leaves one behind."""
    kernel = folder / "triton" / name
    kernel.mkdir(parents=True)
    for file in files:
        (kernel / file).write_bytes(file.encode())
    paths = {file: str(kernel / file) for file in files}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))


def compile_library(folder, name="cpu-1.so"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\x7fELF" + name.encode())


def test_what_one_machine_compiled_the_next_has(machine, tmp_path):
    url = f"file://{tmp_path}/store"
    first = machine("first")
    compile_library(first)
    compile_library(first, "attention-1.cubin")
    compile_kernel(first, "AAAA")
    assert CompileCache(url).download() == 0
    assert CompileCache(url).upload() == 3
    assert CompileCache(url).upload() == 0  # it is there
    second = machine("second")
    assert CompileCache(url).download() == 3
    assert (second / "cpu-1.so").read_bytes() == (first / "cpu-1.so").read_bytes()
    assert sorted(local_names()) == ["attention-1.cubin", "cpu-1.so", "triton-AAAA"]
    paths = json.loads((second / "triton/AAAA/__grp__k.json").read_text())["child_paths"]
    assert paths == {name: str(second / "triton/AAAA" / name) for name in ("k.cubin", "k.json")}
    assert all(Path(path).read_bytes() == name.encode() for name, path in paths.items())
    assert CompileCache(url).download() == 0


def test_a_kernel_that_is_still_being_compiled_is_not_offered(machine):
    folder = machine("only")
    compile_kernel(folder, "WHOLE")
    compile_kernel(folder, "PART")
    (folder / "triton/PART/k.cubin").unlink()
    compile_kernel(folder, "BUSY")
    (folder / "triton/BUSY/tmp.pid_1_abc").mkdir()
    (folder / "triton/LAUNCHER").mkdir()
    (folder / "triton/EMPTY").mkdir()
    (folder / "triton/LAUNCHER/launcher.so").write_bytes(b"so")
    assert sorted(local_names()) == ["triton-LAUNCHER", "triton-WHOLE"]


def test_libraries_that_were_fetched_are_the_ones_that_a_build_finds(machine, tmp_path, monkeypatch):
    """The key holds: a machine with the same compiler and processor builds nothing."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.c").write_text("int one(void) { return 1; }\n")
    machine("first")
    c_library.build(source, ["one.c"], [], ["-O1", "-fPIC"])
    url = f"file://{tmp_path}/store"
    assert CompileCache(url).upload() == 1
    second = machine("second")
    assert CompileCache(url).download() == 1
    monkeypatch.setattr(c_library, "_compile", None)  # it would fail
    assert c_library.build(source, ["one.c"], [], ["-O1", "-fPIC"]).parent == second


def test_a_library_is_built_among_temporary_files_where_no_cache_can_be_written(
    machine, tmp_path, monkeypatch, caplog
):
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    machine("/proc/not/there")
    built = c_library.build(tmp_path, ["one.c"], [], ["-O1", "-fPIC"])
    assert built.parent == tmp_path / f"shoal-{os.getuid()}" and local_names() == [built.name]
    assert "the cache folder /proc/not/there cannot be written" in caplog.text and len(caplog.records) == 1
    monkeypatch.setattr(c_library, "_compile", None)  # it would fail
    assert c_library.build(tmp_path, ["one.c"], [], ["-O1", "-fPIC"]) == built
    assert len(caplog.records) == 1


def test_a_kernel_of_triton_that_was_fetched_is_not_compiled_again(tmp_path):
    """In processes of their own, in which Triton does not interpret."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import sys
            from shoal.engine.compile_cache import CompileCache, keep_kernels_together
            keep_kernels_together()
            import triton, triton.language as tl
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource

            @triton.jit
            def double(x_ptr, SIZE: tl.constexpr):
                at = tl.arange(0, SIZE)
                tl.store(x_ptr + at, 2 * tl.load(x_ptr + at))

            def listen(*, cache_hit, **rest):
                print("hit" if cache_hit else "compiled")

            store = CompileCache(sys.argv[1])
            store.download()
            triton.knobs.compilation.listener = listen
            source = ASTSource(double, signature={"x_ptr": "*fp32", "SIZE": "constexpr"}, constexprs={(1,): 16})
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options={})
            store.upload()
            """
        )
    )
    printed = []
    for name in ("first", "second"):
        environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / name), "TRITON_INTERPRET": "0"}
        environment.pop("TRITON_CACHE_DIR", None)
        environment["PYTHONPATH"] = str(Path(__file__).parents[3])
        words = [sys.executable, str(program), f"file://{tmp_path}/store"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.split())
    assert printed == [["compiled"], ["hit"]]


class Broken(MemoryFileSystem):
    protocol = "broken"
    cachable = False

    def ls(self, path, detail=True, **options):
        raise PermissionError("denied")


def test_a_store_that_fails_costs_a_warning(machine, caplog):
    fsspec.register_implementation("broken", Broken, clobber=True)
    compile_library(machine("only"))
    with caplog.at_level(logging.WARNING):
        assert CompileCache("broken://user:secret@bucket/kernels").download() == 0
        assert CompileCache("broken://user:secret@bucket/kernels").upload() == 0
    printed = [record.getMessage() for record in caplog.records]
    assert printed == [
        f"compile_cache broken://bucket/kernels could not be {what}: PermissionError: denied"
        for what in ("read", "written")
    ]


def test_a_store_that_is_slow_does_not_hold_up_the_start(machine, monkeypatch, caplog):
    import threading

    asked = threading.Event()

    class Slow(MemoryFileSystem):
        protocol = "slow"
        cachable = False

        def ls(self, path, detail=True, **options):
            asked.wait(20)
            return []

    fsspec.register_implementation("slow", Slow, clobber=True)
    monkeypatch.setattr(compile_cache, "DOWNLOAD_S", 0.05)
    machine("only")
    with caplog.at_level(logging.WARNING):
        assert CompileCache("slow://bucket").download() == 0
    asked.set()
    assert "compile_cache slow://bucket is slow" in caplog.text


def test_a_url_of_no_file_system_is_refused():
    with pytest.raises(ConfigError, match=r"compile_cache nonsense://x can't be opened: .*nonsense"):
        CompileCache("nonsense://x")


@pytest.mark.parametrize("name", ["../evil.so", "triton-../evil", "triton-a/b", "triton-..", "..", "evil"])
def test_a_name_that_leads_elsewhere_is_refused(machine, name):
    machine("only")
    with pytest.raises(ValueError, match="a kernel or library must be named"):
        extract(name, b"")


@pytest.mark.parametrize("inside, kind", [("../evil", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)])
def test_an_archive_with_more_than_files_is_refused(machine, inside, kind):
    folder = machine("only")
    written = BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        member = tarfile.TarInfo(inside)
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(ValueError, match="must hold plain files only"):
        extract("triton-AAAA", written.getvalue())
    assert list((folder / "triton").iterdir()) == []


def test_what_another_process_fetched_meanwhile_stays(machine):
    folder = machine("only")
    compile_kernel(folder, "AAAA")
    packed = archive_of("triton-AAAA")
    extract("triton-AAAA", packed)
    assert local_names() == ["triton-AAAA"] and archive_of("triton-AAAA") == packed


def test_the_users_own_folder_for_triton_is_kept(machine, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    keep_kernels_together()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"


def test_shoal_compile_fills_a_store_from_which_another_machine_starts(folder, tmp_path, machine, capsys):
    """On the CPU, where what is compiled is C. This process may have loaded its libraries already, so the first
    machine begins with one."""
    url = f"file://{tmp_path}/store"
    compile_library(machine("first"), "kernels-1.so")
    assert main(["compile", str(folder), "--compile-cache", url]) == 0
    num_put = int(re.search(r"^(\d+) were put into file://", capsys.readouterr().out, re.MULTILINE)[1])
    assert num_put >= 1
    machine("second")
    assert main(["compile", str(folder), "--compile-cache", url]) == 0
    printed = capsys.readouterr().out
    assert f"were compiled, {num_put} fetched\n0 were put into file://" in printed
    third = machine("third")
    with LLM(str(folder), compile_cache=url):  # an engine does the same
        assert (third / "kernels-1.so").exists()
