"""Stage keys: equal for equal inputs, different for different inputs, and refused for values without a stable form."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mergegate.tasks.store.keys import NotInKey, canonical, digest, family_prefix, merkle, stage_key

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class Model(BaseModel):
    digest: str
    place: Annotated[Path, NotInKey]


@pytest.mark.story
@given(st.dictionaries(st.text(), json_values))
def test_the_order_of_a_mapping_does_not_matter(value: dict[str, object]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


@given(json_values)
def test_a_digest_is_the_sha256_of_plain_json(value: object) -> None:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert digest(value) == hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def test_a_field_marked_not_in_key_does_not_count() -> None:
    assert digest(Model(digest="d", place=Path("/a"))) == digest(Model(digest="d", place=Path("/b")))
    assert digest(Model(digest="d", place=Path("/a"))) != digest(Model(digest="e", place=Path("/a")))


def test_stage_and_version_are_part_of_the_key() -> None:
    assert len({stage_key("merge", 1, {"a": 1}), stage_key("merge", 2, {"a": 1}), stage_key("gate", 1, {"a": 1})}) == 3


def test_only_keys_of_one_family_share_a_prefix() -> None:
    def key(**inputs: object) -> str:
        return stage_key("evaluate", 1, inputs, "part")

    first, second = key(model="m", part=[0, 10]), key(model="m", part=[10, 20])
    prefix = family_prefix("evaluate", 1, {"model": "m", "part": "any"}, "part")
    assert first != second
    assert len(first) == len(second) == 64
    assert first.startswith(prefix)
    assert second.startswith(prefix)
    assert first[:32] != second[:32]  # Each has a separate directory.
    assert not key(model="other", part=[0, 10]).startswith(prefix)
    assert not stage_key("evaluate", 2, {"model": "m", "part": [0, 10]}, "part").startswith(prefix)
    assert first[16:] == stage_key("evaluate", 1, {"model": "m", "part": [0, 10]})[16:]


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", {1: 2}, float("nan")])
def test_a_value_without_a_canonical_form_is_an_error(value: object) -> None:
    error = ValueError if isinstance(value, float) else TypeError
    with pytest.raises(error, match=r"only string keys" if value == {1: 2} else "no canonical JSON form"):
        canonical(value)


def test_a_merkle_digest_covers_name_size_and_hash() -> None:
    trees = ({"a": (1, "x")}, {"b": (1, "x")}, {"a": (2, "x")}, {"a": (1, "y")})
    assert len(set(map(merkle, trees))) == 4
