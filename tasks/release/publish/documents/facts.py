"""Define the facts that the documents of a release state, and read those about its parents from their cards.

Each fact has a source: the profile (``publish.about``), the merged checkpoint, the evaluation, or the card of a parent.
A fact without a source is missing: it is empty or None, and the documents list it as missing. The same inputs give the
same facts, so they contain no dates and no measured times. The bound of the floating-point operations is one formula of
sizes, which a reader can recompute.

Cards are untrusted text. mergegate reads at most one MiB of a card and does not follow its links. Only links with
``https`` or ``http`` are taken, and every text is escaped where it is shown.

A release contains the facts as ``evidence/facts.json``. ``mergegate verify --verdict`` writes the documents again from
this file and the other files, and compares every byte.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.checkpoint import config_parts
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.merge import Numerics, WeightComparison
from mergegate.tasks.models.checkpoints import PinnedCheckpoint, card_directory, card_path, read_card
from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation
from mergegate.tasks.release.publish.content import FACTS, read_document
from mergegate.tasks.release.publish.settings import AboutRelease, SigstoreSettings
from mergegate.tasks.release.report import ReportContent

_PER_WIDTH = 1_000  # operations per parameter, model and column: the method, and decompositions of matrices
_PER_TOKEN = 64  # operations per parameter, layer and token: reading with derivatives, and products of inputs
_UNKNOWN_WIDTH, _UNKNOWN_LAYERS = 16_384, 128
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
class Modification:
    """Sizes of a merge or a quantization that bound its floating-point operations."""

    parameters: int  # largest number of parameters of a model that takes part
    models: int  # number of models that are combined, over all steps of the recipe
    tokens: int  # upper bound of the tokens of all texts that models read for the modification
    width: int  # width of the hidden states
    layers: int  # number of layers
    prompts: int = 0  # number of prompts of the recipe that a model reads for the routers

    @classmethod
    def of_network(
        cls, config: Mapping[str, Any], parameters: int, models: int = 1, tokens: int = 0, prompts: int = 0
    ) -> Modification:
        """Return the sizes for a network with this ``config.json``. An unknown size is replaced by a large one."""

        def largest(*names: str) -> int:
            values = (part.get(name) for part in config_parts(config) for name in names)
            return max((value for value in values if isinstance(value, int)), default=0)

        width = largest("hidden_size", "n_embd", "d_model", "dim") or _UNKNOWN_WIDTH
        layers = largest("num_hidden_layers", "n_layer", "n_layers", "num_layers") or _UNKNOWN_LAYERS
        return cls(parameters, models, tokens, width, layers, prompts)

    @property
    def flop(self) -> float:
        """Upper bound of the floating-point operations."""
        return float(self.parameters) * (_PER_WIDTH * self.models * self.width + _PER_TOKEN * self.layers * self.tokens)

    @property
    def formula(self) -> str:
        """Formula of the bound with its numbers."""
        return (
            f"{self.parameters:,} parameters · ({_PER_WIDTH:,} · {self.models} models · width {self.width:,} + "
            f"{_PER_TOKEN} · {self.layers} layers · {self.tokens:,} tokens)"
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
    """Facts about one parent of a merge, as far as its card states them."""

    name: str  # public reference, as in the recipe
    role: str  # ``base`` or ``parent``. ``merge`` for the release that variants were quantized from.
    identity: str  # commit on the Hub, or sha256 of the files
    hub_id: str = ""  # id ``org/name`` on the Hub, or empty for a local model
    license: str = ""  # license identifier, or empty if licenses were not checked
    datasets: tuple[str, ...] = ()  # training datasets that the card names (``datasets``)
    training_summaries: tuple[DocumentLink, ...] = ()  # links to summaries of the training content
    copyright_policies: tuple[DocumentLink, ...] = ()  # links to policies on copyright
    # Floating-point operations of its training, or None if neither profile nor card states it
    training_compute: float | None = None
    training_compute_source: str = ""  # ``publish.about`` or the card. Empty if ``training_compute`` is None.
    energy: float | None = None  # energy of its training in kWh, if the card states it
    emissions: float | None = None  # emissions of its training in grams of CO2 equivalent, if the card states it
    emissions_source: str = ""  # source of the emissions according to the card, such as ``codecarbon``
    cards: tuple[ParentCard, ...] = ()  # cards that were read: of the model, and of its adapter if there is one

    @property
    def url(self) -> str:
        return f"https://huggingface.co/{self.hub_id}" if self.hub_id else ""

    @property
    def supplier(self) -> str:
        """Namespace on the Hub, or empty for a local model."""
        return self.hub_id.partition("/")[0]


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset that a release was evaluated on or calibrated with."""

    name: str  # name of the task, or public path of a text
    purpose: str  # ``evaluation``, ``perplexity`` or ``calibration``
    digest: str = ""  # 64 hex digits that pin the data, or empty
    documents: int | None = None  # number of documents that were used, or None if unknown
    sources: tuple[str, ...] = ()  # datasets on the Hub, as ``id@revision``. Empty for local data.


