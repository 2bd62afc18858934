"""A fleet's file: what it says is what is started, and every mistake is named before anything is."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import pytest

from shoal.cli.main import build_parser
from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError
from shoal.fleet.config import FleetConfig
from shoal.fleet.file.components import components_of
from shoal.fleet.file.fleet_file import ExternalWorkers, NativeWorkers, read_fleet_file
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.routing.policy import RouterWeights
from shoal.fleet.simulator.config import read_sim_config
from shoal.options.parser import given_options

EXAMPLES = Path(__file__).parents[4] / "examples" / "fleet"
MODEL = 'model = "smollm2"\n'
WORKERS = '[[workers]]\nrole = "both"\ncount = 1\n'
EXTERNAL = "[[workers]]\ncommand = 'vllm serve m --port {port}'\n"


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "fleet.toml").write_text(text)
        return read_fleet_file(tmp_path / "fleet.toml")

    return read


@pytest.fixture
def gpus(monkeypatch):
    """Sets the machine's number of GPUs."""

    def give(names):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)

    give("")
    return give


def test_a_whole_file_is_read(read):
    file = read(
        """
        model = "smollm2"
        port = 0
        admin_port = 9001
        api_key = ["k"]
        [[workers]]
        count = 2
        devices = [0, 1]
        options = { max_model_len = 1024, dtype = "float32" }
        [[workers]]
        model = "Qwen/Qwen3-0.6B"
        name = "qwen"
        role = "decode"
        [[workers]]
        command = "vllm serve m --port {port}"
        [router]
        policy = "round_robin"
        migration_limit = 5
        worker = ["http://127.0.0.1:9,id=old"]
        [plane]
        url = "nats://10.0.0.1:4222"
        """
    )
    first, second, third = file.workers
    assert first == NativeWorkers(
        "smollm2", count=2, devices=[0, 1], options={"max_model_len": 1024, "dtype": "float32"}
    )
    assert second == NativeWorkers("Qwen/Qwen3-0.6B", name="qwen", role="decode")
    assert third == ExternalWorkers("vllm serve m --port {port}")
    assert (file.server.port, file.server.admin_port, file.server.api_key) == (0, 9001, ["k"])
    router = file.router
    assert (router.policy, router.migration_limit, router.plane) == ("round_robin", 5, "nats://10.0.0.1:4222")
    assert [spec.id for spec in router.workers] == ["old"]


def test_weights_of_the_cost_are_keys_of_the_router(read):
    weights = read("[router]\nprefill_load_scale = 2\nrouter_temperature = 0.5").router.weights
    assert weights == RouterWeights(prefill_load_scale=2, router_temperature=0.5)


@pytest.mark.parametrize("name", ["laptop", "four_gpus", "two_hosts"])
def test_a_fleet_of_ours_can_be_simulated_from_its_own_file(name, tmp_path):
    text = (EXAMPLES / f"{name}.toml").read_text()
    (tmp_path / "sim.toml").write_text(re.sub("(?m)^model = .*$", 'model = "qwen3-8b"', text))
    [workers] = read_fleet_file(EXAMPLES / f"{name}.toml").workers
    assert read_sim_config(tmp_path / "sim.toml").workers[0].count == workers.count


def test_a_byte_order_mark_is_no_part_of_the_file(read):
    assert read("\ufeffmodel = 'm'\n" + WORKERS).workers == [NativeWorkers("m", role="both", count=1)]


