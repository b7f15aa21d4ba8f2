"""Skip tests that need llama.cpp or llm-compressor if their environments are missing, and say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
# Variable that turns the skip into a failure, and the make target, by the directory of the environment.
ENVIRONMENTS = {
    ".venv-gguf": ("MERGEGATE_REQUIRE_GGUF", "make gguf-env"),
    ".venv-quantize": ("MERGEGATE_REQUIRE_QUANTIZE", "make quantize-env"),
    ".venv-vllm": ("MERGEGATE_REQUIRE_VLLM", "make serve-env"),
}


def python_of(environment: str) -> Path:
    """Return the interpreter of ``environment``, such as '.venv-gguf', or skip the test if it is not installed."""
    required, command = ENVIRONMENTS[environment]
    python = PROJECT / environment / "bin" / "python"
    if not python.exists():
        if os.environ.get(required):
            pytest.fail(f"{required} is set, but {environment} is missing: run '{command}'")
        pytest.skip(f"{environment} is missing: run '{command}'")
    return python


@pytest.fixture(scope="session")
def gguf_python() -> Path:
    """Return the interpreter of the environment with llama.cpp."""
    return python_of(".venv-gguf")


@pytest.fixture(scope="session")
def quantize_python() -> Path:
    """Return the interpreter of the environment with llm-compressor."""
    return python_of(".venv-quantize")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the interpreter of the environment with vLLM."""
    return python_of(".venv-vllm")
