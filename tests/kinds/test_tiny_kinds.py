"""The tiny checkpoints have the kinds that they are named after, and the two parents of a pair differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_kinds
from safetensors.torch import load_file

from mergegate.merge_core.architecture import kind_of_directory

KIND_NAMES = {
    "text generator": "text generator",
    "bert embedding": "embedding",
    "modernbert embedding": "embedding",
    "qwen3 embedding": "embedding",
    "sparse encoder": "embedding",
    "cross-encoder": "cross-encoder",
    "older cross-encoder": "cross-encoder",
    "reranker without modules": "cross-encoder",
    **dict.fromkeys(tiny_kinds.VISION_LANGUAGE, "vision-language"),
    "whisper": "speech",
    "wav2vec2": "speech",
    "audio language model": "speech",
    "t5": "sequence-to-sequence",
    "bart": "sequence-to-sequence",
    "sequence classifier": "classifier",
    "token classifier": "classifier",
    "masked language model": "other",
    "bare encoder": "other",
    "clip": "other",
}


@pytest.mark.parametrize("name", tiny_kinds.KINDS)
def test_tiny_parents_have_their_kind_and_differ_in_every_tensor(name: str, tmp_path: Path) -> None:
    parents = tiny_kinds.pair(name, tmp_path)
    assert [kind_of_directory(parent).name for parent in parents] == [KIND_NAMES[name]] * 2
    files = sorted(path.relative_to(parents[0]) for path in parents[0].rglob("*.safetensors"))
    assert files
    for file in files:
        first, second = (load_file(parent / file) for parent in parents)
        assert first.keys() == second.keys()
        assert [key for key in first if first[key].equal(second[key])] == []