def test_a_file_of_nothing_but_a_worker_serves_the_default_model(read):
    assert read("[[workers]]").workers == [NativeWorkers("smollm2")]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("model = ", "cannot be read"),
        ("model = smollm2", 'line 1, column 9); text must be in quotes: model = "smollm2"'),
        ("[plane]\nurl = tcp://h:1  # ours", 'line 2, column 7); text must be in quotes: url = "tcp://h:1"'),
        ("port = 1\nport = 2\n", "line 2, column 9); the line is: port = 2"),
        ("[router\n", "the line is: [router"),
        (
            MODEL + "colour = 'red'\n" + WORKERS,
            "unknown key 'colour' in the file; choose one of admin_host, ",
        ),
        (MODEL + "restart = true\n", "unknown key 'restart' in the file"),
        ("port = '8000'", "port must be of the type int, got '8000'"),
        ("port = 70000", "port must be an integer from 0 to 65535, got 70000"),
        (WORKERS + "cuont = 2", "[[workers]] 1: unknown key 'cuont' in [[workers]]; did you mean 'count'?"),
        (
            WORKERS + "max_model_length = 2",
            "unknown key 'max_model_length' in [[workers]]; choose one of command, ",
        ),
        (WORKERS + "options = { max_model_length = 2 }", "[[workers]]; did you mean 'max_model_len'?"),
        (WORKERS + WORKERS.replace("1", "-1"), "[[workers]] 2: count must be from 0 to 4096, got -1"),
        (WORKERS.replace("1", "'1'"), "count must be of the type int, got '1'"),
        (WORKERS.replace("both", "juggler"), "role must be one of both, prefill, decode, got 'juggler'"),
        ("model = 3\n" + WORKERS, "model must be of the type str, got 3"),
        (WORKERS + "options = 3", "options must be of the type "),
        (WORKERS + "options = { blok_size = 16 }", "unknown key 'blok_size' in options of [[workers]]"),
        (WORKERS + "options = { blok_size = 16 }", "did you mean 'block_size'?"),
        (
            WORKERS + "options = { block_size = 15 }",
            "block_size must be a power of two from 1 to 256, got 15",
        ),
        (WORKERS + "options = { max_model_len = '1k' }", "max_model_len must be of the type int, got '1k'"),
        (WORKERS + "options = { kv_events_config = { topics = 'x' } }", "no field 'topics'"),
        (WORKERS + "options = { port = 1 }", "unknown key 'port' in options"),
        (WORKERS + "options = { pipeline_parallel_size = 2 }", "pipeline_parallel_size must be 1"),
        (
            WORKERS + "options = { shutdown_timeout = -1 }",
            "shutdown_timeout must be a finite number in [0, inf), got -1",
        ),
        (
            WORKERS.replace("1", "3") + "devices = [0, 1]",
            "devices must name 1 GPUs for each of 3 workers, got [0, 1]",
        ),
        (
            WORKERS + "devices = [0]\noptions = { tensor_parallel_size = 2 }",
            "must name 2 GPUs for each of 1 workers",
        ),
        (WORKERS + "devices = [-1]", "devices must be at least 0, got [-1]"),
        (
            WORKERS + "devices = [0, 1, 0]\noptions = { tensor_parallel_size = 2 }",
            "devices [0, 1, 0] names a GPU twice, and each of these workers takes 2 that differ",
        ),
        ("model = ''\n" + WORKERS, "[[workers]] 1: model must not be empty; give a folder"),
        (WORKERS + "model = ' '", "[[workers]] 1: model must not be empty; give a folder"),
        (WORKERS + "name = ''", "[[workers]] 1: name must not be empty; give the model's name for clients"),
        (EXTERNAL + "name = ''", "[[workers]] 1: name must not be empty; give the model's name for clients"),
        (WORKERS + "devices = 'all'", "devices must be of the type list[int], got 'all'"),
        (WORKERS + "worker = 'http://127.0.0.1:9'", "unknown key 'worker' in [[workers]]"),
        (
            "[[workers]]\nname = 'x'\nmodel = 'a'\n[[workers]]\nname = 'x'\nmodel = 'b'\n",
            "name 'x' must be for one model, got 'a' and 'b'",
        ),
        (
            EXTERNAL + "model = 'm'",
            "unknown key 'model' in [[workers]] with a command; choose one of command, ",
        ),
        (EXTERNAL.replace("serve", '"serve'), "cannot be split into words: No closing quotation"),
        ("[[workers]]\ncommand = ''", "command must not be empty"),
        (EXTERNAL.replace("{port}", "8000"), "has {port}, and command 'vllm serve m --port 8000' has not"),
        (EXTERNAL + "worker = 'http://127.0.0.1:8000'\ncount = 2", "2 workers cannot share a port"),
        (
            EXTERNAL + "worker = 'http://127.0.0.1:{port},colour=red'",
            "unknown key 'colour' in worker 'http://",
        ),
        (EXTERNAL + "worker = 'http://127.0.0.1:{port},id=x'", "worker must not have an id"),
        ("workers = 3", "workers must be a list of tables; write [[workers]]"),
        ("router = 3", "router must be a table, got 3; write [router]"),
        ("[router]\npolciy = 'kv'", "unknown key 'polciy' in [router]"),
        ("[router]\npolicy = 'best'", "policy must be one of kv, kv_approx"),
        ("[router]\nprefill_load_scale = 'x'", "prefill_load_scale must be of the type float, got 'x'"),
        (
            "[router]\nprefill_load_scale = -1",
            "prefill_load_scale must be a finite number in [0, inf), got -1",
        ),
        ("[router]\nweights = {}", "unknown key 'weights' in [router]"),
        (
            "[router]\ntrack_prefill_tokens = false",
            "[router] has track_prefill_tokens, which was removed: blocks to compute always count; leave it "
            "out",
        ),
        ("[router]\nplane = 'tcp://127.0.0.1:1'", "unknown key 'plane' in [router]"),
        ("[plane]\nulr = 'x'", "unknown key 'ulr' in [plane]; did you mean 'url'?"),
    ],
)
def test_a_mistake_is_told_with_the_file_and_what_there_is(read, tmp_path, text, wrong):
    with pytest.raises(ConfigError) as error:
        read(text)
    assert str(tmp_path / "fleet.toml") in str(error.value) and wrong in str(error.value)


