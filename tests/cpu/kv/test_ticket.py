"""Tickets as they travel: whole, damaged, and made up."""

import random

import msgspec
import pytest
from msgspec.structs import replace

from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.transfer.ticket import ExportAddress, Failure, Progress, Ticket, TransferError, seal, unseal

SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 3, 4, 8, "bfloat16", 4, num_blocks=32, tp_size=2)
OTHER = replace(SPEC, tp_rank=1)
TICKET = Ticket(
    id=b"0123456789abcdef",
    server="127.0.0.1:9",
    model=b"m",
    lease_s=30.0,
    blocks=(3, 1, 7),
    generations=(0, 5, 2),
    ranks=(
        (ExportAddress("shared_memory", (SPEC,), b"x"), ExportAddress("nixl", (SPEC,), b"y")),
        (ExportAddress("nixl", (OTHER,), b"z"),),
    ),
)


def refusal(sealed):
    with pytest.raises(TransferError) as caught:
        unseal(sealed)
    assert caught.value.failure is Failure.DAMAGED
    return str(caught.value)


def test_a_ticket_comes_back_as_it_was():
    assert unseal(seal(TICKET)) == TICKET


@pytest.mark.parametrize("seed", range(3))
def test_any_damage_is_noticed(seed):
    print(f"seed {seed}")
    rng, whole = random.Random(seed), seal(TICKET)
    for _ in range(300):
        damaged = bytearray(whole)
        match rng.randrange(4):
            case 0:
                for _ in range(rng.randint(1, 3)):
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            case 1:
                del damaged[rng.randrange(len(damaged)) :]
            case 2:
                damaged += rng.randbytes(rng.randint(1, 9))
            case 3:
                damaged = bytearray(rng.randbytes(rng.randrange(300)))
        if bytes(damaged) != whole:
            refusal(bytes(damaged))


@pytest.mark.parametrize("seed", range(3))
def test_garbage_under_a_right_digest_is_no_ticket(seed):
    """A forger of a ticket can compute its digest, too. The types and the limits still hold."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    plain = msgspec.to_builtins(TICKET, builtin_types=(bytes,))
    values = (None, -1, 0, 1 << 40, 1 << 63, 1.5, "x" * 300, b"", [], [[]], [1, 1], {}, [[{}]], True)
    refused = 0
    for _ in range(400):
        changed = dict(plain)
        changed[rng.choice([*changed, "surplus"])] = rng.choice(values)
        if rng.random() < 0.2:
            del changed[rng.choice(list(changed))]
        try:
            unseal(seal(changed))
        except TransferError as error:
            refused += error.failure is Failure.DAMAGED
    assert refused > 300


def test_a_ticket_that_contradicts_itself_is_refused():
    for change, said in (
        (dict(version=1), "version is 1"),
        (dict(blocks=(), generations=()), "no block"),
        (dict(blocks=(1, 1, 2)), "twice"),
        (dict(generations=(1,)), "3 blocks have 1 generation"),
        (dict(blocks=(3, 1, 32)), "block 32 of a cache of 32"),
        (dict(ranks=TICKET.ranks[:1]), "rank 0 of 1 has the spec of rank 0 of 2"),
        (dict(ranks=TICKET.ranks[::-1]), "has the spec of rank"),
        (dict(lease_s=float("nan")), "lease_s"),
        (
            dict(ranks=(TICKET.ranks[0], (ExportAddress("nixl", (replace(OTHER, head_dim=4),), b""),))),
            "head_dim",
        ),
    ):
        assert said in refusal(seal(replace(TICKET, **change)))
    wrong = msgspec.to_builtins(TICKET, builtin_types=(bytes,))
    wrong["ranks"][0][0]["specs"][0]["block_size"] = 0
    assert "block_size" in refusal(seal(wrong))


GROUPED = replace(
    TICKET,
    ranks=tuple(
        tuple(replace(one, specs=(*one.specs, replace(one.specs[0], num_layers=1))) for one in rank)
        for rank in TICKET.ranks
    ),
    groups=(0, 1, 0),
)


def test_a_ticket_of_several_groups_names_the_group_of_each_block():
    assert unseal(seal(GROUPED)) == GROUPED and GROUPED.num_layers == 1
    first, second = GROUPED.ranks
    less = tuple(replace(one, specs=one.specs[:1]) for one in second)
    for change, said in (
        (dict(groups=()), "3 blocks of 2 groups have 0 group numbers"),
        (dict(groups=(0, 1)), "3 blocks of 2 groups have 2 group numbers"),
        (dict(groups=(0, 2, 0)), "a block of group 2 of a cache of 2 groups"),
        (dict(ranks=(first, less)), "one has 1 groups of layers, another 2"),
    ):
        assert said in refusal(seal(replace(GROUPED, **change)))
    assert "a block of group 1" in refusal(seal(replace(TICKET, groups=(0, 1, 0))))


def test_a_ticket_of_the_version_before_is_refused_by_name():
    """A spec for each address, and no groups, as workers of the version before seal them."""
    plain = msgspec.to_builtins(TICKET, builtin_types=(bytes,))
    for rank in plain["ranks"]:
        for address in rank:
            [address["spec"]] = address.pop("specs")
    del plain["groups"]
    said = refusal(seal(plain | {"version": 1}))
    assert "its version is 1, and this worker knows 2; run equal versions of Shoal" in said


def test_progress_says_how_many_layers_a_block_has():
    assert [Progress(2, 4, 1).layers_of(i, 3) for i in range(6)] == [3, 3, 1, 1, 0, 0]
