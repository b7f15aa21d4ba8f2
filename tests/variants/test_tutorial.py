"""The tutorial about quantized variants works as written, with the real llama.cpp and llm-compressor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
if (folder := str(PROJECT / "tests" / "flows")) not in sys.path:
    sys.path.append(folder)

from walkthrough import blocks_of, reader  # noqa: E402  # in tests/flows


@pytest.mark.proof  # two minutes; other tests release with the real quantizers
@pytest.mark.variants
@pytest.mark.usefixtures("gguf_python", "quantize_python")
def test_the_tutorial_about_variants_works_as_written(tmp_path: Path) -> None:
    user = reader(tmp_path, {"~/mergegate": str(PROJECT)})
    user.follow(blocks_of(PROJECT / "docs" / "tutorials" / "release-quantized-variants.md"), "the tutorial")
