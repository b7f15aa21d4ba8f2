"""Weights in ``pytorch_model.bin`` are read without running the pickle and refused unless they are plain tensors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import LINEAR, change_json, load, merge_text, random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.checkpoint.pickled_file import read_pickled
from mergegate.merge_core.errors import InvalidInput


def bytes_at(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor at the offsets that mergegate reads from the file."""
    content = path.read_bytes()
    return {t.name: content[t.offset : t.offset + t.nbytes] for t in read_pickled(path)}


def pickled(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """Write a checkpoint whose weights are pickled."""
    save_checkpoint(directory, {name: tensor.clone() for name, tensor in tensors.items()})
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: tensors[name] for name in names[number::shards]}, directory / file)
        weight_map.update(dict.fromkeys(names[number::shards], file))
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_every_tensor_is_found_where_its_bytes_are(tmp_path: Path) -> None:
    whole = torch.arange(24.0)
    tensors = {
        "matrix": torch.randn(5, 7), "half": torch.randn(3).bfloat16(),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)), "part of a storage": whole[6:18].view(3, 4),
        "scalar": torch.tensor(7), "flags": torch.tensor([True, False]), "empty": torch.empty(0, 3), "same": whole,
    }  # fmt: skip
    torch.save(tensors, tmp_path / "x.bin")
    table = {t.name: (t.shape, t.dtype.torch_name) for t in read_pickled(tmp_path / "x.bin")}
    assert table == {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    expected = {n: t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}
    assert bytes_at(tmp_path / "x.bin") == expected


def test_the_state_of_a_module_is_a_dictionary_of_tensors(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / "x.bin")
    assert {t.name: t.shape for t in read_pickled(tmp_path / "x.bin")} == {"weight": (3, 4), "bias": (3,)}


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_parents_merge_to_the_same_bytes_as_safetensors(tmp_path: Path, shards: int) -> None:
    base = random_tensors(0)
    save_checkpoint(tmp_path / "a", base)
    save_checkpoint(tmp_path / "b", random_tensors(1, base))
    plain = merge_text(LINEAR, tmp_path, "plain").files["model.safetensors"]
    shutil.rmtree(tmp_path / "b")
    pickled(tmp_path / "b", random_tensors(1, base), shards)
    assert merge_text(LINEAR, tmp_path).files["model.safetensors"] == plain


def test_a_result_of_pickled_parents_is_safetensors(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        pickled(tmp_path / name, random_tensors(seed), 3)
    record = merge_text(LINEAR, tmp_path)
    assert {name for name in record.files if name.startswith(("model", "pytorch"))} == {
        *(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    }
    expected = (random_tensors(0)["model.norm.weight"].double() + random_tensors(1)["model.norm.weight"].double()) / 2
    np.testing.assert_allclose(load(tmp_path / "out")["model.norm.weight"], expected, rtol=1e-6)


def test_a_tied_head_is_no_second_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tied = pickled(tmp_path / "tied", tensors)
    for flag in (True, False):
        change_json(tied / "config.json", tie_word_embeddings=flag)
        assert ("lm_head.weight" in open_checkpoint(tied).tensors) is not flag


class Malicious:
    """An object whose pickle runs a command when loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


def rewritten(path: Path, description: bytes) -> Path:
    """Write a copy of the file whose pickle is ``description``."""
    other = path.with_name("other.bin")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for info in old.infolist():
            new.writestr(info, description if info.filename.endswith("data.pkl") else old.read(info))
    return other


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"weight": torch.ones(3)}, tmp_path / "x.bin")
    return tmp_path / "x.bin"


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_a_program_is_refused_and_does_not_run(saved: Path, protocol: int) -> None:
    target = saved.with_name("was-here")
    evil = rewritten(saved, pickle.dumps({"weight": Malicious(target)}, protocol))
    with pytest.raises(InvalidInput, match="only tensors"):
        read_pickled(evil)
    assert not target.exists()
    pickle.loads(pickle.dumps(Malicious(target), protocol))  # This proves that the command would have run.
    assert target.exists()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"weight": torch.ones(3, 2).T}, "with strides"),
        ({"weight": torch.ones(1).expand(5)}, "with strides"),
        ({"epoch": 3}, "a int"),
        ({"model": OrderedDict(weight=torch.ones(2))}, "a dictionary"),
        ([torch.ones(2)], "not contain a dictionary"),
        (torch.nn.Linear(2, 2), r"code: torch\.nn\.modules\.linear\.Linear"),
        ({"weight": torch.ones(2).to(torch.float8_e4m3fn)}, "code: torch"),
    ],
)
def test_anything_but_contiguous_tensors_is_refused(tmp_path: Path, value: Any, found: str) -> None:
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(InvalidInput, match=found):
        read_pickled(tmp_path / "x.bin")


@pytest.mark.parametrize("is_old", [True, False], ids=["old format", "truncated"])
def test_a_file_that_is_not_a_whole_archive_is_refused(saved: Path, is_old: bool) -> None:
    if is_old:
        torch.save({"weight": torch.ones(3)}, saved, _use_new_zipfile_serialization=False)
    else:
        saved.write_bytes(saved.read_bytes()[:-200])
    with pytest.raises(InvalidInput, match="not a readable zip"):
        read_pickled(saved)


def test_a_tensor_that_leaves_its_storage_is_refused(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        text = archive.read("x/data.pkl")
    assert text.count(b"K\x03\x85") == 1, "the shape (3,)"
    with pytest.raises(InvalidInput, match="beyond its storage"):
        read_pickled(rewritten(saved, text.replace(b"K\x03\x85", b"K\x04\x85")))


@pytest.mark.story
def test_a_key_nested_too_deeply_to_be_hashed_is_refused(saved: Path) -> None:
    evil = b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."
    with pytest.raises(InvalidInput, match="damaged"):
        read_pickled(rewritten(saved, evil))


@pytest.mark.parametrize("append", [b"K\x01a.", b"(K\x01e."])
def test_appending_to_what_is_no_list_is_refused(saved: Path, append: bytes) -> None:
    with pytest.raises(InvalidInput, match="appends to an object"):
        read_pickled(rewritten(saved, b"\x80\x02X\x01\x00\x00\x00x" + append))


@settings(max_examples=30)
@given(st.data())
def test_a_damaged_description_is_refused_or_lies_inside_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "x.bin"
    torch.save({"weight": torch.ones(3), "other": torch.zeros(2, 2).bfloat16()}, path)
    with zipfile.ZipFile(path) as archive:
        text = bytearray(archive.read("x/data.pkl"))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = read_pickled(rewritten(path, bytes(text)))
    except InvalidInput:
        return
    size = path.with_name("other.bin").stat().st_size
    assert all(0 <= tensor.offset <= tensor.offset + tensor.nbytes <= size for tensor in tensors)
