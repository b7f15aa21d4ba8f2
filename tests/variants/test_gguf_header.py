"""mergegate's GGUF reader agrees with gguf-py, the reader of llama.cpp's converter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from gguf_samples import METADATA, TENSORS, gguf

from mergegate.merge_core.checkpoint import GgufArray, read_gguf_header
from mergegate.merge_core.checkpoint.gguf_file import _TENSOR_TYPES

pytestmark = pytest.mark.variants

PROJECT = Path(__file__).resolve().parents[2]
READ = """
import json, sys
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
reader = GGUFReader(sys.argv[1])
fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
tensors = [
    [tensor.name, tensor.tensor_type.name, tensor.shape.tolist()[::-1], tensor.data_offset, tensor.n_bytes]
    for tensor in reader.tensors
]
types = {kind.value: [kind.name, *sizes] for kind, sizes in GGML_QUANT_SIZES.items()}
print(json.dumps([fields, tensors, types, reader.data_offset]))
"""
WRITE = """
import sys
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
writer = GGUFWriter(sys.argv[1], "llama")
writer.add_name("Tiny")
writer.add_block_count(1)
writer.add_token_list(["<s>", "a", "b"])
writer.add_token_types([3, 1, 1])
writer.add_token_scores([0.0, -1.5, 2.0])
writer.add_add_bos_token(False)
values = np.arange(4 * 256, dtype=np.float32).reshape(4, 256)
writer.add_tensor("norm", values[0, :7].copy())
for kind in ("BF16", "F16", "Q8_0", "Q4_0", "Q5_1", "TQ2_0", "MXFP4"):
    kind = GGMLQuantizationType[kind]
    writer.add_tensor(f"weight.{kind.name}", quants.quantize(values, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def run(program: str, path: Path) -> str:
    python = PROJECT / ".venv-gguf/bin/python"
    library = PROJECT / ".venv-gguf/llama.cpp/gguf-py"
    command = [str(python), "-c", program, str(path)]
    result = subprocess.run(command, env={"PYTHONPATH": str(library)}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("writer", ["gguf-py", "these tests"])
def test_both_readers_find_the_same_metadata_and_tensors(writer: str, tmp_path: Path, gguf_python: Path) -> None:
    path = tmp_path / "x.gguf"
    if writer == "gguf-py":
        run(WRITE, path)
    else:
        path.write_bytes(gguf(METADATA, TENSORS))
    fields, tensors, types, data_offset = json.loads(run(READ, path))
    header = read_gguf_header(path)
    assert header.data_offset == data_offset
    assert [
        [*(getattr(tensor, name) for name in ("name", "type")), list(tensor.shape), tensor.offset, tensor.nbytes]
        for tensor in header.tensors
    ] == tensors
    assert header.metadata.keys() == fields.keys()
    for key, value in header.metadata.items():
        if isinstance(value, GgufArray):
            assert value.count == len(fields[key])
        else:
            assert value == fields[key]
    assert {int(code): tuple(entry) for code, entry in types.items()} == dict(_TENSOR_TYPES)
