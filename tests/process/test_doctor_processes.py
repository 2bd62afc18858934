"""`shoal doctor` as a user meets it, in processes: on this machine as it is, and with one thing broken
each."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nats_server, tiny
from tests.serving import ROOT, free_port, listens
from tests.waiting import eventually

# What a CPU build of torch says of itself; it is imported in no time.
FAKE_TORCH = """__version__, __file__ = "9.9.9", "/nowhere/torch/__init__.py"
class version:
    cuda = None
"""


@pytest.fixture
def packages(tmp_path):
    """A folder whose packages come before the installed ones."""
    folder = tmp_path / "packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(FAKE_TORCH)
    return folder


@pytest.fixture
def doctor(packages, tmp_path):
    """Runs `shoal doctor --json`; returns the exit code and the findings by what they are about."""

    def run(*arguments, prefix=(), limits=(), **environment):
        path = os.pathsep.join([str(packages), str(ROOT)])
        given = os.environ | {"PYTHONPATH": path, "SHOAL_CACHE": str(tmp_path / "cache")} | environment

        def limit():
            for kind, value in limits:
                resource.setrlimit(kind, (value, value))

        done = subprocess.run(
            [*prefix, sys.executable, "-m", "shoal", "doctor", "--json", *map(str, arguments)],
            env=given,
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=limit,
        )
        assert not done.stderr, done.stderr
        told = json.loads(done.stdout)
        assert done.returncode == (0 if told["works"] else 1)
        return done.returncode, {one["about"]: one for one in told["findings"]}

    return run


def fleet_file(folder, text):
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def of(findings, *beginnings):
    """The one finding that is about something that begins so."""
    [found] = [one for about, one in findings.items() if about.startswith(beginnings)]
    return found


def check(told, about, verdict, words=""):
    """Checks that the finding has this verdict, which is also the overall one, and these words."""
    code, findings = told
    found = of(findings, about)
    assert (code, found["verdict"]) == (int(verdict == "fails"), verdict), found
    assert words in f"{found['found']} {found['means']} {found['remedy']}"


def test_it_ends_well_on_this_machine_with_the_torch_that_is_installed(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "shoal", "doctor", "--device", "cpu", "--port", "0"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done
    assert "\nworks         torch: " in done.stdout and "What you asked for works" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_taken_port_that_was_asked_for_fails(doctor):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check(doctor("--port", taken.getsockname()[1]), "port ", "fails", "in use")


def test_a_fleets_file_asks_for_its_ports_its_models_and_its_program(doctor, tmp_path, root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f'port = {port}\nmodel = "{tiny.write_model(root, "qwen3")}"\n'
        text += '[[workers]]\noptions = { device = "cpu" }\n'
        text += '[[workers]]\ncommand = "no-such-program --port {port}"\n'
        code, findings = doctor(fleet_file(tmp_path, text))
    assert code == 1
    assert of(findings, f"port {port}")["verdict"] == "fails"
    assert of(findings, "model ")["verdict"] == "works"
    assert of(findings, "program no-such-program")["verdict"] == "fails"
    assert of(findings, "fleet file")["verdict"] == "works"


def test_a_malformed_fleets_file_is_a_finding_that_names_the_mistake(doctor, tmp_path):
    code, findings = doctor(fleet_file(tmp_path, "[[workers]]\ncuont = 2\n"))
    assert code == 1 and "cuont" in of(findings, "fleet file")["found"]
    assert of(findings, "system")["verdict"] == "works"


def test_an_unknown_model_fails(doctor, tmp_path):
    check(doctor("--model", tmp_path / "no-model"), "model ", "fails", "does not exist")


def test_a_model_of_a_hub_that_cannot_be_reached_fails(doctor, tmp_path):
    """Regression: the HTTP client's ConnectError, not an OSError, broke the check, so the verdict was
    good."""
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HUB_CACHE": str(tmp_path / "hub")}
    told = doctor("--port", "0", "--model", "Qwen/Qwen3-0.6B", **environment)
    check(told, "model Qwen/Qwen3-0.6B", "fails", "nor to be had from the Hugging Face hub")
    assert of(told[1], "model Qwen/Qwen3-0.6B")["is_asked"]


@pytest.mark.parametrize("model", ["./none", "../none", "org/na--me"])
def test_a_name_that_the_hub_does_not_allow_fails(doctor, model):
    check(doctor("--port", "0", "--model", model), f"model {model}", "fails", "name")


def test_workers_for_gpus_that_are_not_here_fail(doctor, tmp_path, root):
    text = f'port = 0\nmodel = "{tiny.write_model(root, "qwen3")}"\n[[workers]]\ndevices = [63]\n'
    check(doctor(fleet_file(tmp_path, text)), "GPUs of the workers", "fails", "63")


@pytest.mark.parametrize(
    "code_of_torch, words",
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os; os.abort()", "SIGABRT"),
    ],
    ids=["cannot be imported", "crashes"],
)
def test_a_broken_torch_is_a_finding_and_no_traceback(doctor, packages, code_of_torch, words):
    (packages / "torch/__init__.py").write_text(code_of_torch)
    check(doctor("--port", "0"), "torch", "fails", words)


def test_few_open_files_limit_and_too_few_fail(doctor):
    check(doctor("--port", "0", limits=[(resource.RLIMIT_NOFILE, 1024)]), "open files", "limited")
    check(doctor("--port", "0", limits=[(resource.RLIMIT_NOFILE, 256)]), "open files", "fails")


def test_a_low_limit_of_locked_memory_is_told(doctor):
    told = doctor("--port", "0", limits=[(resource.RLIMIT_MEMLOCK, 64 << 10)])
    check(told, "locked memory", "limited", "64 KiB (ulimit -l)")


def test_without_a_compiler_models_on_the_cpu_are_slower(doctor, tmp_path):
    check(doctor("--port", "0", "--device", "cpu", PATH=str(tmp_path)), "C compiler", "limited", "slower")


def test_a_cache_folder_that_cannot_be_is_found(doctor, tmp_path):
    (tmp_path / "a-file").write_text("")
    check(doctor("--port", "0", SHOAL_CACHE=str(tmp_path / "a-file/cache")), "cache", "fails")


def mounting(*commands):
    """Words before a command that give it mounts of its own. Skips where this process may not."""
    words = ["unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("this process may not mount: run it as root")
    return words


def test_a_full_cache_folder_and_a_small_dev_shm_are_found(doctor, tmp_path):
    (cache := tmp_path / "small").mkdir()
    prefix = mounting(f"mount -t tmpfs -o size=64k tmpfs {cache}", "mount -t tmpfs -o size=1m tmpfs /dev/shm")
    code, findings = doctor("--port", "0", prefix=prefix, SHOAL_CACHE=str(cache))
    assert code == 1 and "No space left" in of(findings, "cache")["found"]
    assert of(findings, "/dev/shm")["verdict"] == "limited"


def test_a_default_model_that_does_not_fit_into_the_cache_is_found_before_its_folder_is_made(
    doctor, tmp_path
):
    """Regression: the check skipped a folder that did not exist yet, and did not compare the model's size."""
    (disk := tmp_path / "disk").mkdir()
    prefix = mounting(f"mount -t tmpfs -o size=20k tmpfs {disk}")
    told = doctor("--port", "0", "--model", "smollm2", prefix=prefix, SHOAL_CACHE=str(disk / "shoal"))
    check(told, "model smollm2", "fails", f"Make room in {disk}/shoal, or name another folder (SHOAL_CACHE)")
    check(told, "cache", "fails", "No space left")


