"""A value in one line of YAML: our own reader reads it back equal, alone and inside of braces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.parsing import flow_yaml, parse_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)
# What YAML takes for something else, in any mixture.
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
def test_what_is_written_reads_back_equal_in_one_line(value: Any) -> None:
    line = flow_yaml(value)
    assert len(line.splitlines()) <= 1
    (read,) = parse_yaml(f"key: {line}\nother: {{inner: {line}, list: [{line}]}}\n", "a line")
    assert read == {"key": value, "other": {"inner": value, "list": [value]}}
    assert str(read["key"]) == str(value)  # equal numbers of two types are two things


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"merge_method": "ties", "density": 0.3}, "{merge_method: ties, density: 0.3}"),
        ({"models": [{"model": "./a b"}, {"model": "acme/x"}]}, "{models: [{model: ./a b}, {model: acme/x}]}"),
        ("alice: it's ours", '"alice: it\'s ours"'),
        ("1e3", '"1e3"'),  # a number to readers of YAML 1.2
        ("held out.jsonl", "held out.jsonl"),
    ],
)
def test_quotes_stand_only_where_they_must(value: object, line: str) -> None:
    assert flow_yaml(value) == line