def words_of(text, read, **more):
    return [component.command for component in components_of(read(text).workers, "ipc:///p", **more)]


def test_options_become_flags_that_shoal_serve_reads_back_as_they_were(read, gpus):
    options = {
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "cudagraph_capture_sizes": [1, 2],
        "chat_template": "{{ messages }} --with dashes",
        "structured_outputs_config": {"disable_additional_properties": False},
        "shutdown_timeout": 5,
        "worker_tags": ["gold", "eu"],
        "weights_from_peers": True,
    }
    shown = ", ".join(
        [
            "max_model_len = 1024, gpu_memory_utilization = 0.5, enable_prefix_caching = true",
            "enforce_eager = false, cudagraph_capture_sizes = [1, 2]",
            'chat_template = "{{ messages }} --with dashes", shutdown_timeout = 5',
            'worker_tags = ["gold", "eu"], weights_from_peers = true',
            "structured_outputs_config = { disable_additional_properties = false }",
        ]
    )
    [words] = words_of(f"{MODEL}[[workers]]\nname = 'small'\noptions = {{ {shown} }}", read)
    arguments = build_parser().parse_args(words[3:])
    engine, server = given_options(arguments, EngineConfig), given_options(arguments, ServerConfig)
    assert arguments.model_path == "smollm2" and server["served_model_name"] == ["small"]
    names = set(options) - {"shutdown_timeout", "worker_tags", "weights_from_peers"}
    assert EngineConfig(**engine) == EngineConfig(**{name: options[name] for name in names})
    assert server["shutdown_timeout"] == 5 and server["port"] == 0
    assert server["worker_tags"] == ["gold", "eu"] and server["weights_from_peers"] is True


