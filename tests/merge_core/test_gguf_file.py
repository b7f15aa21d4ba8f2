"""The GGUF reader trusts nothing: every file gives its header or a message that names file and field."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from gguf_samples import F32, METADATA, Q8_0, gguf, metadata_entry, table_entry, text
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from mergegate.merge_core.checkpoint import GgufArray, GgufHeader, parse_gguf_header, read_gguf_header
from mergegate.merge_core.errors import InvalidInput

sys.path.append(str(Path(__file__).resolve().parents[1] / "hostile"))
from mutations import mutated  # found by the line above

NAMED = Path("x.gguf")
MOST_MEMORY = 64 * 2**20


def parsed(content: bytes) -> GgufHeader:
    return parse_gguf_header(io.BytesIO(content), len(content), NAMED)


def head(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def one_tensor(code: int = 0, shape: tuple[int, ...] = (8,), offset: int = 0, size: int = 32) -> bytes:
    """Return a file with one tensor in ``size`` bytes of data."""
    content = head(tensors=1) + table_entry("a", code, shape, offset)
    return content + bytes(-len(content) % 32) + bytes(size)


def test_the_header_has_metadata_and_tensors_with_their_positions(tmp_path: Path) -> None:
    content = gguf()
    (tmp_path / "x.gguf").write_bytes(content)
    header = read_gguf_header(tmp_path / "x.gguf")
    assert header.version == 3
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    tokens = b"".join(map(text, METADATA["tokenizer.ggml.tokens"][1]))
    assert header.metadata["tokenizer.ggml.tokens"] == GgufArray("string", 3, hashlib.sha256(tokens).hexdigest())
    assert [(tensor.name, tensor.type, tensor.shape) for tensor in header.tensors] == [
        ("token_embd.weight", "Q8_0", (3, 64)),
        ("blk.0.attn_norm.weight", "F32", (64,)),
        ("blk.0.ffn_up.weight", "Q4_K", (2, 256)),
        ("output_norm.weight", "F32", (5,)),
    ]
    assert [tensor.nbytes for tensor in header.tensors] == [6 * 34, 256, 2 * 144, 20]
    for tensor in header.tensors:
        assert content[tensor.offset : tensor.offset + 3] == b"\x01\x02\x03"


def test_the_padding_after_the_last_tensor_and_all_tensors_may_be_missing() -> None:
    assert parsed(gguf()[:-12]).tensors == parsed(gguf()).tensors
    assert parsed(gguf(tensors=())).tensors == ()
    assert parsed(head()).metadata == {}


@given(st.sampled_from([1, 2, 8, 32, 4096]))
def test_the_alignment_of_the_file_counts(alignment: int) -> None:
    metadata = {**METADATA, "general.alignment": ("I", alignment)}
    header = parsed(gguf(metadata, alignment=alignment))
    assert all(tensor.offset % alignment == 0 for tensor in header.tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with b''"), (b"GGML" + bytes(40), "begins with b'GGML'"), (b"GGUF", "version"),
        (head(version=1), "version 1"), (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "little-endian"),
        (head(tensors=2**63), "number of tensors: 9223372036854775808"),
        (head(entries=2**40), "number of metadata entries"), (head(tensors=5), "tensor 0"),
        (head(entries=5), "metadata 0"), (head(entries=1) + struct.pack("<Q", 2**62), "metadata 0: key: length"),
        (head(entries=1) + text("k") + struct.pack("<I", 13), "k: the value type 13"),
        (head(entries=1) + text("k") + struct.pack("<IQ", 8, 2**62), "k: length"),
        (head(entries=1) + text("k") + struct.pack("<IB", 7, 2), "k: a bool with the value 2"),
        (head(entries=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "k: an array with items of the type 9"),
        (head(entries=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60), "k: number of items"),
        (head(entries=1) + text("k") + struct.pack("<IIQ", 9, 8, 1_000_000), "k: 8000000 bytes"),
        (head(entries=1) + text("k") + struct.pack("<IIQ", 9, 12, 100_000_000), "k: 800000000 bytes"),
        (head(entries=1) + text(b"\xff") + struct.pack("<IB", 7, 1), "text in UTF-8"),
        (head(entries=2) + 2 * metadata_entry("k", ("B", 1)), "k: the metadata contain the key twice"),
        (gguf({"general.alignment": ("I", 3)}), "general.alignment: 3"),
        (gguf({"general.alignment": ("I", 0)}), "general.alignment: 0"),
        (gguf({"general.alignment": ("s", "32")}), "general.alignment: '32'"),
        (gguf({"general.alignment": ("?", True)}), "general.alignment: True"),
        (one_tensor(code=4), "a: the tensor type 4"), (one_tensor(code=99), "a: the tensor type 99"),
        (one_tensor(code=8), "a: rows of 8 elements of Q8_0"), (one_tensor(shape=(1, 1, 1, 1, 8)), "a: 5 dimensions"),
        (one_tensor(shape=(2**32, 2**32)), "elements"), (one_tensor(shape=(2**63,)), "elements"),
        (one_tensor(shape=(0, 2**63, 2**63)), "elements"), (one_tensor(shape=(2**40,)), "a: the file is truncated"),
        (one_tensor(offset=32, size=64), "a: offset 32: there is a gap"),
        (one_tensor(size=31), "a: the file is truncated"), (one_tensor(size=33), "longer than its header declares"),
        (gguf(tensors=[("a", F32, (8,)), ("a", F32, (8,))]), "a: the table contains the tensor twice"),
        (gguf(tensors=[("a" * 64, F32, (8,))]), "tensor 0: name: length: 64"),
        (
            head(tensors=2) + table_entry("a", 0, (8,), 0) + table_entry("b", 0, (8,), 0) + bytes(100),
            "b: offset 0: it overlaps",
        ),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused_with_its_field(content: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parsed(content)
    assert str(caught.value).startswith("x.gguf")
    assert message in str(caught.value)


def test_every_truncated_file_is_refused() -> None:
    content = gguf()
    last = 20  # bytes of the last tensor, before 12 bytes of padding
    for length in range(len(content) - 32 + last):
        with pytest.raises(InvalidInput, match=r"x\.gguf"):
            parsed(content[:length])


@pytest.mark.parametrize("seed", range(8))
def test_mutated_files_give_a_header_or_a_message(seed: int) -> None:
    random, others = Random(seed), (gguf(), gguf(tensors=[("w", Q8_0, (4, 32))]), os.urandom(200))
    for _ in range(100):
        content = mutated(random.choice(others[:2]), others, random)
        try:
            header = parsed(content)
        except InvalidInput as error:
            str(error).encode()
            continue
        assert all(0 < tensor.offset <= tensor.offset + tensor.nbytes <= len(content) for tensor in header.tensors)


def tensor_table(count: int) -> bytes:
    """Return a file with the longest names and different shapes."""
    table = b"".join(table_entry(f"{number:063d}", 0, (number + 300, 0, 2**31, 700), 0) for number in range(count))
    return head(tensors=count) + table + bytes(-(24 + len(table)) % 32)


PEAK = """
import sys, tracemalloc
from pathlib import Path
from mergegate.merge_core.checkpoint import read_gguf_header
from mergegate.merge_core.errors import InvalidInput
tracemalloc.start()
try:
    read_gguf_header(Path(sys.argv[1]))
    outcome = "read"
