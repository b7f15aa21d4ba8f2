"""The header parser trusts nothing and refuses a header that does not tile the file exactly."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mergegate.merge_core.checkpoint.safetensors_file import MAX_TENSORS, parse_header, read_header, render_header
from mergegate.merge_core.errors import InvalidInput


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def parsed(header: object, data: int) -> Any:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, file_size=8 + len(text) + data, path=Path("x.safetensors"))


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "overlaps"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "gap"), ({"a": entry(0, 8, [2])}, 4, "truncated"),
        ({"a": entry(0, 8, [2])}, 12, "longer"), ({"a": entry(8, 0, [2])}, 8, "ascending"),
        ({"a": entry(-8, 0, [2])}, 8, "whole numbers"), ({"a": entry(0, 8, [-2])}, 8, "whole numbers"),
        ({"a": entry(0, 2**70, [2**68])}, 8, "whole numbers"), ({"a": entry(0, 2**62, [2**60])}, 8, "truncated"),
        ({"a": entry(0, 8, [3])}, 8, "12 bytes"), ({"a": entry(0, 8, [2], "Q9")}, 8, "dtype"),
        ({"a": entry(0, 8, [True, 2])}, 8, "whole numbers"), ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
        ({"a": entry(0, 8, [2]), "__metadata__": {"x": 1}}, 8, "__metadata__"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', 4, "twice"), (b"[]", 0, "object"),
        (b"{", 0, "JSON"), (b"[" * 100_000, 0, "levels"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(header: object, data: int, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parsed(header, data)


def test_a_name_that_occurs_twice_is_found_quickly_among_many() -> None:
    """Comparing each name with all names before it would take minutes."""
    entries = [f'"t{number}":0' for number in range(MAX_TENSORS - 1)]
    with pytest.raises(InvalidInput, match="twice") as caught:
        parsed(f"{{{','.join([*entries, entries[-1]])}}}".encode(), 0)
    assert caught.value.where == f"x.safetensors: t{MAX_TENSORS - 2}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, r"x\.safetensors") for content in (b"", b"1234567")),
        *((struct.pack("<Q", size) + b"{}", r"x\.safetensors") for size in (2**63, 50)),
        (None, "does not exist"),
    ],
)
def test_a_file_without_a_whole_header_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InvalidInput, match=words):
        read_header(tmp_path / "x.safetensors")


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["F32", "BF16", "I64", "BOOL"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_a_rendered_header_is_parsed_back(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    sizes = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
    rows = [(name, code, tuple(shape), math.prod(shape, start=sizes[code])) for name, (code, shape) in content.items()]
    header = render_header(rows, {"format": "pt"})
    assert len(header) % 8 == 0
    found = parse_header(header[8:], file_size=len(header) + sum(row[3] for row in rows), path=Path("x"))
    assert {(t.name, t.dtype.code, t.shape) for t in found} == {row[:3] for row in rows}
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    path.write_bytes(header + bytes(sum(row[3] for row in rows)))
    with safe_open(path, "pt") as reference:  # The reference implementation confirms that the header is well formed.
        assert set(reference.keys()) == set(content)
