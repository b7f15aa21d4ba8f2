"""Write plain data as one line of YAML that users can paste into a file and mergegate reads back unchanged.

::

    flow_yaml({"merge_method": "ties", "models": [{"model": "./a"}]})    # {merge_method: ties, models: [{model: ./a}]}
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml


class _FlowDumper(yaml.SafeDumper):
    """Dumper that quotes only when necessary, with double quotes so that line breaks are escaped."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # An alias such as '&id001' would confuse readers of the line.

    def choose_scalar_style(self) -> str:
        style: str = super().choose_scalar_style()
        return '"' if style == "'" else style


# PyYAML reads such a value as text, but readers of YAML 1.2, such as editors, read it as a number. Quotes make it text
# for both.
_FlowDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?|\.\d)\d*[eE][-+]?\d+$"), list("-+.0123456789")
)


def flow_yaml(value: object) -> str:
    """Return ``value`` as one line of YAML in flow style, for example ``{a: [1, 2]}``.

    The result can be pasted inside brackets or braces. A string is therefore quoted if it would be misread there.

    Args:
        value: Plain data that consists of mappings, lists, strings, numbers, booleans and None.
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
