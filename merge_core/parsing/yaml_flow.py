"""Plain data as one line of YAML: what a person may paste into a file, and what our own reader reads back equal.

::

    flow_yaml({"merge_method": "ties", "models": [{"model": "./a"}]})    # {merge_method: ties, models: [{model: ./a}]}
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml


class _FlowDumper(yaml.SafeDumper):
    """Quotes only where it must, and then doubly: in single quotes a line break would be one in the file, too."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # '&id001' means nothing to whoever reads the line

    def choose_scalar_style(self) -> str:
        style: str = super().choose_scalar_style()
        return '"' if style == "'" else style


# Text to PyYAML, a number to every reader of YAML 1.2 (editors): in quotes it is text to both.
_FlowDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?|\.\d)\d*[eE][-+]?\d+$"), list("-+.0123456789")
)


def flow_yaml(value: object) -> str:
    """``value`` (mappings, lists, texts, numbers, truth values, nothing) in YAML's flow style, in one line.

    A text alone is written so that it may stand inside of brackets and braces, too.
    """
    text = yaml.dump(
        [value],
        Dumper=_FlowDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )
    return text.strip()[1:-1]
