"""Parse the calibration texts of a recipe: one text per model, and the settings for reading them.

    merge_method: regmean
    models:
      - model: org/math
        text: texts/math.jsonl          # relative to the recipe; examples of this model's tasks
      - model: org/verse
        text: texts/verse.jsonl
    statistics: {documents: 256, max_length: 2048}

Each model reads its text before the merge. The measurements then replace the texts in the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mergegate.merge_core.checkpoint import AnyTensor, StoredMoments
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import Method
from mergegate.merge_core.recipe.keys import known_mapping

_LARGEST = 1 << 20


@dataclass(frozen=True, order=True)
class CalibrationReading:
    """Settings for reading calibration texts.

    Args:
        documents: Number of documents to read, from the start of each text.
        max_length: Largest number of tokens per forward pass. Longer documents are split into several windows.
        field: JSON field that contains the text of a line.
        diagonal_above: Largest input width for which the full moment matrix is stored. For wider inputs, only the
            diagonal is stored: the full matrix for width 14336 takes 0.4 GB.
    """

    documents: int = 256
    max_length: int = 2048
    field: str = "text"
    diagonal_above: int = 8192

    def canonical(self) -> dict[str, Any]:
        """Return the fields that determine the result, as JSON-compatible data."""
        return asdict(self)

    def content_key(self) -> dict[str, Any]:
        """Return the settings that belong in a cache key, which excludes ``field``."""
        return {name: value for name, value in self.canonical().items() if name != "field"}


class CalibrationRequest(NamedTuple):
    """A statistic to measure with one model and its calibration text. Equal requests share one result.

    ``text`` is a path as the recipe writes it, and ``statistic`` a value of :attr:`.Traits.reads_text`.
    """

    model: str
    text: str
    statistic: str
    reading: CalibrationReading


@dataclass(frozen=True)
class InputMeasurements:
    """Measurements of one model on its calibration text.

    Args:
        digest: Digest of the measurements.
        text: SHA-256 digest of the text.
        moments: Input moments, by name of the matrix that is multiplied with the input.
        importance: Importance of each element, in the shape of the tensor, by tensor name.
    """

    digest: str
    text: str
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    importance: Mapping[str, AnyTensor] = field(default_factory=dict)


def parse_reading(value: object, method: Method, location: str, *, repairs: bool = False) -> CalibrationReading:
    """Return the settings in ``statistics`` of a recipe. With ``repairs``, its routers are refitted to the texts.

    Raises:
        InvalidInput: A key or value is invalid, or the recipe reads no texts.
    """
    defaults = CalibrationReading()
    if value is None:
        return defaults
    if method.traits.reads_text is None and not repairs:
        raise InvalidInput(
            location, found=f"{method.name} does not read texts", expected="no such key", remedy="remove it"
        )
    content = known_mapping(value, location, tuple(defaults.canonical()))
    if "diagonal_above" in content and method.traits.reads_text != "moments":
        raise InvalidInput(
            f"{location}.diagonal_above",
            found=f"{method.name} does not store matrices",
            expected="no such key",
            remedy="remove it",
        )
    for key, setting in content.items():
        if key == "field":
            if not isinstance(setting, str) or not setting:
                raise InvalidInput(f"{location}.{key}", found=f"{setting!r:.60}", expected="the name of a field")
            continue
        minimum = 0 if key == "diagonal_above" else 1 if key == "documents" else 2
        if type(setting) is not int or not minimum <= setting <= _LARGEST:
            raise InvalidInput(
                f"{location}.{key}", found=f"{setting!r:.60}", expected=f"a whole number of at least {minimum}"
            )
    return CalibrationReading(**content)
