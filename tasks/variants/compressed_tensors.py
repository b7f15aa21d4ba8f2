"""Quantize to FP8 and INT8 in the compressed-tensors layout, with llm-compressor in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from mergegate.tasks.checkpoints import Model, QuantizedModel
from mergegate.tasks.serve import Check, ServeSettings
from mergegate.tasks.store import Artifact, StoredValue
from mergegate.tasks.variants.contract import ConversionCheck, VariantFormat, VariantRecord


class CompressedTensorsFormat(VariantFormat):
    """FP8 and INT8 checkpoints in the compressed-tensors layout, for vLLM and transformers."""

    format: Literal["compressed-tensors"]
    scheme: str = Field(description="Quantization scheme of llm-compressor, such as FP8_DYNAMIC or W8A8.")

    @property
    def variant_types(self) -> tuple[str, ...]:
        return (self.scheme,)

    @property
    def place_suffix(self) -> str:
        return self.suffix or self.scheme.partition("_")[0]

    @property
    def library_name(self) -> str:
        return "transformers"

    def check(self, root: Path) -> str:
        raise NotImplementedError

    def convert(self, merge: Model, texts: Sequence[str], root: Path) -> StoredValue[ConversionCheck] | None:
        raise NotImplementedError

    def build(self, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        raise NotImplementedError

    def open(self, merge: Model, variant_type: str, artifact: Artifact[VariantRecord]) -> QuantizedModel:
        raise NotImplementedError

    def inspect(self, model: QuantizedModel) -> Sequence[Check]:
        raise NotImplementedError

    def smoke(self, model: QuantizedModel, serve: ServeSettings | None, root: Path) -> Sequence[Check]:
        raise NotImplementedError

    def release_files(self, name: str, artifact: Artifact[VariantRecord]) -> Mapping[str, Path]:
        raise NotImplementedError
