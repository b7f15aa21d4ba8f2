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
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.base.stage import Outcome, Section, StageValue, Verdict
from mergegate.tasks.base.store import Artifact, NotInKey, StoredValue
from mergegate.tasks.models.checkpoints import Model, QuantizedModel
from mergegate.tasks.quality.gate import GateVerdict
from mergegate.tasks.quality.perplexity import HeldOutText, Percentage, TextSetting, pin_text, read_texts
from mergegate.tasks.quality.serve import Check, ServeSettings


class VariantGuard(BaseModel, frozen=True, extra="forbid"):
    """Regression guard of a variant: on ``task`` it may be at most ``max_drop`` points worse than the merge."""

    task: str = Field(description="Task of the release, by its name in evaluate.tasks.")
    max_drop: float | None = Field(
        default=None, ge=0, le=100, description="Largest allowed drop in points. Default: that of the variant."
    )
    margin: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Largest upper bound that still passes, in points. Default: max_drop + 1.",
    )


class CalibrationSettings(BaseModel, frozen=True, extra="forbid"):
    """Text that a quantizer reads to choose the quantized weights. No guard may read it."""

    # The content of the file is in the key of every stage that reads it.
    documents: Annotated[LocalPath, NotInKey] = Field(
        description="File with one document per line (jsonl) or per paragraph (plain text)."
    )
    field: str = Field(default="text", description="Field of a jsonl line with the document. Default: text.")
    samples: int = Field(default=128, ge=1, description="Number of documents, from the first. Default: 128.")
    max_length: int = Field(default=512, ge=16, description="Length limit of one document, in tokens. Default: 512.")


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """Documents that a quantizer reads."""

    text: HeldOutText
    samples: int
    max_length: int

    def documents(self) -> list[str]:
        """Read the documents."""
        return [text for _, text in read_texts(self.text, self.samples)]


class VariantSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings that all formats share: what a variant must reach, and what a failure means."""

    required: bool = Field(
        default=False,
        description="Whether a variant that fails refuses the release. false: only the variant is not published. "
        "Default: false.",
    )
    guards: tuple[VariantGuard, ...] = Field(
        default=(),
        description="Guards of the variant, with the merge as their reference. Default: the tasks of the release, "
        "without its advisory guards.",
    )
    max_drop: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Largest allowed drop of each task against the merge, in points. Default: that of the release's "
        "guard of the task.",
    )
    margin: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Largest upper bound that still passes, in points. Default: max_drop + 1.",
    )
    max_increase: Percentage | None = Field(
        default=None,
        description="Largest increase of the perplexity over that of the merge, such as 5%. Default: "
        "perplexity.max_increase.",
    )
    max_different_texts: Percentage = Field(
        default=0.01,
        description="Largest share of the evaluated texts that the runtime's tokenizer may split differently from the "
        "merge's. Default: 1%.",
    )
    suffix: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Suffix of the place where the variant is published: 'GGUF' publishes next to org/name as "
        "org/name-GGUF. Default: the name of the format.",
    )
    calibration: CalibrationSettings | None = Field(
        default=None,
        description="Text for quantizers that measure activations: GPTQ, or the importance matrix of llama.cpp. "
        "Default: none.",
    )
    python: Annotated[LocalPath | None, NotInKey] = Field(
        default=None,
        description="Interpreter of the environment in which the quantizer is installed. Default: that of the "
        "environment which 'make gguf-env' or 'make quantize-env' builds.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        tasks = [guard.task for guard in self.guards]
        if repeated := next((task for task in tasks if tasks.count(task) > 1), None):
            raise ValueError(f"guards: {repeated} is listed twice")
        if self.margin is not None and self.max_drop is not None and self.margin < self.max_drop:
            raise ValueError(f"margin ({self.margin:g}) must be at least max_drop ({self.max_drop:g})")
        return self

    def pin_calibration(self, root: Path, hashes: HashMemo) -> Calibration | None:
        """Hash the calibration text, and return it with its limits. None if no text is set.

        ``root`` is the directory of the profile.

        Raises:
            InvalidInput: The file is missing or empty, or a document does not have the field.
        """
        if (settings := self.calibration) is None:
            return None
        location = f"variants: calibration.documents: {settings.documents}"
        setting = TextSetting(location, "variants: calibration.field")
        text = pin_text(root / settings.documents, settings.field, hashes, setting, conversations=True)
        return Calibration(text=text, samples=settings.samples, max_length=settings.max_length)


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
