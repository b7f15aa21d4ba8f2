"""Build rows of recorded requests for one arm."""

from __future__ import annotations

from typing import Any, Literal

from mergegate.tasks.shadow import ArmRow


def rows(arm: Literal["parent", "candidate"], count: int, *, more: int = 0, **facts: Any) -> tuple[ArmRow, ...]:
    """Return `count` successful rows changed by `facts`, and `more` failed rows."""
    usual = {"at": 0.0, "arm": arm, "role": "answer", "status": 200, "error": "", "fallback": False}
    one = ArmRow(**{**usual, "first_byte": 0.1, "seconds": 1.0, **facts})
    return (one,) * count + (one._replace(status=502),) * more
