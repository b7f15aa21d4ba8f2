"""Marks for tests that need the real vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergegate.tasks.serve.launch import PYTHON

PROJECT = Path(__file__).resolve().parents[2]

real_server = [
    pytest.mark.serve,
    # Building vLLM's environment takes minutes. If the variable requires vLLM, a missing environment fails the test.
    pytest.mark.skipif(
        not (PROJECT / PYTHON).exists() and "MERGEGATE_REQUIRE_VLLM" not in os.environ, reason="make serve-env first"
    ),
]