except InvalidInput as error:
    outcome = "refused" if "x.gguf" in str(error) else str(error)
print(outcome, tracemalloc.get_traced_memory()[1])
"""


def read_in_process(path: Path) -> tuple[str, int]:
    """Return the outcome and the peak memory in bytes, in a process without the threads of other tests."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    outcome, used = done.stdout.split()
    return outcome, int(used)


LARGEST: dict[str, Callable[[], bytes]] = {
    "tensors": lambda: tensor_table(8_000),
    "texts": lambda: (
        head(entries=16_000)
        + b"".join(metadata_entry(f"{number:09d}", ("s", "\U0001f600" * 60)) for number in range(16_000))
    ),
    "text": lambda: head(entries=1) + metadata_entry("k", ("s", "\U0001f600" * 999_000)),
    "tokens": lambda: head(entries=1) + metadata_entry("k", ("[s", ["token"] * 100_000)),
    "numbers": lambda: head(entries=1) + text("k") + struct.pack("<IIQ", 9, 10, 8_000_000) + bytes(64_000_000),
}


@pytest.mark.proof
@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_headers_need_less_than_64_mib(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(LARGEST[name]())
    outcome, used = read_in_process(tmp_path / "x.gguf")
    assert outcome == "read"
    share = 8_000 / 65_536 if name == "tensors" else 1  # memory is proportional to the number of tensors
    assert used < MOST_MEMORY * share


@pytest.mark.story
@pytest.mark.parametrize("claim", sampled([2**20, 2**31, 2**40, 2**63 - 1], [2**40], pytest.mark.proof))
def test_lengths_in_a_sparse_file_reserve_no_memory(claim: int, tmp_path: Path) -> None:
    starts = [
        head(entries=1) + struct.pack("<Q", claim),
        head(entries=1) + text("k") + struct.pack("<IQ", 8, claim),
        head(entries=1) + text("k") + struct.pack("<IIQ", 9, 0, claim),
        head(entries=1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, claim),
        head(tensors=1) + struct.pack("<Q", claim),
    ]
    for start in starts:
        with (tmp_path / "x.gguf").open("wb") as file:
            file.write(start)
            file.truncate(2**33)
        outcome, used = read_in_process(tmp_path / "x.gguf")
        assert outcome == "refused"
        assert used < MOST_MEMORY


def test_a_missing_file_and_a_pipe_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        read_gguf_header(tmp_path / "x.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InvalidInput, match=r"pipe\.gguf"):
        read_gguf_header(tmp_path / "pipe.gguf")
