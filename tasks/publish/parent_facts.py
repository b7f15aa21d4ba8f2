"""Read what the cards of a parent say about its training: datasets, energy, and links to documents of its provider.

Cards are untrusted text. mergegate reads at most one MiB of a card and does not follow its links. Only links with
``https`` or ``http`` are taken, and every text is escaped where it is shown.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.checkpoints import PinnedCheckpoint, card_directory, card_path, read_card
from mergegate.tasks.publish.provenance import hub_id

_MAX_CARD_BYTES = 1 << 20
_MAX_LINKS, _MAX_TEXT, _MAX_URL = 5, 200, 500
_MAX_DATASETS = 100
# Addresses without characters that end a link in Markdown or HTML. A bare address does not end with punctuation.
_URL = r"https?://[A-Za-z0-9._~:/?#@!$&*+,;=%-]{1,500}"
_LINK = re.compile(
    rf"\[(?P<text>[^\[\]\n]{{1,300}})\]\(\s{{0,4}}<?(?P<url>{_URL})>?[^)\n]{{0,200}}\)"
    rf"|<a\s[^<>]{{0,200}}href=[\"'](?P<href>{_URL})[\"'][^<>]{{0,200}}>(?P<label>[^<>]{{1,300}})</a>"
    rf"|(?P<bare>{_URL})"
)
_TRAINING_SUMMARY = re.compile(
    r"(?:public )?summary of (?:the )?(?:training|content used for training|data used for training)"
    r"|training[ -](?:data|content|dataset)[ -](?:public[ -])?(?:summary|transparency|disclosure)"
    r"|public[ -](?:training[ -])?(?:data[ -]|content[ -])?summary|data[ -]summary"
    r"|template (?:of|by|from) the (?:eu )?ai office|ai office template",
    re.IGNORECASE,
)
_COPYRIGHT_POLICY = re.compile(
    r"copyright[ -](?:compliance[ -])?(?:policy|statement|summary|notice policy)"
    r"|(?:policy|policies) (?:on|for|regarding|to comply with) (?:eu )?copyright"
    r"|intellectual[ -]property[ -]policy|(?:ip|copyright)[ -]complaints?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DocumentLink:
    """A link in a parent's card to a document of its provider: what it is called there, and its address."""

    text: str
    url: str


@dataclass(frozen=True)
class ParentCard:
    """The card that facts about a parent come from: the model that it describes, and the sha256 of the file."""

    model: str
    sha256: str


@dataclass(frozen=True)
class ParentFacts:
    """Facts about one parent of a merge, as far as its card states them.

    Attributes:
        name: Public reference, as in the recipe.
        role: ``base`` or ``parent``. ``merge`` for the release that variants were quantized from.
        identity: Commit on the Hub, or sha256 of the files.
        hub_id: Id ``org/name`` on the Hub, or empty for a local model.
        license: License identifier, or empty if licenses were not checked.
        datasets: Training datasets that the card names (``datasets``).
        training_summaries: Links to summaries of the training content.
        copyright_policies: Links to policies on copyright.
        training_compute: Floating-point operations of its training, or None if neither profile nor card states it.
        training_compute_source: ``publish.about`` or the card. Empty if ``training_compute`` is None.
        energy: Energy of its training in kWh, if the card states it.
        emissions: Emissions of its training in grams of CO2 equivalent, if the card states it.
        emissions_source: Source of the emissions according to the card, such as ``codecarbon``.
        cards: Cards that were read: of the model, and of its adapter if there is one.
    """

    name: str
    role: str
    identity: str
    hub_id: str = ""
    license: str = ""
    datasets: tuple[str, ...] = ()
    training_summaries: tuple[DocumentLink, ...] = ()
    copyright_policies: tuple[DocumentLink, ...] = ()
    training_compute: float | None = None
    training_compute_source: str = ""
    energy: float | None = None
    emissions: float | None = None
    emissions_source: str = ""
    cards: tuple[ParentCard, ...] = ()

    @property
    def url(self) -> str:
        """Page of the model on the Hub, or empty for a local model."""
        return f"https://huggingface.co/{self.hub_id}" if self.hub_id else ""

    @property
    def supplier(self) -> str:
        """Namespace on the Hub, or empty for a local model."""
        return self.hub_id.partition("/")[0]


