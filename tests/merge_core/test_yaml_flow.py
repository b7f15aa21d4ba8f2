"""A value written as one line of YAML reads back as an equal value, alone and inside braces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.parsing import flow_yaml, parse_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)
# A mixture of strings that YAML can misread.
ODD = st.lists(
    st.sampled_from(
        ["no", "~", "1e3", ".5", "0x1", "2024-01-01", "<<", "=", "&", "*", "!", "- ", ": ", " #", "\n", ","]
    ),
    max_size=4,
).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | TEXT | ODD
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | ODD, inner, max_size=3), max_leaves=8
)


@given(value=VALUES)
def test_flow_yaml_writes_one_line_that_parses_to_the_same_value(value: Any) -> None:
    line = flow_yaml(value)
    assert len(line.splitlines()) <= 1
    (read,) = parse_yaml(f"key: {line}\nother: {{inner: {line}, list: [{line}]}}\n", "a line")
    assert read == {"key": value, "other": {"inner": value, "list": [value]}}
    assert str(read["key"]) == str(value)  # Equal numbers of different types are different values.


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"merge_method": "ties", "density": 0.3}, "{merge_method: ties, density: 0.3}"),
        ({"models": [{"model": "./a b"}, {"model": "acme/x"}]}, "{models: [{model: ./a b}, {model: acme/x}]}"),
        ("alice: it's ours", '"alice: it\'s ours"'),
        ("1e3", '"1e3"'),  # YAML 1.2 reads this as a number.
        ("held out.jsonl", "held out.jsonl"),
    ],
)
def test_flow_yaml_quotes_only_when_necessary(value: object, line: str) -> None:
    assert flow_yaml(value) == line
