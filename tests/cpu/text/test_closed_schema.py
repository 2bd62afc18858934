"""Schemas with their objects closed: jsonschema-rs says what fits, llguidance that what fits can be written,
pydantic what people send."""

import itertools
import json
import random

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from shoal.errors import RequestError
from shoal.sampling_params import StructuredOutputsParams
from shoal.text.grammar.closed_schema import closed
from shoal.text.grammar.structured import grammar_of

INT = {"type": "integer"}
BYTES = LLTokenizer("byte")


def obj(*required, **properties):
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def fits(schema, value):
    return jsonschema_rs.validator_for(schema).is_valid(value)


def can_write(value, **given):
    """Returns True if the grammar of these StructuredOutputsParams accepts the text of `value`."""
    matcher = LLMatcher(BYTES, grammar_of(StructuredOutputsParams(**given)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


TREE = {
    "$defs": {"Tree": obj(v=INT, kids={"type": "array", "items": {"$ref": "#/$defs/Tree"}})},
    "$ref": "#/$defs/Tree",
}
BASE = {"$defs": {"Base": obj("a", a=INT)}}


@pytest.mark.parametrize(
    "schema, inside, outside",
    [
        (obj(a=INT), [{"a": 1}, {}], [{"a": 1, "z": 1}]),
        (obj(), [{}], [{"z": 1}]),
        ({"properties": {"a": INT}}, [{"a": 1}], [{"z": 1}]),
        (obj("a", "b", a=INT), [{"a": 1, "b": "any"}], [{"a": 1, "b": 2, "z": 3}]),
        ({**obj(a=INT), "patternProperties": {"^x-": INT}}, [{"a": 1, "x-y": 2}], [{"a": 1, "y": 2}]),
        (obj(a=obj(b=INT)), [{"a": {"b": 1}}], [{"a": {"b": 1, "z": 1}}, {"a": {}, "z": 1}]),
        (
            {"type": "array", "items": obj(a=INT), "prefixItems": [obj(b=INT)]},
            [[{"b": 1}, {"a": 1}]],
            [[{"a": 1}], [{}, {"b": 1}]],
        ),
        ({"type": "object", "additionalProperties": obj(a=INT)}, [{"any": {"a": 1}}], [{"any": {"z": 1}}]),
        (TREE, [{"v": 1, "kids": [{"v": 2, "kids": []}]}], [{"v": 1, "kids": [{"z": 2}]}]),
        (obj(next={"$ref": "#"}, b=INT), [{"next": {"b": 1}}], [{"next": {"z": 1}}]),
        (obj(a=obj(x=INT), b={"$ref": "#/properties/a"}), [{"b": {"x": 1}}], [{"b": {"z": 1}}]),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"a/b": obj(x=INT)},
                **obj(a={"$ref": "#/definitions/a~1b"}),
            },
            [{"a": {"x": 1}}],
            [{"a": {"z": 1}}],
        ),
        (
            {"allOf": [{"$ref": "#/$defs/Base"}, obj(b=INT)], **BASE},
            [{"a": 1, "b": 2}, {"a": 1}],
            [{"a": 1, "z": 2}],
        ),
        ({"$ref": "#/$defs/Base", **obj(b=INT), **BASE}, [{"a": 1, "b": 2}], [{"a": 1, "z": 2}]),
        (
            obj(one={"allOf": [{"$ref": "#/$defs/Base"}], "description": "x"}, two={"$ref": "#/$defs/Base"})
            | BASE,
            [{"one": {"a": 1}, "two": {"a": 1}}],
            [{"one": {"a": 1, "z": 1}}, {"two": {"a": 1, "z": 1}}],
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/Base"}, {"type": "null"}], **BASE},
            [{"a": 1}, None],
            [{"a": 1, "z": 1}],
        ),
        (
            {**obj(a=INT), "anyOf": [obj("b", b=INT), obj("c", c=INT)]},
            [{"a": 1, "b": 1}, {"c": 1}],
            [{"b": 1, "z": 1}],
        ),
        (
            {**obj(a=INT, b=INT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1, "b": 2}, {"b": 2}],
            [{"a": 1, "z": 1}],
        ),
        (
            {"allOf": [{"anyOf": [obj(a=INT), obj(b=INT)]}, {"anyOf": [obj(c=INT), obj(d=INT)]}]},
            [{"a": 1, "d": 1}],
            [{"a": 1, "z": 1}],
        ),
        (obj(a=INT) | {"unevaluatedProperties": False}, [{"a": 1}], []),
    ],
    ids=str,
)
def test_keys_that_a_schema_names_are_allowed_and_no_others(schema, inside, outside):
    for value in inside:
        assert fits(schema, value) and fits(closed(schema), value) and can_write(value, json=schema), value
    for value in outside:
        assert (
            fits(schema, value) and not fits(closed(schema), value) and not can_write(value, json=schema)
        ), value
        assert can_write(value, json=schema, disable_additional_properties=False)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    "schema, inside, outside",
    [
        ({"properties": {"a": INT}, "required": ["a"]}, {"a": 1}, "text"),
        ({"type": "array", "items": {"properties": {"a": INT}}}, [{"a": 1}], [7]),
        ({"items": INT}, [1, 2], "text"),
        ({"properties": {"a": INT}, "type": ["object", "null"]}, None, "text"),
        ({"type": ["object", "null"], "anyOf": [{"properties": {"a": INT}}]}, None, "text"),
        ({"anyOf": [{"properties": {"a": INT}}, {"type": "null"}]}, None, "text"),
        (obj(properties={"type": "string"}), {"properties": "text"}, {"properties": 7}),
    ],
)
def test_who_lists_properties_means_an_object_and_who_has_items_a_list(schema, inside, outside, closes):
    assert can_write(inside, json=schema, disable_additional_properties=closes)
    assert not can_write(outside, json=schema, disable_additional_properties=closes)


