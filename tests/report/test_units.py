"""Test the formatting of byte counts and short durations."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.wording import format_bytes, format_short_time

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1 kB"),
        (1000, "1 kB"),
        (913_408, "913 kB"),
        (999_600, "1 MB"),
        (1_499_000_000, "1.5 GB"),
        (2_471_645_608, "2.47 GB"),
        (999_700_000_000, "1 TB"),
        (3_500_000_000_000_000, "3500 TB"),
    ],
)
def test_sizes_read_in_decimal_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.floats(1, 1e15))
def test_a_size_is_accurate_to_three_digits_and_below_a_thousand_units(count: float) -> None:
    found = re.fullmatch(r"([\d.]+) (\wB|B)", format_bytes(count))
    assert found is not None
    shown = float(found[1]) * UNITS[found[2]]
    assert shown == pytest.approx(count, rel=0.005, abs=0.5)
    assert float(found[1]) < 1000 or found[2] == "TB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0042, "4.2 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (1.449, "1.4 s"),
        (9.96, "10 s"),
        (38.4, "38 s"),
        (1234, "1,234 s"),
    ],
)
def test_durations_use_a_suitable_unit(seconds: float, text: str) -> None:
    assert format_short_time(seconds) == text
