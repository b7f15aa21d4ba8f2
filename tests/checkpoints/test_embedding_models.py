"""Embedding models and cross-encoders load with all of their parts or an error; lean imports hide unused packages."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_kinds
import torch
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints import Model, import_lean, load_model, model_cache, unload_models

LOADED_BY_SENTENCE_TRANSFORMERS = (
    "bert embedding", "modernbert embedding", "qwen3 embedding", "sparse encoder", "cross-encoder",
    "older cross-encoder", "reranker without modules",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_stays_loaded() -> Iterator[None]:
    yield
    unload_models()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a checkpoint of a kind once, and returns a copy of it."""
    root, numbers = tmp_path_factory.mktemp("checkpoints"), iter(range(1000))

    def checkpoint(name: str) -> Path:
        original = root / name
        if not original.is_dir():
            tiny_kinds.write(name, original)
        return Path(shutil.copytree(original, root / f"copy {next(numbers)}"))

    return checkpoint


def model_in(directory: Path, runs_code: bool = False) -> Model:
    return Model(name="m", digest=str(directory), directory=directory, runs_code=runs_code)


def load_once(directory: Path) -> None:
    with load_model(model_in(directory), dtype="auto", device="cpu"):
        pass


@pytest.mark.story
@pytest.mark.parametrize(
    "kind", sampled(LOADED_BY_SENTENCE_TRANSFORMERS, ("sparse encoder", "cross-encoder"), pytest.mark.proof)
)
def test_a_complete_model_is_loaded_without_network(
    kind: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("network access")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    with load_model(model_in(checkpoints(kind)), dtype="auto", device="cpu") as loaded:
        assert loaded.is_small
        assert type(loaded.network).__name__ == loaded.kind.loader
        assert not loaded.network.training


def damage(file: Path, word: str, columns: int = 0) -> None:
    """Remove the tensors with `word` in their name, or leave only their first columns."""
    tensors = load_file(file)
    names = [name for name in tensors if word in name]
    assert names
    for name in names:
        tensor = tensors.pop(name)
        if columns:
            tensors[name] = tensor[:, :columns].contiguous()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("kind", sampled(LOADED_BY_SENTENCE_TRANSFORMERS, ("bert embedding",)))
def test_a_missing_tensor_of_the_transformer_is_an_error(kind: str, checkpoints: Callable[[str], Path]) -> None:
    """sentence-transformers would replace the tensor with random numbers."""
    directory = checkpoints(kind)
    names = sorted(load_file(directory / "model.safetensors"))
    name = next(name for name in names if "layers.1" in name or "layer.1" in name)
    damage(directory / "model.safetensors", name)
    with pytest.raises(InvalidInput, match="is missing or has a wrong shape") as raised:
        load_once(directory)
    assert name.rpartition("layer")[2] in str(raised.value)


@pytest.mark.parametrize(
    ("file", "word", "columns"),
    [
        ("model.safetensors", "layer.0.attention.self.query.weight", 16),
        ("2_Dense/model.safetensors", "linear.weight", 8), ("2_Dense/model.safetensors", "linear.bias", 0),
        ("2_Dense/model.safetensors", "", 0),
    ],
)  # fmt: skip
def test_a_damaged_module_is_an_error(file: str, word: str, columns: int, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("bert embedding")
    if word:
        damage(directory / file, word, columns)
    else:
        (directory / file).unlink()
    with pytest.raises(InvalidInput, match="sentence-transformers cannot load the model"):
        load_once(directory)


@pytest.mark.parametrize("kind", ["bert embedding", "cross-encoder", "reranker without modules"])
def test_only_the_pooler_of_an_embedding_model_may_be_missing(kind: str, checkpoints: Callable[[str], Path]) -> None:
    """Many embedding models lack the pooler of BERT, because the mean of the tokens does not use it."""
    directory = checkpoints(kind)
    damage(directory / "model.safetensors", "pooler")
    if kind != "bert embedding":
        with pytest.raises(InvalidInput, match="pooler"):
            load_once(directory)
        return
    with load_model(model_in(directory), dtype="auto", device="cpu") as loaded:
        assert all(parameter.requires_grad for parameter in loaded.network.parameters())


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.float32)]
)
def test_all_modules_have_the_dtype(dtype: str, expected: torch.dtype, checkpoints: Callable[[str], Path]) -> None:
    with load_model(model_in(checkpoints("bert embedding")), dtype=dtype, device="cpu") as loaded:
        assert {parameter.dtype for parameter in loaded.network.parameters()} == {expected}