def test_workers_on_the_cpu_share_its_cores(read, gpus, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))

    def threads(text):
        found = components_of(read(text).workers, "ipc:///p")
        return [component.environment.get("OMP_NUM_THREADS") for component in found]

    assert threads("[[workers]]\ncount = 1") == [None]
    assert threads("[[workers]]\ncount = 2\n[[workers]]\nrole = 'decode'") == ["2", "2"]
    assert threads("[[workers]]\ncount = 20") == ["1"]
    gpus("0,1")
    assert threads("[[workers]]\ncount = 2") == [None]
    assert threads("[[workers]]\ncount = 4\noptions = { device = 'cpu' }") == ["2"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads("[[workers]]\ncount = 4\noptions = { device = 'cpu' }") == [None]


def test_gpus_are_taken_in_order_where_the_file_names_none(read, gpus):
    gpus("4,5,6,7")
    text = "[[workers]]\n[[workers]]\ncount = 1\noptions = { tensor_parallel_size = 2 }\n[[workers]]\n"
    found = components_of(read(text).workers, "ipc:///p")
    assert [component.devices for component in found] == [("4",), ("5", "6"), ("7",)]
    with pytest.raises(ConfigError, match=r"\[\[workers\]\] 4 needs 1 GPUs, and 0 of the 4 here are left"):
        components_of(read(text + "[[workers]]").workers, "ipc:///p")
    named = components_of(read("[[workers]]\ndevices = [10, 9]").workers, "ipc:///p")
    assert named[0].devices == ("9", "10")


PREFILL = "[[workers]]\nrole = 'prefill'\n"
BOTH = "[[workers]]\nrole = 'both'\n"
EXCHANGES = "options = { kv_transfer_config = { kv_role = 'kv_both' } }\n"


def test_prefill_workers_need_workers_that_read_their_blocks(read):
    for partner in ("[[workers]]\nrole = 'decode'\n", BOTH + EXCHANGES):
        assert read(PREFILL + partner).workers[0].role == "prefill"
    for text in (PREFILL, PREFILL + BOTH, PREFILL + BOTH + EXCHANGES.replace("kv_both", "kv_producer")):
        with pytest.raises(ConfigError, match=r'no decode workers.*role = "decode".*kv_role = "kv_both"'):
            read(text)


def test_prefill_workers_need_partners_that_are_there_at_first_or_that_a_planner_adds(read):
    """Their requests were refused for ever."""
    decode, both = "[[workers]]\nrole = 'decode'\ncount = 0\n", f"{BOTH}count = 0\n{EXCHANGES}"
    enabled = "[planner]\nenabled = true\n"
    for partner in (decode, both):
        for planner in ("", "[planner]\nmax_gpu_budget = 4\n", f"{enabled}no_operation = true\n"):
            with pytest.raises(ConfigError, match=r"'smollm2' has prefill workers, .* count = 0; .* enabled"):
                read(PREFILL + partner + planner)
        for least in (0, 1):  # at least one decode worker stays
            assert read(f"{PREFILL}{partner}{enabled}min_endpoint = {least}\n").planner.enabled
        assert read(PREFILL + "count = 0\n" + partner).workers, "nobody computes prompts for nobody"
        assert read(PREFILL + partner + "[plane]\nurl = 'nats://10.0.0.1:4222'\n").workers, "on other hosts"
    assert read(PREFILL + decode + BOTH + EXCHANGES).workers


def test_workers_of_all_roles_get_their_options(read, gpus):
    text = PREFILL + BOTH + EXCHANGES + "[[workers]]\nrole = 'decode'\ncount = 2\n"
    found = components_of(read(text).workers, "ipc:///p")
    parsed = [build_parser().parse_args(one.command[3:]) for one in found]
    assert [one.role for one in parsed] == ["prefill", "both", "decode"]
    [transfer] = [word for word in found[1].command if "kv_role" in word]
    assert json.loads(transfer[transfer.index("{") :]) == {"kv_role": "kv_both"}


def test_components_have_names_of_their_own(read, gpus):
    text = """
        [[workers]]
        model = "Qwen/Qwen3-8B"
        [[workers]]
        model = "Qwen/Qwen3-8B"
        role = "prefill"
        [[workers]]
        model = "Qwen/Qwen3-8B"
        options = { device = "cpu" }
        [[workers]]
        command = "/opt/vllm/bin/vllm serve m --port {port}"
        [plane]
        url = "nats://127.0.0.1:4222"
    """
    found = components_of(read(text).workers, "ipc:///p", prefix="host-")
    assert [component.name for component in found] == [
        "host-Qwen3-8B",
        "host-Qwen3-8B-prefill",
        "host-Qwen3-8B-3",
        "host-vllm",
    ]
    assert [found[0].death_signal, found[3].death_signal] == [signal.SIGKILL, signal.SIGTERM]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_is_a_fleet_whose_workers_can_be_started(path, gpus):
    file = read_fleet_file(path)
    assert file.workers and file.server.admin_port
    for component, group in zip(components_of(file.workers, "ipc:///p"), file.workers, strict=True):
        if isinstance(group, NativeWorkers):
            build_parser().parse_args(component.command[3:])
        else:
            assert component.command[:3] == ("vllm", "serve", "Qwen/Qwen3-8B")


def test_there_are_the_examples_that_the_docs_name():
    own = {"laptop", "laptop_prefill", "four_gpus", "four_gpus_prefill", "two_hosts", "ray"}
    own |= {"planner", "circus", "virtual", "namespaces"}
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == own | {"vllm"}


@pytest.mark.parametrize("name", ["laptop_prefill", "four_gpus_prefill"])
def test_prefill_and_decode_apart_are_as_many(name):
    prefill, decode = read_fleet_file(EXAMPLES / f"{name}.toml").workers
    assert (prefill.role, decode.role) == ("prefill", "decode") and prefill.count == decode.count


def test_a_planner_sizes_another_engines_workers_if_it_knows_their_model(read):
    planner = "\n[planner]\nenabled = true\n"
    with pytest.raises(
        ConfigError, match=r"\[\[workers\]\] 1 has a command and no name, and \[planner\] needs"
    ):
        read(EXTERNAL + planner)
    file = read(EXTERNAL + "name = 'm'\n" + planner)
    [component] = components_of(file.workers, "ipc:///p")
    assert (component.model, component.role, component.worker) == ("m", "both", "http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="there are two tables of them"):
        read(2 * (EXTERNAL + "name = 'm'\n") + planner)


def test_workers_that_change_their_role_are_alike_and_exchange_blocks(read):
    both = 'kv_transfer_config = { kv_role = "kv_both" }'
    planner = "[planner]\nenabled = true\nchange_roles = true\n"

    def of(prefill, decode):
        roles = {"prefill": prefill, "decode": decode}
        tables = [f'[[workers]]\nrole = "{role}"\noptions = {{ {roles[role]} }}\n' for role in roles]
        return read("".join(tables) + planner)

    assert of(both, both).planner.change_roles and of(both, "").planner.change_roles
    with pytest.raises(ConfigError, match="all have to lend and read KV blocks; add kv_transfer_config"):
        of("", "")
    with pytest.raises(ConfigError, match="these have other options than those before"):
        of(both, both + ", max_model_len = 512")


@pytest.mark.parametrize(
    "table, option",
    [
        ("options = { tensor_parallel_size = 2 }", "decode_engine_num_gpu"),
        ("role = 'decode'\noptions = { tensor_parallel_size = 2 }", "decode_engine_num_gpu"),
        ("command = 'x {port}'\nname = 'm'\ndevices_per_worker = 2", "decode_engine_num_gpu"),
        (
            "role = 'decode'\n[[workers]]\nrole = 'prefill'\noptions = { tensor_parallel_size = 2 }",
            "prefill_engine_num_gpu",
        ),
    ],
)
def test_a_planner_that_counts_too_few_gpus_for_a_worker_is_refused(read, table, option):
    """The fleet would exceed its budget."""
    text = f"[[workers]]\n{table}\n[planner]\nenabled = true\n"
    with pytest.raises(ConfigError, match=f"each of these takes 2 GPUs, and .* counts 1 .*{option} = 2"):
        read(text)
    assert read(f"{text}{option} = 2\n").planner.enabled


def test_a_prefill_worker_that_would_lend_nothing_is_refused_with_the_file(read):
    text = '[[workers]]\nrole = "decode"\n[[workers]]\nrole = "prefill"\noptions = {{ kv_transfer_config = {{ kv_role = "{}" }} }}\n'
    with pytest.raises(ConfigError, match="must lend its KV blocks"):
        read(text.format("kv_consumer"))
    assert len(read(text.format("kv_producer")).workers) == 2


def test_an_adviser_may_look_at_a_fleet_beyond_its_budget(read):
    table = "[[workers]]\ncount = 9\n[planner]\nenabled = true\n"
    with pytest.raises(ConfigError, match="at first have 9 GPUs, and max_gpu_budget is 8"):
        read(table)
    assert read(f"{table}no_operation = true\n").planner.no_operation


def test_workers_of_a_file_with_a_planner_share_the_gpus_that_are_left(read):
    """Also where the planner is a process of its own."""
    assert not read("[[workers]]\n").may_grow
    assert read("[[workers]]\n[planner]\nmax_gpu_budget = 4\n").may_grow


def test_a_key_that_a_page_puts_into_a_table_is_one_of_that_table():
    tables = {"router": FleetConfig, "planner": PlannerConfig}
    named = [
        found
        for page in (EXAMPLES.parents[1] / "docs").rglob("*.md")
        for found in re.findall(r"`(\w+)(?: = [^`]*)?` in\s`\[(router|planner)\]`", page.read_text())
    ]
    assert len(named) > 1
    for key, table in named:
        assert key in {one.name for one in dataclasses.fields(tables[table])}, (key, table)


def test_traces_are_asked_for_at_the_top_and_for_each_worker(read):
    url = "http://127.0.0.1:4318"
    options = f'options = {{ otlp_traces_endpoint = "{url}" }}\n'
    file = read(f'{MODEL}otlp_traces_endpoint = "{url}"\n{WORKERS}{options}')
    assert file.server.otlp_traces_endpoint == url
    [worker] = file.workers
    assert worker.options["otlp_traces_endpoint"] == url


def test_a_budget_that_is_too_small_for_the_workers_of_the_file_is_named(read):
    """Regression: a fleet exceeded its budget from the start, or could never reach its least numbers."""
    apart = '[[workers]]\nrole = "prefill"\ncount = 2\n[[workers]]\nrole = "decode"\n'
    planner = "[planner]\nenabled = true\n"
    with pytest.raises(ConfigError, match="at first have 3 GPUs, and max_gpu_budget is 2"):
        read(f"{apart}{planner}max_gpu_budget = 2\n")
    with pytest.raises(ConfigError, match=r"always stay \(min_endpoint 2, 2 kinds\) have 4 GPUs"):
        read(f"{apart}{planner}max_gpu_budget = 3\nmin_endpoint = 2\n")
    assert read(f"{apart}{planner}max_gpu_budget = 3\n").planner.enabled
