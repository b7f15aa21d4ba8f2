"""The traffic: a proxy before two servers, what it keeps (``recorder``), and traffic out of a file (``replay``)."""

from mergegate.tasks.shadow.traffic.proxy import ShadowProxy
from mergegate.tasks.shadow.traffic.recorder import Recorder
from mergegate.tasks.shadow.traffic.redaction import Redaction, open_redaction
from mergegate.tasks.shadow.traffic.replay import Replayed, Traffic, read_traffic, replay

__all__ = [
    "Recorder",
    "Redaction",
    "Replayed",
    "ShadowProxy",
    "Traffic",
    "open_redaction",
    "read_traffic",
    "replay",
]