def test_code_of_a_checkpoint_runs_only_if_the_profile_trusts_it(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("bert embedding")
    modules = json.loads((directory / "modules.json").read_text())
    modules[-1]["type"] = "own_module.Own"
    (directory / "modules.json").write_text(json.dumps(modules))
    code = "from sentence_transformers.sentence_transformer.modules import Normalize\nclass Own(Normalize): pass\n"
    (directory / "own_module.py").write_text(code)
    with pytest.raises(InvalidInput, match="own_module"):
        load_once(directory)
    with load_model(model_in(directory, runs_code=True), dtype="auto", device="cpu") as loaded:
        assert type(loaded.network[-1]).__name__ == "Own"


def test_an_activation_function_that_is_not_trusted_is_an_error(checkpoints: Callable[[str], Path]) -> None:
    """sentence-transformers would use another one."""
    directory = checkpoints("bert embedding")
    config = json.loads((directory / "2_Dense" / "config.json").read_text())
    (directory / "2_Dense" / "config.json").write_text(json.dumps({**config, "activation_function": "own.Act"}))
    with pytest.raises(InvalidInput, match="the activation function own"):
        load_once(directory)


def test_an_old_or_missing_package_is_an_error_that_names_the_extra(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed in ("0", "5.3.0"):
        monkeypatch.setattr(model_cache, "_version_of", lambda _, installed=installed: installed)
        with pytest.raises(InvalidInput) as raised:
            load_once(checkpoints("cross-encoder"))
        assert "pip install 'mergegate[embeddings]'" in raised.value.remedy


@pytest.mark.proof
def test_other_models_do_not_import_sentence_transformers(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("text generator")
    program = (
        "import sys; from pathlib import Path; from mergegate.tasks.models.checkpoints import Model, load_model\n"
        f"m = Model(name='m', digest='0', directory=Path({str(directory)!r}))\n"
        "with load_model(m, dtype='auto', device='cpu'): print('sentence_transformers' in sys.modules)\n"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


# Like transformers: search for the package once, remember the result, and import it much later.
PACKAGE = "from importlib.util import find_spec\nSEEN = find_spec('unasked') is not None\n"
PART = "from looking import SEEN\nif SEEN:\n    import unasked\n"


@pytest.fixture
def a_package_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "looking").mkdir()
    (tmp_path / "looking" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "looking" / "part.py").write_text(PART)
    (tmp_path / "unasked.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(model_cache, "_UNUSED_PACKAGES", ("unasked",))
    yield
    for name in ("looking", "looking.part", "unasked"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("a_package_that_looks")
def test_unused_packages_are_hidden_only_during_the_import() -> None:
    import_lean("looking.part")
    assert "unasked" not in sys.modules
    __import__("unasked")


@pytest.mark.usefixtures("a_package_that_looks")
def test_a_package_that_found_an_optional_one_can_import_it() -> None:
    __import__("looking")
    import_lean("looking.part")
    assert "unasked" in sys.modules


@pytest.mark.usefixtures("a_package_that_looks")
def test_garbage_collection_is_restored(tmp_path: Path) -> None:
    (tmp_path / "looking" / "part.py").write_text("import gc\nassert not gc.isenabled()\nraise ImportError\n")
    with pytest.raises(ImportError):
        import_lean("looking.part")
    assert gc.isenabled()
    assert "unasked" not in sys.modules
