"""What these tests borrow from others: how a release is made, small."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "publish"))
