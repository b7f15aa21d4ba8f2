"""Which tests are those of the real vLLM, and what they need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergegate.tasks.serve.launch import PYTHON

PROJECT = Path(__file__).resolve().parents[2]

real_server = [
    pytest.mark.serve,
    # Its environment takes minutes to make; where it is asked for, its absence is a failure and no excuse.
    pytest.mark.skipif(
        not (PROJECT / PYTHON).exists() and "MERGEGATE_REQUIRE_VLLM" not in os.environ, reason="make serve-env first"
    ),
]
