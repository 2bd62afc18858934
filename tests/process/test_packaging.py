"""Built packages: the sdist has the files of a clone, the wheel has the files that Shoal needs, and the wheel
runs in a clean environment."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]
BUILD = (
    "import sys; from setuptools import build_meta; folder = sys.argv[1]; getattr(build_meta, "
    "sys.argv[2])(folder)"
)
# what lies here beside what git knows
NOT_OURS = (".*", "__pycache__", "node_modules", "build", "dist", "*.egg-info", "*.so")


def build(what, folder, **environment):
    """By setuptools, out of a copy of this tree in `folder` / "tree"."""
    if not (folder / "tree").exists():
        shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_OURS))
        shutil.copytree(ROOT / ".ci", folder / "tree" / ".ci")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder), f"build_{what}"],
        cwd=folder / "tree",
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def files_below(*folders):
    """The files below these folders of the tree."""
    found = {p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()}
    return {p for p in found if not {"__pycache__", "node_modules"} & {*p.parts} and p.suffix != ".so"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build("wheel", folder)
    (path,) = folder.glob("*.whl")
    return path


def test_make_clean_leaves_nothing_of_an_installation_or_a_test_run(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = [tmp_path / "Makefile", tmp_path / "shoal/memory/vmm.c"]
    left = [
        ".venv/bin/shoal",
        "build/lib/a.py",
        "shoal.egg-info/PKG-INFO",
        "shoal/memory/_vmm.cpython-312.so",
        "shoal/__pycache__/api.cpython-312.pyc",
        ".hypothesis/examples/a",
        ".ruff_cache/a",
    ]
    for path in [*kept[1:], *(tmp_path / name for name in left)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


def test_the_sdist_holds_what_a_clone_holds(tmp_path):
    build("sdist", tmp_path)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {Path(*Path(member.name).parts[1:]) for member in archive if member.isfile()}
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and not path.match("*.egg-info")]
    ours = files_below(
        *(name for name in folders if not name.startswith(".") and name not in ("build", "dist"))
    )
    assert (
        ours
        | {
            Path(name)
            for name in ("Makefile", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", ".ci/run")
        }
        <= names
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist()}
    extra = {path for path in names if not path.parts[0].endswith(".dist-info") and path.suffix != ".so"}
    assert extra == files_below("shoal")


def test_the_metadata_says_who_where_and_for_what(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert (
        metadata["Name"] == "shoal" and metadata["Author"] and metadata["License-Expression"] == "Apache-2.0"
    )
    assert metadata["Summary"] and metadata["Keywords"] and metadata["License-File"] == "LICENSE"
    assert {url.split(",")[0] for url in metadata.get_all("Project-URL")} >= {
        "Homepage",
        "Documentation",
        "Source",
        "Issues",
    }
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    assert not any(line.startswith("License ::") for line in classifiers), (
        "pip refuses them beside a license expression"
    )


def test_without_a_c_compiler_the_wheel_lacks_the_extension_alone(wheel, tmp_path):
    build("wheel", tmp_path, PATH="", CC="")
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as without, zipfile.ZipFile(wheel) as with_one:
        missing = set(with_one.namelist()) - set(without.namelist())
    assert len(missing) == 1 and missing.pop().startswith("shoal/memory/_vmm.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "installer, compiler",
    [("pip", True), ("pip", False), ("uv", True)],
    ids=["with a C compiler", "without", "by uv"],
)
def test_the_wheel_runs_in_a_clean_environment(wheel, tmp_path, installer, compiler):
    """Clean but for what Shoal depends on, which is taken from here."""
    bin = tmp_path / "venv" / "bin"
    if installer == "uv":
        uv = [pytest.importorskip("uv").find_uv_bin(), "--quiet", "--offline", "--no-cache"]
        subprocess.run([*uv, "venv", "--python", sys.executable, tmp_path / "venv"], check=True)
        install = [*uv, "pip", "install", "--python", bin / "python"]
    else:
        venv.create(tmp_path / "venv", with_pip=True)
        install = [bin / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-index", "--no-deps", wheel], check=True, cwd=tmp_path)
    paths = dict(base=str(tmp_path / "venv"), platbase=str(tmp_path / "venv"))
    (Path(sysconfig.get_path("purelib", vars=paths)) / "ours.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "SHOAL_CACHE": str(tmp_path)
    }
    if not compiler:
        environment["PATH"] = ""

    def run(*command):
        done = subprocess.run(
            [str(part) for part in command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    where = run(bin / "python", "-c", "import shoal; print(shoal.__file__, shoal.__version__)").stdout.split()
    assert Path(where[0]).is_relative_to(tmp_path / "venv")
    assert run(bin / "shoal", "--version").stdout.split()[-1] == where[1]
    size = ("--dtype", "float32", "--max-model-len", "64", "--max-tokens", "4", "--temperature", "0")
    done = run(bin / "shoal", "generate", "ab", "--model", tiny.write_model(tmp_path, "qwen3"), *size)
    assert done.stdout.startswith("ab") and ("no C kernels" in done.stderr) != compiler