@dataclass(frozen=True)
class ReleaseFacts:
    """Facts about a release."""

    name: str  # name of the release
    address: str  # reference for ``mergegate verify``. '.' for a local directory.
    hub_id: str | None  # id ``org/name`` of the repository on the Hub, or None
    # Statements of the publisher, with the supplier filled in from the Hub repository if it is known
    about: AboutRelease
    architecture: str  # class of the model, such as ``LlamaForCausalLM``, or empty
    model_type: str  # type in ``config.json``, such as ``llama``, or empty
    hyperparameters: Mapping[str, int | float | str]  # sizes in ``config.json``, such as ``hidden_size``
    parameters: int | None  # number of parameters of the released weights, or None if unknown
    dtypes: tuple[str, ...]  # types of the stored weights, such as ``BF16``, the most frequent first
    method: str  # description of the merge, such as ``ties of 2 over base``
    # Facts about each parent, in the recipe's order. For variants, the release of the merge.
    parents: tuple[ParentFacts, ...]
    datasets: tuple[DatasetFacts, ...]  # datasets of the evaluation, the perplexity check and the calibration
    modification: Modification  # sizes that bound the computation
    ancestors: tuple[ParentFacts, ...] = ()  # for variants, facts about the parents of the merge. Empty for a merge.
    supplier_source: str = ""  # ``publish.about`` or ``Hub repository``. Empty if the supplier is unknown.


@dataclass(frozen=True)
class MergeOrigin:
    """Inputs of a merge.

    ``texts`` holds the sha256 of each text that models read for the merge, by its path in the recipe. ``unused_refs``
    holds the references of parents that were read, but whose weights do not contribute. ``weights`` compares the merge
    with its parents. None: it was not compared.
    """

    numerics: Numerics
    parents: Sequence[PinnedCheckpoint]
    texts: Mapping[str, str] = field(default_factory=dict)
    unused_refs: Sequence[str] = ()
    weights: WeightComparison | None = None


@dataclass(frozen=True)
class MergeRelease:
    """The release of a merge that variants were quantized from."""

    name: str  # name of the release
    version: str  # version name
    sums: str  # sha256 of its SHA256SUMS, which covers all of its files
    reference: str  # reference for ``mergegate verify``, as written in the place of the variants
    hub_id: str | None = None  # id ``org/name`` of its repository on the Hub, or None


@dataclass(frozen=True)
class VariantOrigin:
    """Input of quantized variants, their settings in the profile, and the names of their files by type."""

    merge: MergeRelease
    settings: Mapping[str, object]
    files: Mapping[str, Sequence[str]]


class DocumentFacts(BaseModel):
    """Everything that the documents of a release state, with public names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, str]  # sha256 of each file of the model, of its licenses and of its evidence, by name
    content: ReportContent  # content of the report
    license: LicenseVerdict  # license verdict, without the texts of ancestors
    missing: tuple[Obligation, ...]  # obligations that the release does not fulfill
    metadata: dict[str, Any]  # metadata of the card
    facts: ReleaseFacts  # facts about the model and its parents
    origin: MergeOrigin | VariantOrigin  # inputs of the merge or of the variants, without directories
    signed: bool  # whether a key signs the release
    keyless: SigstoreSettings | None  # settings of the keyless signature. None: there is none.
    version: str | None  # name of the version. None: it follows from the content.

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that determine the weights and the scores, by name."""
        versions = {library.name: library.version for library in self.content.versions}
        return versions | (self.origin.numerics.versions if isinstance(self.origin, MergeOrigin) else {})

    @property
    def device(self) -> str:
        return self.origin.numerics.device if isinstance(self.origin, MergeOrigin) else "cpu"

    @property
    def license_name(self) -> str:
        """License of the weights: identifier, or name of a license of its own."""
        card = self.license.combination.card
        return str(card.get("license_name") or card.get("license") or "")

    @property
    def signature_options(self) -> str:
        """Options of ``mergegate verify`` that check the signatures of the release."""
        options = " --key release.pub" if self.signed else ""
        if self.keyless:
            options += " --identity ID --issuer URL" + (" --trust-config FILE" if self.keyless.trust_config else "")
        return options


def read_facts(content: bytes) -> DocumentFacts:
    """Parse the content of ``evidence/facts.json``. Raise InvalidInput or ValueError if it is not valid."""
    return DocumentFacts.model_validate(read_document(content, FACTS))


def hub_id(parent: PinnedCheckpoint) -> str:
    return parse_reference(parent.ref, parent.name).path


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
