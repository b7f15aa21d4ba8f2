"""Quantize a merge, and check that the result is what its users expect: GGUF for llama.cpp, FP8 and INT8 for vLLM.

A format is one file that implements ``VariantFormat``. The flow evaluates each variant in the runtime that will serve
it, with the merge as the reference. Other packages register formats under the entry point ``mergegate.variants``.
"""

from mergegate.tasks.quality.variants.contract import (
    CalibrationSettings,
    ConversionCheck,
    VariantFormat,
    VariantGuard,
    VariantRecord,
    VariantSettings,
    VariantVerdict,
)
from mergegate.tasks.quality.variants.registry import Variant, variant_formats
