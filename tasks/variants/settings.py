"""Define the settings of a quantized variant that all formats share, in a profile under ``variants``.

::

    variants:
      - {format: gguf, types: [Q8_0, Q4_K_M]}
      - {format: compressed-tensors, scheme: FP8_DYNAMIC, required: true}

Each format adds settings of its own (see ``contract``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.perplexity import HeldOutText, Percentage, TextSetting, pin_text, read_texts
from mergegate.tasks.store import NotInKey


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
