"""Collect the facts about a release that the card, the compliance sheet and the bill of materials state.

Each fact has a source: the profile (``publish.about``), the merged checkpoint, the evaluation, or the card of a parent.
A fact without a source is missing: it is empty or None, and the documents list it as missing. The same inputs give the
same facts, so they contain no dates and no measured times. The bound of the floating-point operations is one formula of
sizes, which a reader can recompute.

Cards are untrusted text. mergegate reads at most one MiB of a card and does not follow its links. Only links with
``https`` or ``http`` are taken, and every text is escaped where it is shown.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mergegate.merge_core.checkpoint import config_parts, read_gguf_header, read_header
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain, read_json
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.checkpoints import PinnedCheckpoint, PinnedRecipe, card_directory, card_path, read_card
from mergegate.tasks.evaluation import Scores
from mergegate.tasks.merge import MergeSummary, pin_calibration_texts
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.documents.provenance import MergeRelease, hub_id
from mergegate.tasks.publish.public_names import PublicNames
from mergegate.tasks.publish.settings import AboutRelease, Supplier
from mergegate.tasks.publish.targets.contract import PublishTarget
from mergegate.tasks.report import ReportContent
from mergegate.tasks.stage import store
from mergegate.tasks.store import Artifact
from mergegate.tasks.variants import CalibrationSettings

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
# Keys of a configuration that are sizes, and those that are settings of the network.
_SIZE_KEY = re.compile(r"(num|n|max|d)_[a-z0-9_]+|[a-z0-9_]+_(size|dim|rank|layers|heads|experts|window|embd)|r")
_SETTING_KEYS = ("hidden_act", "rope_theta", "lora_alpha", "tie_word_embeddings")
_NO_SIZES = re.compile(r".*(_id|_ids|token|labels|return_sequences|max_length|max_new).*")


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


def merge_computation(pinned_recipe: PinnedRecipe, config: Mapping[str, Any], parameters: int) -> Modification:
    """Return the sizes of a merge whose result has this ``config`` and this number of parameters.

    A parent can have more parameters than the result, but not more than two for each byte of its weights. Texts have at
    most two tokens per byte, because windows overlap.
    """
    models, tokens, prompts = 0, 0, 0
    for document in (*pinned_recipe.recipe.steps, pinned_recipe.recipe):
        models += len(document.own_references())
        if (mixture := document.mixture) is not None and mixture.needs_prompts:
            texts = [text for each in (*mixture.experts, *mixture.shared) for text in (*each.positive, *each.negative)]
            prompts += len(texts)
            tokens += sum(2 * len(text.encode()) for text in texts)
        if document.reads_texts and document.texts:
            pinned = pin_calibration_texts(document, store().hashes)
            tokens += sum(2 * text.path.stat().st_size for _, text in pinned)
    weights = [
        [file.stat().st_size for file in parent.directory.glob("*.*") if file.suffix in (".safetensors", ".bin")]
        for parent in pinned_recipe.parents
    ]
    bound = max(parameters, *(2 * sum(sizes) for sizes in weights))
    return Modification.of_network(config, bound, models, tokens, prompts)


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


def release_facts(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    license: LicenseVerdict,
    merge: Artifact[MergeSummary],
    target: PublishTarget,
    names: PublicNames,
    held_out: DatasetFacts | None = None,
) -> ReleaseFacts:
    """Return the facts about the release of a merge.

    ``content`` and ``license`` have public names. ``held_out`` identifies the held-out text, if there is one.
    """
    config = _readable_config(merge.directory)
    if pinned_recipe.recipe.output:  # The configuration of an adapter, and that of its base model.
        config |= _readable_config(next(parent for parent in pinned_recipe.parents if parent.adapter).directory)
    dtypes: Counter[str] = Counter()
    for name in merge.files:
        if name.endswith(".safetensors"):
            with suppress(InvalidInput):
                for tensor in read_header(merge.directory / name):
                    dtypes[tensor.dtype.code] += tensor.numel
    likelihoods = next((model.likelihoods for model in content.models if model.likelihoods), None)
    datasets = [
        *_evaluation_data(model.scores for model in content.models),
        *([_held_out_data(held_out, likelihoods.documents)] if likelihoods else []),
        *(
            DatasetFacts(names.rename_text(text), "calibration", sha256)
            for text, sha256 in pinned_recipe.recipe.text_digests().items()
        ),
    ]
    return _facts(
        *(content, config, target, names),
        parameters=merge.value.parameters,
        dtypes=_by_count(dtypes),
        parents=_parents(content, pinned_recipe, license, target, names),
        datasets=tuple(datasets),
        modification=merge_computation(pinned_recipe, config, merge.value.parameters),
    )


def variant_facts(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    license: LicenseVerdict,
    merge: MergeRelease,
    files: Mapping[str, Sequence[ReleaseFile]],
    target: PublishTarget,
    names: PublicNames,
    held_out: DatasetFacts | None = None,
    calibration: CalibrationSettings | None = None,
) -> ReleaseFacts:
    """Return the facts about a release of quantized variants of ``merge``.

    ``files`` holds the files of each published variant by its type. ``calibration`` names the text that the quantizer
    reads. The other arguments are those of `release_facts`.
    """
    published = [verdict for verdict in content.variants if verdict.type in files]
    weights = [(file, file.source) for each in files.values() for file in each if isinstance(file.source, Path)]
    configs = (_readable_config(path.parent) for file, path in weights if file.name.endswith("config.json"))
    config = next(filter(None, configs), {})
    parameters: int | None = None
    with suppress(InvalidInput):
        for file in next(iter(files.values()), ()):
            if file.name.endswith(".gguf") and isinstance(file.source, Path):
                header = read_gguf_header(file.source)
                config = config or {"model_type": header.metadata.get("general.architecture", "")}
                parameters = (parameters or 0) + sum(math.prod(tensor.shape) for tensor in header.tensors)
    donor = next((parent for parent in pinned_recipe.parents if parent.ref == str(pinned_recipe.recipe.donor)), None)
    config = {**(_readable_config(donor.directory) if donor else {}), **config}
    types: Counter[str] = Counter()
    datasets: dict[DatasetFacts, None] = {}
    tokens = 0
    for verdict in published:
        types.update(verdict.record.tensor_types if verdict.record else {})
        if verdict.record and verdict.record.calibration and calibration:
            tokens += calibration.samples * calibration.max_length
            text = names.rename_text(str(calibration.documents))
            datasets[DatasetFacts(text, "calibration", verdict.record.calibration)] = None
        for guard in verdict.gate.all_guards if verdict.gate else ():
            datasets[DatasetFacts(guard.task, "evaluation", documents=guard.n)] = None
    if drifts := [verdict.gate.drift for verdict in published if verdict.gate and verdict.gate.drift]:
        datasets[_held_out_data(held_out, max(drift.documents for drift in drifts))] = None
    parent = ParentFacts(merge.name, "merge", merge.sums, merge.hub_id or "", content.licence)
    bound = parameters or 8 * sum(file.size for file, _ in weights)  # a weight has at least one bit
    return _facts(
        *(content, config, target, names),
        parameters=parameters,
        dtypes=_by_count(types),
        parents=(parent,),
        datasets=tuple(datasets),
        modification=Modification.of_network(config, bound, len(published), tokens),
        ancestors=_parents(content, pinned_recipe, license, target, names),
    )


def _facts(
    content: ReportContent, config: Mapping[str, Any], target: PublishTarget, names: PublicNames, **own: Any
) -> ReleaseFacts:
    """Return the facts of both kinds of releases, with those that only one kind has in ``own``."""
    about, source = names.apply(target.about), "publish.about"
    if not about.supplier:
        source = "Hub repository" if target.hub_id else ""
        namespace = (target.hub_id or "").partition("/")[0]
        supplier = Supplier(name=namespace, url=f"https://huggingface.co/{namespace}") if namespace else None
        about = about.model_copy(update={"supplier": supplier})
    classes = config.get("architectures")
    return ReleaseFacts(
        name=content.name,
        address=target.address,
        hub_id=target.hub_id,
        about=about,
        supplier_source=source,
        architecture=str(classes[0] or "") if isinstance(classes, list) and classes else "",
        model_type=str(config.get("model_type") or ""),
        hyperparameters=_hyperparameters(config),
        method=content.method,
        **own,
    )


def _by_count(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


def _parents(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    license: LicenseVerdict,
    target: PublishTarget,
    names: PublicNames,
) -> tuple[ParentFacts, ...]:
    licenses = {model.ref: model.licence for model in content.parents} | dict(license.licenses)
    computes, facts = names.apply(target.about).training_compute, []
    for parent in pinned_recipe.parents:
        public = parent.rename(names.rename_text)
        own_license = licenses.get(public.ref) or licenses.get(public.name) or ""
        facts.append(parent_facts(public, own_license, computes.get(public.ref)))
    return tuple(facts)


def _evaluation_data(all_scores: Iterable[Scores | None]) -> Iterator[DatasetFacts]:
    """Yield the data of each task that at least one model was evaluated on."""
    by_task: dict[str, DatasetFacts] = {}
    for scores in all_scores:
        if scores is None:
            continue
        for score in scores.tasks:
            data = scores.data.get(score.task)
            sources = [
                f"{source.path}@{source.revision}" if source.revision else source.path
                for source in (data.sources if data else ())
            ]
            own = DatasetFacts(
                score.task, "evaluation", data.digest if data else "", score.n, tuple(dict.fromkeys(sources))
            )
            known = by_task.get(score.task)
            if known is None or (known.documents or 0) < score.n or (own.digest and not known.digest):
                by_task[score.task] = own
    yield from by_task.values()


def _held_out_data(held_out: DatasetFacts | None, documents: int) -> DatasetFacts:
    name, digest = (held_out.name, held_out.digest) if held_out else ("held-out text", "")
    return DatasetFacts(name, "perplexity", digest, documents)


def _hyperparameters(config: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Return the sizes in a configuration and in those of the language model inside it, by key."""
    found: dict[str, int | float | str] = {}
    for part in config_parts(config):
        for key, value in part.items():
            if not isinstance(key, str) or key in found or len(key) > 60:
                continue
            is_size = isinstance(value, int) and not isinstance(value, bool) and _SIZE_KEY.fullmatch(key)
            is_setting = key in _SETTING_KEYS and isinstance(value, int | float | str)
            if (is_size and not _NO_SIZES.fullmatch(key)) or is_setting:
                found[key] = value[:100] if isinstance(value, str) else value
    return dict(sorted(found.items()))


def _readable_config(directory: Path) -> dict[str, Any]:
    """Return the configurations of a model and of an adapter, or an empty mapping if they cannot be read."""
    config: dict[str, Any] = {}
    for name in ("adapter_config.json", "config.json"):
        with suppress(InvalidInput):
            config |= read_json(directory / name)
    return config
