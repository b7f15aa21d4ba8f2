"""Define the contract of a variant format: its settings in a profile, and how it builds, opens and names a variant.

::

    variants: [{format: brick, depth: 4}]              # in a profile

    class BrickFormat(VariantFormat):                  # in the module of the format, which ``registry`` finds
        format: Literal["brick"]                       # the name of the format in a profile
        depth: int                                     # its settings: strict, frozen, each with a description

        variant_types: ...                               # the variants that these settings describe: ("B4",)
        def check(self, root): ...                     # before the merge: is the quantizer installed?
        def check_shapes(self, checkpoint): ...        # before the merge: do the kind and the sizes of matrices fit?
        def convert(self, merge, texts, root): ...     # before quantizing: does the conversion agree with the merge?
        def build(self, merge, variant_type, root): ...  # the weights, as an artifact in the store
        def open(self, merge, variant_type, artifact): ...   # the variant as a model that a backend evaluates
        def release_files(self, name, artifact): ...   # the files to publish, by their public names

A run calls them in this order. All results are stages with a content key, so that a second run starts no quantizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field

from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import Model, QuantizedModel
from mergegate.tasks.gate import GateVerdict
from mergegate.tasks.serve import Check, ServeSettings
from mergegate.tasks.stage import Outcome, Section, StageValue, Verdict
from mergegate.tasks.store import Artifact, StoredValue
from mergegate.tasks.variants.settings import VariantSettings


class VariantRecord(StageValue):
    """Facts about a quantized variant. The artifact holds its weights."""

    format: str  # 'gguf'
    type: str  # 'Q8_0'
    files: tuple[str, ...]  # files of the artifact that are published, weights first
    bytes: int  # of all files
    tensor_types: dict[str, int]  # number of tensors by the type that they really have
    versions: dict[str, str]  # of the tools, by name
    settings: dict[str, str] = Field(default_factory=dict)  # of the quantizer, as shown to users
    calibration: str = ""  # sha256 of the calibration text; empty if none was used

    def summary(self) -> str:
        types = ", ".join(f"{count} {name}" for name, count in sorted(self.tensor_types.items()))
        return f"{self.type}: {self.bytes / 1e6:,.1f} MB ({types})"


class ConversionCheck(StageValue):
    """Comparison of the unquantized file of a format with the merge, before anything is quantized."""

    documents: int  # number of compared documents
    mean_difference: float  # mean absolute difference of a document's log-likelihood, in nats
    max_difference: float
    limit: float  # largest mean difference that passes, in nats
    texts: int  # number of texts that both tokenizers split
    different_texts: tuple[str, ...]  # beginnings of the texts that they split differently
    problems: tuple[str, ...]  # why the conversion is wrong, one sentence each; empty if it is right

    def summary(self) -> str:
        if self.problems:
            return self.problems[0]
        return f"agrees with the merge within {self.mean_difference:.4f} nats per document"

    def refuses(self) -> bool:
        return bool(self.problems)


class VariantFormat(VariantSettings, ABC):
    """Base class of all formats. A profile selects one by ``format``, whose type names the format: Literal['brick']."""

    format: str

    @property
    @abstractmethod
    def variant_types(self) -> tuple[str, ...]:
        """Variants that these settings describe, such as ``('Q8_0', 'Q4_K_M')``. They share one place."""

    @property
    @abstractmethod
    def place_suffix(self) -> str:
        """Suffix of the place where the variants are published: ``suffix``, or that of the format, such as 'GGUF'."""

    @property
    @abstractmethod
    def library_name(self) -> str:
        """Library that loads the variants, as the Hub names it in a card: 'gguf' or 'transformers'."""

    def estimate_bytes(self, merge_bytes: int) -> int:
        """Return how much disk space the variants need, for a merge with ``merge_bytes`` bytes of weights.

        By default, each variant and the unquantized file are as large as the merge.
        """
        return (1 + len(self.variant_types)) * merge_bytes

    def for_backend(self, backend: str) -> Self:
        """Return these settings for a release that ``backend`` evaluates, with the default of their own backend."""
        return self

    @abstractmethod
    def check(self, root: Path) -> str:
        """Return the quantizer's name and version, without starting it. ``root`` is the directory of the profile.

        Raises:
            InvalidInput: The quantizer is not installed, or the settings do not fit together.
        """

    def check_shapes(self, checkpoint: Checkpoint) -> None:  # most formats accept all shapes
        """Check before the merge that it can be quantized. ``checkpoint`` is a parent of the same kind and shapes.

        Raises:
            InvalidInput: The format does not support the kind of the model, or the size or form of a tensor.
        """

    @abstractmethod
    def convert(
        self, merge: Model, texts: Callable[[], Sequence[str]], root: Path
    ) -> StoredValue[ConversionCheck] | None:
        """Convert the merge without quantizing it, and compare the result with the merge on ``texts()``.

        Return None if the format has no unquantized form. ``texts`` returns held-out documents and prompts of the gate.

        Raises:
            Refused: The merge cannot be converted.
        """

    @abstractmethod
    def build(self, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        """Quantize the merge. The same inputs give the same bytes.

        Raises:
            Refused: The merge cannot be quantized, or the result is damaged.
        """

    @abstractmethod
    def open(self, merge: Model, variant_type: str, artifact: Artifact[VariantRecord]) -> QuantizedModel:
        """Return the variant as a model, with the backend that evaluates it as it will be served."""

    @abstractmethod
    def inspect(self, model: QuantizedModel) -> Sequence[Check]:
        """Check the files of a variant without loading the weights: tokenizer, special tokens, chat template, sizes."""

    @abstractmethod
    def smoke(self, model: QuantizedModel, serve: ServeSettings | None, root: Path) -> Sequence[Check]:
        """Let the runtime that will serve the variant answer, and check the answers.

        ``serve`` is the section of the profile. None: only checks that need no server run.
        """

    @abstractmethod
    def release_files(self, name: str, artifact: Artifact[VariantRecord]) -> Mapping[str, Path]:
        """Return the files to publish, by their public names. ``name`` is the name of the release."""


def require_text_only(checkpoint: Checkpoint, variants: str, reason: str) -> None:
    """Raise InvalidInput if the model also reads pictures or sound, which ``variants`` would lose for ``reason``."""
    kind = kind_of(checkpoint)
    if kind.modalities:
        raise InvalidInput(
            f"variants: {variants}",
            found=f"{kind.noun}, which reads {' and '.join(kind.modalities)}: {reason}",
            expected="a model that reads only text",
            remedy="remove this variant from the profile",
        )


class VariantVerdict(BaseModel, frozen=True, extra="forbid"):
    """Verdict on one variant, with everything that it follows from."""

    format: str
    type: str
    required: bool
    outcome: Outcome
    publishable: bool
    reasons: tuple[str, ...]  # why the variant did not pass, most severe first; empty for a pass
    backend: str = ""  # evaluation backend that scored the variant ('llama_cpp'); empty if none did
    record: VariantRecord | None = None  # None if the variant could not be built
    conversion: ConversionCheck | None = None
    checks: tuple[Check, ...] = ()  # of the files and of the serving runtime
    gate: GateVerdict | None = None  # None if an earlier check refused the variant
    digest: str = ""  # 64 hex digits over the variant's files

    @property
    def stopped_at(self) -> Literal["build", "conversion", "checks", "gate"]:
        """Last step that was reached."""
        if self.gate is not None:
            return "gate"
        if self.record is None:
            return "conversion" if self.conversion and self.conversion.problems else "build"
        return "checks"

    def as_verdict(self) -> Verdict:
        """Return this verdict in the common form of verdicts."""
        return Verdict(
            name=f"variant {self.type}",
            outcome=self.outcome,
            publishable=self.publishable,
            reasons=tuple(f"variant {self.type}: {reason}" for reason in self.reasons),
            evidence=self,
            section=Section(title=f"Variant {self.type}", sentences=self.reasons),
        )