def test_a_read_only_cache_folder_and_dev_shm_are_found(doctor, tmp_path):
    (cache := tmp_path / "fixed").mkdir()
    prefix = mounting(f"mount -t tmpfs -o ro tmpfs {cache}", "mount -t tmpfs -o ro tmpfs /dev/shm")
    code, findings = doctor("--port", "0", prefix=prefix, SHOAL_CACHE=str(cache))
    assert code == 1 and "Read-only" in of(findings, "cache")["found"]
    assert of(findings, "/dev/shm")["verdict"] == "fails"


def test_a_nats_server_that_is_not_there_fails(doctor):
    check(doctor("--port", "0", "--plane", f"nats://127.0.0.1:{free_port()}"), "plane ", "fails", "refuse")


def test_a_nats_server_that_hangs_fails_in_bounded_time(doctor):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check(
            doctor("--port", "0", "--plane", f"nats://127.0.0.1:{silent.getsockname()[1]}"),
            "plane ",
            "fails",
            "does not answer",
        )


def test_a_models_store_that_hangs_fails_in_bounded_time_and_is_named(doctor):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/model"
        check(
            doctor("--port", "0", "--model", url), f"model {url}", "fails", "store does not answer within 8 s"
        )


@pytest.mark.parametrize("jetstream", [True, False])
def test_a_nats_server_needs_jetstream(doctor, tmp_path, jetstream):
    port = free_port()
    words = [nats_server.find(), "-a", "127.0.0.1", "-p", str(port), "-sd", str(tmp_path / "js")]
    with subprocess.Popen([*words, *(["-js"] if jetstream else [])], stderr=subprocess.DEVNULL) as server:
        try:
            eventually(lambda: listens(port))
            told = doctor("--port", "0", "--plane", f"nats://127.0.0.1:{port}")
        finally:
            server.kill()
    code, findings = told
    plane = of(findings, "plane ")
    # A loaded machine may find its own server far away, and then says "limited".
    assert (code, plane["verdict"] == "fails") == (int(not jetstream), not jetstream), plane
    assert "JetStream" in plane["found"]


def test_a_package_that_is_missing_fails_only_where_it_is_asked_for(doctor, packages, tmp_path, root):
    (packages / "sitecustomize.py").write_text("import sys\nsys.modules['circus'] = None\n")
    text = f'port = 0\nmodel = "{tiny.write_model(root, "qwen3")}"\n'
    text += '[[workers]]\noptions = { device = "cpu" }\n[planner]\nconnector = "circus"\n'
    check(doctor(fleet_file(tmp_path, text)), "circus", "fails", "pip install 'shoal[circus]'")
    assert doctor("--port", "0")[0] == 0


def test_a_worker_of_another_engine_that_is_not_there_fails(doctor, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    check(doctor(fleet_file(tmp_path, f'port = 0\n[router]\nworker = ["{url}"]\n')), f"worker {url}", "fails")


def test_a_file_and_options_beside_it_are_a_mistake(tmp_path):
    words = [sys.executable, "-m", "shoal", "doctor", str(fleet_file(tmp_path, "")), "--port", "1"]
    done = subprocess.run(words, cwd=Path(ROOT), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("shoal: port: ") and not done.stdout