def parent_facts(parent: PinnedCheckpoint, license: str, training_compute: float | None = None) -> ParentFacts:
    """Return the facts about ``parent``, which has its public name.

    ``training_compute`` is the value in the profile, in floating-point operations. Reading a card never fails: what
    cannot be read is missing.
    """
    models = [(parse_reference(parent.ref, parent.name).path, parent.directory)]
    if parent.adapter:
        models.append((parent.adapter.ref, parent.adapter.directory))
    cards, links, fields = list[ParentCard](), list[DocumentLink](), dict[str, object]()
    datasets: dict[str, None] = {}
    for name, model_directory in models:
        directory = card_directory(model_directory)
        try:
            path = card_path(directory)
            if path is None:
                continue
            with open_plain(path, within=directory) as file:
                content = file.read(_MAX_CARD_BYTES)
                digest = hashlib.sha256(content)
                while block := file.read(_MAX_CARD_BYTES):
                    digest.update(block)
        except (InvalidInput, OSError):
            continue
        cards.append(ParentCard(name, digest.hexdigest()))
        links += card_links(content.decode(errors="replace"))
        metadata = read_card(directory).fields
        value = metadata.get("datasets")
        for dataset in (value if isinstance(value, list) else [value])[:_MAX_DATASETS]:
            if isinstance(dataset, str) and dataset.strip():
                datasets[" ".join(dataset.split())[:_MAX_TEXT]] = None
        # The fields of an adapter describe its own training, which is small. So the card of the model comes first.
        fields = {**metadata, **fields}
    emissions = fields.get("co2_eq_emissions")
    details = emissions if isinstance(emissions, dict) else {"emissions": emissions}
    source = details.get("source")
    compute, compute_source = training_compute, "publish.about"
    if compute is None:
        compute, compute_source = _positive(fields.get("training_compute")), f"card of {parent.ref}"
    return ParentFacts(
        name=parent.ref,
        role="base" if parent.is_base else "parent",
        identity=parent.revision or parent.digest,
        hub_id=hub_id(parent) if parent.revision is not None else "",
        license=license,
        datasets=tuple(datasets),
        training_summaries=_links_about(_TRAINING_SUMMARY, links),
        copyright_policies=_links_about(_COPYRIGHT_POLICY, links),
        training_compute=compute,
        training_compute_source=compute_source if compute is not None else "",
        energy=_positive(details.get("energy_consumed")),
        emissions=_positive(details.get("emissions")),
        emissions_source=" ".join(source.split())[:_MAX_TEXT] if isinstance(source, str) else "",
        cards=tuple(cards),
    )


def card_links(text: str) -> Iterator[DocumentLink]:
    """Yield the links to web pages in a card. The text of a bare address is its line up to the address."""
    for match in _LINK.finditer(text):
        url, label = match["url"] or match["href"] or match["bare"].rstrip(".,;:!?*"), match["text"] or match["label"]
        if label is None:
            line = text[max(text.rfind("\n", 0, match.start()) + 1, match.start() - _MAX_TEXT) : match.start()]
            label = line.strip(" \t-*|:<>#") or url
        try:
            parts = urlsplit(url)
        except ValueError:
            continue
        if parts.hostname and "@" not in parts.netloc and len(url) <= _MAX_URL:
            yield DocumentLink(" ".join(label.split())[:_MAX_TEXT], url)


def _links_about(subject: re.Pattern[str], links: Sequence[DocumentLink]) -> tuple[DocumentLink, ...]:
    """Return the links whose text or address is about ``subject``, each address once."""
    matching: dict[str, DocumentLink] = {}
    for link in links:
        parts = urlsplit(link.url)
        words = re.sub(r"[-_./%]+", " ", unquote(f"{parts.path} {parts.fragment}"))
        if subject.search(link.text) or subject.search(words):
            matching.setdefault(link.url, link)
    return tuple(matching.values())[:_MAX_LINKS]


def _positive(value: object) -> float | None:
    """Return an untrusted value as a number, or None if it is not a positive finite number of a plausible size."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value[:40] if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and 0 < number <= 1e32 else None
