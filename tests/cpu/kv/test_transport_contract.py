"""The contract of every transport (kv/transfer/transport.py). A registered transport without an entry in
MEMORY fails here. Transports that need a GPU: tests/gpu/test_transport_gpu.py."""

import ast
import itertools
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import shoal
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.library.files import DirectFile
from shoal.kv.storage import host_memory
from shoal.kv.transfer.mapped import check_fit
from shoal.kv.transfer.registry import TRANSPORTS
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.view import BlockView
from tests import transport_cases

NAMES = pytest.mark.parametrize("name", transport_cases.transports_here())


def test_every_transport_has_its_contract_tested():
    assert transport_cases.MEMORY.keys() == set(transport_cases.NAMES)


@NAMES
@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_come_as_they_are(name, seed):
    transport_cases.check_blocks_come_as_they_are(name, host_memory, seed)


@NAMES
@pytest.mark.parametrize("case", transport_cases.CASES, ids=lambda case: case.__name__.removeprefix("check_"))
def test_what_every_transport_does(name, case):
    case(name, host_memory)


@pytest.mark.parametrize("offset", [1, -4, 1 << 40])
def test_an_address_of_shared_memory_where_no_cache_can_be_is_refused(offset):
    """Everything but the offset is right, the key too."""
    with transport_cases.owner_of("shared_memory", [transport_cases.SPEC]) as owner:
        [[address]] = owner.addresses()
        place = msgspec.msgpack.decode(address.memory)
        forged = replace(address, memory=msgspec.msgpack.encode([*place[:3], offset, *place[4:]]))
        with pytest.raises(TransferError) as caught:
            transport_cases.connect(
                "shared_memory", [[forged]], transport_cases.empty(transport_cases.SPEC, host_memory)
            )
        assert caught.value.failure is Failure.INCOMPATIBLE


def test_an_error_names_the_tensor_parallel_size_where_it_makes_other_groups():
    """Regression: with Gemma 4 the error asked for the same block_size, which was the same."""

    def specs(tp_size, tokens):
        one = CacheSpec(Layout.WHOLE_BLOCKS, 1, 1, 32, "float32", 16, tp_size=tp_size)
        return one, replace(one, num_heads=2, head_dim=16, block_size=tokens)

    views = [BlockView.over(spec, host_memory(spec.num_bytes)) for spec in specs(1, 16)]
    owners = [ExportAddress("nixl", specs(2, 32), b"")]
    with pytest.raises(TransferError, match=r"block_size is 32 .* 16 .*same .* and tensor_parallel_size$"):
        check_fit(owners, views)


@pytest.mark.parametrize("name", ["in_process", "shared_memory"])
def test_blocks_go_to_files_too(name, tmp_path):
    """Through a staging buffer, as no processor can access a direct-I/O file."""
    count = itertools.count()
    transport_cases.check_blocks_come_as_they_are(
        name, lambda num_bytes: DirectFile(tmp_path / str(next(count)), num_bytes), seed=3
    )


def test_no_transport_is_named_or_imported_outside_of_its_file_and_the_registry():
    """Else a new transport would have to be known in many places. One package is called as its transport
    is."""
    modules = {kind.__module__ for kind in TRANSPORTS}
    package = Path(shoal.__file__).parent
    own = {f"{module.removeprefix('shoal.').replace('.', '/')}.py" for module in modules}
    for path in package.rglob("*.py"):
        relative = path.relative_to(package).as_posix()
        if relative in own | {"kv/transfer/registry.py", "kv/transfer/nixl_agents.py", "doctor/libraries.py"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in transport_cases.NAMES, (
                    f"{relative}:{node.lineno} names {node.value!r}"
                )
            if isinstance(node, ast.ImportFrom):
                assert node.module not in modules, f"{relative}:{node.lineno}"
