"""How long a test waits for what must come: so long that only a hang is ended, on the slowest machine too.

A limit here judges no speed. What must *not* end in that time (a child that only a kill can end) has to live longer.
"""

from __future__ import annotations

HANG_S = 1800.0
LONGER_THAN_HANG_S = 4 * 3600
