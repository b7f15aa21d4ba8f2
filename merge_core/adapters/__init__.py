"""Read LoRA adapters, apply them to stored weights while streaming, combine them, and extract them from fine-tunes.

``apply_adapter(base, adapter)`` returns a checkpoint whose tensors are computed while they are read.
"""

from mergegate.merge_core.adapters.adapter import (
    Adapter,
    NewAdapter,
    adapter_files,
    is_adapter,
    is_own_text,
    open_adapter,
    write_adapter,
)
from mergegate.merge_core.adapters.application import apply_adapter
from mergegate.merge_core.adapters.combination import CombinedSize, changes_of, combine_adapters, combined_size
from mergegate.merge_core.adapters.configuration import CONFIG_FILE
from mergegate.merge_core.adapters.extraction import ExtractionSettings, FactoredAdapter, extract_adapter
from mergegate.merge_core.adapters.names import ExpertSlice, StoredNames
from mergegate.merge_core.adapters.tensors import AdapterOwnTensor
