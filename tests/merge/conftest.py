"""Share helpers with the tests of the merge engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "merge_core"))
