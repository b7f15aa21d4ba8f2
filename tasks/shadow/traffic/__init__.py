"""Route user traffic to both servers through a proxy.

``records`` stores the requests and answers, and ``replay`` sends traffic from a file.
"""

from mergegate.tasks.shadow.traffic.proxy import ShadowProxy
from mergegate.tasks.shadow.traffic.records import Recorder, Records, Redaction, open_records, open_redaction
from mergegate.tasks.shadow.traffic.replay import ReplaySettings, read_traffic, replay
from mergegate.tasks.shadow.traffic.request import read_key
