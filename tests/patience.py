"""Timeouts for tests, long enough that only a real hang hits them, even on the slowest machine.

They do not measure speed. A child process that must *not* exit within the timeout, because only a kill may end it, has
to live longer.
"""

from __future__ import annotations

HANG_S = 1800.0
LONGER_THAN_HANG_S = 4 * 3600
