"""Find the available variant formats: the built-in ones and those of the entry point ``mergegate.variants``.

The value of an entry point is a subclass of ``VariantFormat`` or a sequence of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated

from mergegate.merge_core.parsing import SelectedBy, collect_settings
from mergegate.tasks.quality.variants.compressed_tensors import CompressedTensorsFormat
from mergegate.tasks.quality.variants.contract import VariantFormat
from mergegate.tasks.quality.variants.gguf import GgufFormat

GROUP = "mergegate.variants"
_BUILT_IN: tuple[type[VariantFormat], ...] = (GgufFormat, CompressedTensorsFormat)


@cache
def variant_formats() -> Mapping[str, type[VariantFormat]]:
    """Return every format by its name in a profile (``format``).

    Raises:
        InvalidInput: An installed package registers an object that is not a format, or a name that is taken.
    """
    return collect_settings(VariantFormat, "format", _BUILT_IN, entry_points(group=GROUP), GROUP)


Variant = Annotated[VariantFormat, SelectedBy("format", variant_formats)]
"""Type of a profile setting that selects a variant format."""
