"""Build GGUF files for llama.cpp, with the converter and the quantizer of one version in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from mergegate.tasks.checkpoints import Model, QuantizedModel
from mergegate.tasks.serve import Check, ServeSettings
from mergegate.tasks.store import Artifact, StoredValue
from mergegate.tasks.variants.contract import ConversionCheck, VariantFormat, VariantRecord


class GgufFormat(VariantFormat):
    """GGUF files for llama.cpp and the programs that contain it."""

    format: Literal["gguf"]
    types: tuple[str, ...] = Field(min_length=1, description="Quantization types of llama.cpp, such as Q8_0 or Q4_K_M.")

    @property
    def variant_types(self) -> tuple[str, ...]:
        return self.types

    @property
    def place_suffix(self) -> str:
        return self.suffix or "GGUF"

    @property
    def library_name(self) -> str:
        return "gguf"

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
