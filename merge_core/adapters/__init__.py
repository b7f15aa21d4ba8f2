"""LoRA adapters on weights as they are stored: read, applied while streaming, combined with each other, extracted.

``apply_adapter(base, adapter)`` is a checkpoint like any other: a table whose tensors are computed while they are read.
"""

from mergegate.merge_core.adapters.adapter import (
    PICKLED_FILE,
    WEIGHTS_FILE,
    Adapter,
    adapter_files,
    is_adapter,
    is_own_text,
    open_adapter,
)
from mergegate.merge_core.adapters.application import adapter_findings, apply_adapter
from mergegate.merge_core.adapters.combination import Combined, combine_adapters, require_products
from mergegate.merge_core.adapters.configuration import CONFIG_FILE
from mergegate.merge_core.adapters.extraction import Extracted, ExtractionSettings, ModuleError, extract_adapter
from mergegate.merge_core.adapters.names import ExpertPlace, StoredNames
from mergegate.merge_core.adapters.output import NewAdapter, write_adapter
from mergegate.merge_core.adapters.size import CombinedSize, combined_size

__all__ = [
    "CONFIG_FILE",
    "PICKLED_FILE",
    "WEIGHTS_FILE",
    "Adapter",
    "Combined",
    "CombinedSize",
    "ExpertPlace",
    "Extracted",
    "ExtractionSettings",
    "ModuleError",
    "NewAdapter",
    "StoredNames",
    "adapter_files",
    "adapter_findings",
    "apply_adapter",
    "combine_adapters",
    "combined_size",
    "extract_adapter",
    "is_adapter",
    "is_own_text",
    "open_adapter",
    "require_products",
    "write_adapter",
]
