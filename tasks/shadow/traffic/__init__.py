"""Route user traffic to both servers through a proxy.

``recorder`` stores the requests and answers, and ``replay`` sends traffic from a file.
"""

from mergegate.tasks.shadow.traffic.proxy import ShadowProxy
from mergegate.tasks.shadow.traffic.recorder import Recorder
from mergegate.tasks.shadow.traffic.redaction import Redaction, open_redaction
from mergegate.tasks.shadow.traffic.replay import ReplaySettings, read_traffic, replay
from mergegate.tasks.shadow.traffic.upstream import read_key