@pytest.mark.parametrize(
    "schema, value",
    [
        ({"type": "object"}, {"z": 1}),
        ({}, {"z": 1}),
        (obj(a={"type": "object"}), {"a": {"z": 1}}),
        (obj(a=INT) | {"additionalProperties": True}, {"z": 1}),
        (obj(a=INT) | {"additionalProperties": INT}, {"z": 1}),
        ({"allOf": [obj(a=INT) | {"additionalProperties": True}, obj(b=INT)]}, {"a": 1, "z": 1}),
        ({"type": "object", "required": ["a"]}, {"a": 1, "z": 1}),
        (
            obj(a={"const": obj(b=INT)}, b={"enum": [{"properties": {}}]}),
            {"a": obj(b=INT), "b": {"properties": {}}},
        ),
    ],
    ids=str,
)
def test_what_is_open_by_its_own_word_or_names_nothing_stays_so(schema, value):
    assert fits(closed(schema), value) and can_write(value, json=schema)
    assert can_write({"z": 1}, json_object=True)


def test_compositions_are_closed_exactly_as_unevaluated_properties_would():
    random_ = random.Random(7)

    def part(depth):
        kinds = ["flat", "flat", "ref", "allOf"] if depth else ["flat"]
        found = {}
        for kind in random_.sample(kinds, random_.randint(1, 1 + bool(depth))):
            if kind == "flat":
                names = random_.sample("abcd", random_.randint(0, 2))
                found |= {
                    "properties": {n: random_.choice([INT, True]) for n in names},
                    "required": random_.sample(names, len(names) // 2),
                }
            elif kind == "ref":
                found["$ref"] = random_.choice(["#/$defs/one", "#/$defs/two"])
            else:
                found["allOf"] = [part(depth - 1) for _ in range(random_.randint(1, 3))]
        return found

    values = [dict.fromkeys(keys, 1) for n in range(4) for keys in itertools.combinations("abcdz", n)]
    for _ in range(300):
        schema = {
            **part(3),
            "$defs": {"one": part(0), "two": {**part(0), "allOf": [{"$ref": "#/$defs/one"}]}},
        }
        oracle = jsonschema_rs.validator_for({**schema, "unevaluatedProperties": False})
        found = jsonschema_rs.validator_for(closed(schema))
        assert [found.is_valid(v) for v in values] == [oracle.is_valid(v) for v in values], schema


def test_a_document_with_an_identity_is_closed_too():
    schema = {"$id": "http://example.org/x", "anyOf": [obj(a=INT), {"$ref": "#/$defs/Base"}], **BASE}
    assert fits(closed(schema), {"a": 1})
    assert not fits(closed(schema), {"a": 1, "z": 1}) and not can_write({"a": 1, "z": 1}, json=schema)


def test_what_is_no_schema_is_left_to_whoever_compiles_it():
    random_ = random.Random(3)
    words = [
        "properties",
        "patternProperties",
        "required",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "items",
        "$defs",
        "$id",
        "additionalProperties",
        "unevaluatedProperties",
        "type",
        "a",
    ]
    leaves = [None, True, False, 5, "a", "#", "#/$defs/a", "#/properties/a", [], {}, ["a"], [None], "object"]

    def anything(depth):
        if not depth or random_.random() < 0.3:
            return random_.choice(leaves)
        if random_.random() < 0.2:
            return [anything(depth - 1) for _ in range(random_.randint(0, 3))]
        return {word: anything(depth - 1) for word in random_.sample(words, random_.randint(0, 5))}

    for _ in range(20_000):
        schema = anything(4)
        if isinstance(schema, dict):
            json.dumps(closed(schema))


def test_references_that_cannot_be_followed_leave_the_schema_alone():
    for ref in ("#/$defs/nowhere", "http://example.org/x.json", "#anchor", 5, ["#"], "#/properties/a/3"):
        schema = obj(a=INT, b={"$ref": ref})
        assert closed(schema) is schema
    nested = obj(
        a={"$id": "http://example.org/a", "$defs": {"b": INT}, "properties": {"b": {"$ref": "#/$defs/b"}}}
    )
    assert closed(nested) is nested


def test_what_pydantic_writes_is_closed_at_every_level():
    class Node(BaseModel):
        name: str
        child: "Node | None" = None
        scores: dict[str, int] = {}

    class Tree(BaseModel):
        root: Node
        others: list[Node | int] = []

    schema = Tree.model_json_schema()
    value = Tree(
        root=Node(name="a", child=Node(name="b", scores={"any": 1})), others=[3, Node(name="c")]
    ).model_dump()
    assert fits(closed(schema), value) and can_write(value, json=schema)
    for change in (
        lambda v: v.update(z=1),
        lambda v: v["root"]["child"].update(z=1),
        lambda v: v["others"][1].update(z=1),
    ):
        wrong = json.loads(json.dumps(value))
        change(wrong)
        assert fits(schema, wrong) and not fits(closed(schema), wrong) and not can_write(wrong, json=schema)


def test_compositions_have_a_bound():
    branches = [obj(**{f"b{i}": INT}) for i in range(600)]
    with pytest.raises(RequestError, match="disable_additional_properties"):
        closed(obj(**{f"a{i}": INT for i in range(600)}) | {"anyOf": branches})
    shared = {"$defs": {"all": {"allOf": [{"properties": {f"p{i}": INT}} for i in range(800)]}}}
    with pytest.raises(RequestError, match="disable_additional_properties"):
        closed(
            obj(**{f"a{i}": {"allOf": [{"$ref": "#/$defs/all"}, obj(b=INT)]} for i in range(800)}) | shared
        )
