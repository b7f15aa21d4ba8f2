"""What a method that looks at texts is told of them: each model's own text, and how the texts are read.

    merge_method: regmean
    models:
      - model: org/math
        text: texts/math.jsonl          # beside the recipe: what this model shall still be able to do
      - model: org/verse
        text: texts/verse.jsonl
    statistics: {documents: 256, max_length: 2048}

A text is read by its model before the merge; what was measured then stands in the recipe in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mergegate.merge_core.checkpoint import AnyTensor, StoredMoments
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import Method
from mergegate.merge_core.recipe.keys import known_mapping

_LARGEST = 1 << 20


@dataclass(frozen=True, order=True)
class CalibrationReading:
    """How texts are read.

    Args:
        documents: The first so many of each text.
        max_length: Tokens that are read at once.
        field: Of a line of JSON.
        diagonal_above: Inputs wider than this are kept as squares only: the moments of one of 14336 take 0.4 GB.
    """

    documents: int = 256
    max_length: int = 2048
    field: str = "text"
    diagonal_above: int = 8192

    def canonical(self) -> dict[str, Any]:
        """JSON-able form of what decides the result."""
        return asdict(self)

    def content_key(self) -> dict[str, Any]:
        """What counts of it in a key; the field is that of a text."""
        return {name: value for name, value in self.canonical().items() if name != "field"}


class CalibrationRequest(NamedTuple):
    """What a document of a recipe wants of a model and its text: where two want the same there is one answer.

    Args:
        model: Its reference.
        text: As the recipe names it.
        what: As :attr:`.Traits.reads_text`.
        reading: How it is read.
    """

    model: str
    text: str
    what: str
    reading: CalibrationReading


@dataclass(frozen=True)
class InputMeasurements:
    """What was measured of one model.

    Args:
        digest: Of the content.
        text: sha256 of the text.
        moments: By the name of the matrix that is multiplied with the input.
        importance: By the name of the tensor, of the same shape.
    """

    digest: str
    text: str
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    importance: Mapping[str, AnyTensor] = field(default_factory=dict)


def parse_reading(value: object, method: Method, where: str) -> CalibrationReading:
    """The recipe's ``statistics``.

    Raises:
        InvalidInput: A key or value that has no meaning, or a method that reads no text.
    """
    usual = CalibrationReading()
    if value is None:
        return usual
    if method.traits.reads_text is None:
        raise InvalidInput(where, found=f"{method.name}, which reads no text", expected="nothing", remedy="remove it")
    content = known_mapping(value, where, tuple(usual.canonical()))
    if "diagonal_above" in content and method.traits.reads_text != "moments":
        raise InvalidInput(
            f"{where}.diagonal_above", found=f"{method.name}, of which no matrices are kept", expected="nothing"
        )
    for key, said in content.items():
        if key == "field":
            if not isinstance(said, str) or not said:
                raise InvalidInput(f"{where}.{key}", found=f"{said!r:.60}", expected="the name of a field")
            continue
        least = 0 if key == "diagonal_above" else 1 if key == "documents" else 2
        if type(said) is not int or not least <= said <= _LARGEST:
            raise InvalidInput(f"{where}.{key}", found=f"{said!r:.60}", expected=f"a whole number from {least}")
    return CalibrationReading(**content)


def parse_text(value: object, method: Method, where: str, *, is_base: bool) -> str | None:
    """A model's ``text``: a path.

    Raises:
        InvalidInput: No path, or a text that nobody would read.
    """
    if value is None:
        return None
    if method.traits.reads_text is None or is_base:
        who = "the base, which is not merged" if is_base else f"{method.name}, which reads no text"
        raise InvalidInput(where, found=who, expected="nothing", remedy="remove it")
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise InvalidInput(where, found=f"{value!r:.60}", expected="the path of a text (jsonl, or plain text)")
    return value


def require_texts(models: Iterable[tuple[str, str | None]], method: Method, where: str) -> None:
    """See that each model has a text, where the method reads some.

    Args:
        models: Reference and text of each that is merged.

    Raises:
        InvalidInput: naming the first without.
    """
    if method.traits.reads_text is None:
        return
    if lacking := next((model for model, text in models if text is None), None):
        raise InvalidInput(
            f"{where}: {lacking}",
            found="no 'text'",
            expected=f"a text of its own: {method.name} looks at what each model does with one",
            remedy="add 'text: FILE' beside 'model', with documents of what it shall still be able to do",
        )
