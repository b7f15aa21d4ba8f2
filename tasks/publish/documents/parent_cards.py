"""Read the facts about a parent from its card.

Cards are untrusted text. mergegate reads at most one MiB of a card and does not follow its links. Only links with
``https`` or ``http`` are taken, and every text is escaped where it is shown.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote, urlsplit

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.checkpoints import PinnedCheckpoint, card_directory, card_path, read_card
from mergegate.tasks.publish.documents.facts import DocumentLink, ParentCard, ParentFacts, hub_id

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
