"""Check a merge before any weight is read, and list all problems, most severe first.

For example::

    planned = plan_with_findings(recipe, checkpoints)
    if not planned.blocking:
        merge_weights(planned.plan, out)

Models of different sizes differ in every tensor, but a user needs to read that only once. A finding names its cause
(``Finding.cause``), and ``merge_core.errors.group_findings`` groups findings by cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from mergegate.merge_core.architecture import (
    class_difference,
    differing_settings,
    has_own_head,
    is_base_class,
    kind_of,
    layer_count,
    text_part,
    vocabulary_size,
)
from mergegate.merge_core.checkpoint import DEFAULT, MODULES_FILE, Checkpoint, Companions, StoredTensor, equal_bytes
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS, cached_tokenizers
from mergegate.merge_core.errors import Finding, InvalidInput, Severity, finding_of, to_printable, worst_first
from mergegate.merge_core.plan.companions import lost_files, tokenizer_donor
from mergegate.merge_core.plan.consistency import config_value, self_consistency, unused_tensors
from mergegate.merge_core.plan.jobs import MergePlan
from mergegate.merge_core.plan.plan import assemble, parents_of, single_experts, with_findings
from mergegate.merge_core.plan.tokenizers import TokenizerPair, compare_to_donor
from mergegate.merge_core.recipe import Recipe

# Key with which a profile accepts a different chat template.
_TEMPLATE_KEY = "chat_template"
# transformers classes that follow tokenizer.json and add no rules of their own.
_TOKENIZERS_WITHOUT_RULES = ("PreTrainedTokenizer", "TokenizersBackend")
_END = "eos_token_id"
# Tasks of language models that other kinds of models are trained from.
_PRETRAINED = ("text-generation", "fill-mask")
# Kinds of models whose outputs have names.
_WITH_HEADS = ("classifier", "cross-encoder", "other")
# Smallest factor between two bases of rotary positions that forbids a merge, and the key that accepts it.
_FAR, _BASE = 100, "rope_theta"
# Labels of the config.json keys that decide tensor shapes, including older key names.
_SIZES: Mapping[str, str] = {
    "hidden_size": "hidden size",
    "n_embd": "hidden size",
    "intermediate_size": "feed-forward size",
    "n_inner": "feed-forward size",
    "num_attention_heads": "heads",
    "n_head": "heads",
    "num_key_value_heads": "key-value heads",
    "head_dim": "head size",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "moe_intermediate_size": "size of an expert",
}
# End of the place of a finding about models with different networks.
_CLASSES = ": config.json: architectures"
_COUNTED = ("layers", "heads", "key-value heads", "experts")
_HEADS = {True: "an output head of its own", False: "no output head, because the embedding serves as the head"}


@dataclass(frozen=True)
class PlannedMerge:
    """A plan and all problems with it.

    Args:
        findings: Findings, most severe first. ``block`` means that the merge is impossible or would be silently wrong.
        plan: None if the checkpoints cannot be merged. A plan can exist although a finding blocks the merge: models
            with different vocabularies can be merged, but the result is useless.
        tokenizer_pairs: Pairs of tokenizers that may split text differently, each with the finding that reports it.
            Only running the tokenizers shows how many texts they split differently.
    """

    findings: tuple[Finding, ...]
    plan: MergePlan | None
    tokenizer_pairs: tuple[TokenizerPair, ...] = ()

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "block")


class _Pair(NamedTuple):
    """The donor of a recipe document, whose config the result gets, and another model of the document."""

    donor_name: str
    donor: Checkpoint
    name: str
    model: Checkpoint


def preflight(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> tuple[Finding, ...]:
    """Check a merge like :func:`plan_with_findings`, but return only the findings."""
    return plan_with_findings(recipe, checkpoints).findings


@cached_tokenizers()
def plan_with_findings(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], accepted_differences: Collection[str] = ()
) -> PlannedMerge:
    """Plan the merge of ``recipe`` and check it, using only headers, configs and tokenizer files.

    ``checkpoints`` holds an opened checkpoint for every reference in the recipe, by ``str(ref)``. A missing checkpoint
    is a blocking finding. ``accepted_differences`` are the keys of the differences between tokenizers, prompts and
    processors that a reviewer has accepted, such as ``merges``, ``chat_template``, ``prompts`` or ``image_mean``.
    """
    findings: list[Finding] = []
    sizes: list[Finding] = []
    measurable: list[TokenizerPair] = []
    plan = None
    try:
        assembled, tables, problems = assemble(recipe, checkpoints)
    except InvalidInput as error:
        findings.append(finding_of(error))
        tables = single_experts(checkpoints)
    else:
        findings += problems
        blocked = {problem.where for problem in problems if problem.severity == "block"}
        for part in (*assembled.steps, assembled):
            findings += unused_tensors(part, tables, blocked)
            findings += _compare_templates(part, tables, accepted_differences)
            findings += _compare_tables(part)
            if part.recipe.output is None:  # An adapter has none of a model's files.
                parents = parents_of(part.recipe, part.jobs, tables)
                findings += lost_files(part.donor, part.tokenizer, parents, accepted_differences)
        if not blocked:
            plan = with_findings(assembled, tables, problems)
    for document in (*recipe.steps, recipe):
        models = {str(ref): tables[str(ref)] for ref in document.own_references() if str(ref) in tables}
        donor = str(document.donor)
        if donor not in models:
            continue
        for name, checkpoint in models.items():
            findings += self_consistency(name, checkpoint)
            if name != donor:
                pair = _Pair(donor, models[donor], name, checkpoint)
                if document.mixture is None:  # A mixture uses one part of each expert and compares it itself.
                    findings += _compare_configs(pair, accepted_differences, aligned=document.tokenizer is not None)
                    sizes += _compare_sizes(pair)
                findings += _compare_forms(document, pair)
        findings += _compare_kinds(document, models)
        if document.mixture is None:
            findings += _compare_heads(models, accepted_differences)
        tokenizer_findings, tokenizer_pairs = compare_to_donor(document, models, frozenset(accepted_differences))
        findings += tokenizer_findings
        measurable += tokenizer_pairs
    # List a difference in size before the findings that it causes, but only if one of them blocks the merge: slices may
    # have cut the layers to fit.
    blocking_causes = {finding.cause for finding in findings if finding.severity == "block"}
    causes = [size for size in sizes if size.cause in blocking_causes or size.where.endswith(_CLASSES)]
    return PlannedMerge(worst_first([*causes, *findings]), plan, tuple(measurable))


def _compare_kinds(document: Recipe, models: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield findings if the models of a recipe document are of different kinds.

    The result has one kind, so it would lose what makes the others work: a pooling, or the head of a classifier. Two
    kinds of networks fit nevertheless. A network without a head (``BertModel``), or without a class in its config,
    has no kind of its own. The base may be the language model that the others were trained from, because task vectors
    are differences of its weights.
    """
    kinds = {name: kind_of(model) for name, model in models.items()}
    donor = str(document.donor)
    headless = [
        name
        for name, model in models.items()
        if MODULES_FILE not in model.companions and (not model.class_name or is_base_class(model.class_name))
    ]
    own = {name: kind for name, kind in kinds.items() if name not in headless}
    pretrained = document.base is not None and donor in own and own[donor].pipeline_tag in _PRETRAINED
    fitting = {name: kind for name, kind in own.items() if not (pretrained and name == donor)} or own
    if not fitting:
        return
    first = donor if donor in fitting else next(iter(fitting))
    for name, kind in fitting.items():
        # A different network is a finding of its own.
        if kind.name != fitting[first].name and class_difference(models[first], models[name]) != "network":
            yield Finding(
                "block",
                f"{name}: kind of model",
                found=kind.noun,
                expected=f"{fitting[first].noun}, like {first}",
                remedy="merge models of one kind. Only the base may be the pretrained network of the others",
            )
    if fitting[first].name == "embedding":
        for name in headless:
            if document.base is None or name != donor:
                yield Finding(
                    "warn",
                    f"{name}: {MODULES_FILE}",
                    found="missing, so its pooling is unknown",
                    expected=f"an embedding model with the pooling of {first}, which the result gets",
                    remedy="make sure that the model was trained with this pooling",
                )


def _compare_sizes(pair: _Pair) -> Iterator[Finding]:
    """Yield a finding if the models have different networks, or one that lists all sizes in which they differ."""
    donor_name, donor, name, parent = pair
    if class_difference(donor, parent) == "network":
        order = ((donor_name, donor, name, parent), (name, parent, donor_name, donor))
        whole = next((models for models in order if _is_text_part(models[1], models[3])), None)
        relation = f"; {whole[2]} is the text model alone of a multimodal model like {whole[0]}" if whole else ""
        yield Finding(
            "block",
            f"{name}{_CLASSES}",
            found=(parent.architecture or "no value") + relation,
            expected=f"{donor.architecture or 'no value'}, as in {donor_name}",
            remedy=f"save the text model of {whole[0]} as a model of its own and merge text models; see "
            "docs/how-to/gate-other-kinds.md"
            if whole
            else "merge models of one architecture",
            cause=f"{name}: size",
        )
        return
    pairs = [("layers", layer_count(parent.config), layer_count(donor.config))]
    pairs += [(label, config_value(parent, key), config_value(donor, key)) for key, label in _SIZES.items()]
    differing = [
        f"{parent_value} {label} instead of {donor_value}"
        if label in _COUNTED
        else f"{label} {parent_value} instead of {donor_value}"
        for label, parent_value, donor_value in pairs
        if parent_value != donor_value and parent_value is not None and donor_value is not None
    ]
    if differing:
        yield Finding(
            "block",
            f"{name}: config.json",
            found=", ".join(differing),
            expected=f"the size of {donor_name}",
            remedy="merge models of one architecture and size",
            cause=f"{name}: size",
        )


def _is_text_part(multimodal: Checkpoint, text: Checkpoint) -> bool:
    part = text_part(multimodal.config)
    return part.key is not None and part.model_type == text.config.get("model_type")


def _compare_configs(pair: _Pair, accepted_differences: Collection[str], *, aligned: bool) -> Iterator[Finding]:
    donor_name, donor, name, parent = pair
    if class_difference(donor, parent) == "network":
        return  # _compare_sizes reports it.
    yield from _compare_settings(pair, accepted_differences)
    donor_end, parent_end = (config_value(checkpoint, _END) for checkpoint in (donor, parent))
    if not aligned and donor_end != parent_end and donor_end is not None and parent_end is not None:
        yield Finding(
            "warn",
            f"{name}: config.json: {_END}",
            found=f"{parent_end}",
            expected=f"{donor_end}, as in {donor_name}, whose config the result gets",
            remedy="set eos_token_id to the token that ends a text in every model and in the result",
        )
    donor_size, parent_size = vocabulary_size(donor.config), vocabulary_size(parent.config)
    if donor_size != parent_size and not aligned:
        yield Finding(
            "block",
            f"{name}: config.json: vocab_size",
            found=f"{parent_size}",
            expected=f"{donor_size}, as in {donor_name}",
            remedy="set tokenizer_source, or resize one model's embeddings",
            cause=f"{name}: vocabulary",
        )
    if has_own_head(donor) != has_own_head(parent):
        tied_model = donor_name if has_own_head(parent) else name
        yield Finding(
            "warn",
            f"{name}: config.json: tie_word_embeddings",
            found=_HEADS[has_own_head(parent)],
            expected=f"{_HEADS[has_own_head(donor)]}, as in {donor_name}",
            remedy=f"nothing to do: the result gets its own head, merged with the embedding of {tied_model}",
        )


def _compare_settings(pair: _Pair, accepted_differences: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each setting that makes two models with the same weights compute different functions."""
    donor_name, donor, name, parent = pair
    ignored_keys: list[str] = []
    for donor_setting, parent_setting in differing_settings(donor.config, parent.config):
        if donor_setting.is_of_head:
            continue
        if not donor_setting.is_read or "derived" in (donor_setting.source, parent_setting.source):
            ignored_keys.append(parent_setting.key)
            continue
        key = parent_setting.key.rpartition(".")[2]
        is_renamed = donor_setting.key != parent_setting.key and donor_setting.source == "stated"
        spelling = f" ({donor_setting.key})" if is_renamed else ""
        values = (donor_setting.value, parent_setting.value)
        found, remedy = f"{parent_setting}", "make sure that the models compute the same function of their weights"
        severity: Severity = "warn"
        if donor_setting.is_of_positions:
            is_number = all(isinstance(value, int | float) and value > 0 for value in values)
            factor = max(values) / min(values) if is_number else 1.0
            found += (f": a factor of {factor:.3g}" if factor > 1 else "") + ", so positions are rotated differently"
            remedy = "make sure that the result works: attention finds words by the rotations of its training"
            if factor >= _FAR:
                severity = "info" if _BASE in accepted_differences else "block"
                remedy = "merge models with one rotary base. If you have tested that such a result works, accept the "
                remedy += f"difference in the profile: checks.tokenizer.accepted: [{_BASE}]"
        yield Finding(
            severity,
            f"{name}: config.json: {parent_setting.key}",
            found=found,
            expected=f"{donor_setting}{spelling}, as in {donor_name}, whose config the result gets",
            remedy=remedy,
            cause=f"{name}: size" if key in _SIZES else "",
        )
    if ignored_keys:
        yield Finding(
            "info",
            f"{name}: config.json: {', '.join(ignored_keys)}",
            found=f"the values differ from {donor_name}",
            expected="no effect: transformers ignores or derives these keys for this model_type",
            remedy="nothing to do, unless you run the result with other software that reads them",
        )


def _compare_heads(models: Mapping[str, Checkpoint], accepted_differences: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each setting that gives the outputs of two classifiers different meanings.

    The first classifier is the reference: the base may be the language model that the classifiers were trained from.
    """
    heads: dict[str, Checkpoint] = {}
    for name, model in models.items():
        kind = kind_of(model)
        if kind.name in _WITH_HEADS and kind.pipeline_tag not in _PRETRAINED and not is_base_class(model.class_name):
            heads[name] = model
    reported: set[tuple[str, str]] = set()
    for (first_name, first), (name, model) in combinations(heads.items(), 2):
        for first_setting, setting in differing_settings(first.config, model.config):
            if not first_setting.is_of_head or (name, setting.key) in reported:
                continue
            reported.add((name, setting.key))
            is_stated = all(each.source == "stated" and each.value is not None for each in (first_setting, setting))
            yield Finding(
                "info" if setting.key in accepted_differences else "block" if is_stated else "warn",
                f"{name}: config.json: {setting.key}",
                found=f"{setting}",
                expected=f"{first_setting}, as in {first_name}: otherwise, outputs of different meaning are averaged",
                remedy="merge classifiers whose outputs mean the same. If these do, accept the difference in the "
                f"profile: checks.tokenizer.accepted: [{setting.key}]",
            )


def _compare_tables(plan: MergePlan) -> Iterator[Finding]:
    """Yield a finding for each table of integers that differs between models, as the engine would refuse it.

    Files that are not on this machine yet are compared when the models are merged.
    """
    for job in plan.jobs:
        first, *others = job.inputs
        if job.mode != "equal" or job.output.numel == 1 or not isinstance(first.tensor, StoredTensor):
            continue
        for item in others:
            if not isinstance(item.tensor, StoredTensor):
                continue
            is_local = first.tensor.file.is_file() and item.tensor.file.is_file()
            if is_local and not equal_bytes(first.tensor, item.tensor):
                yield finding_of(job.mismatch(item))


def _format(checkpoint: Checkpoint) -> str:
    bytes_by_dtype: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind == "float":
            bytes_by_dtype[tensor.dtype.torch_name] += tensor.nbytes
    return bytes_by_dtype.most_common(1)[0][0] if bytes_by_dtype else ""


def _compare_forms(document: Recipe, pair: _Pair) -> Iterator[Finding]:
    """Yield findings if two models store weights in different formats or have different tokenizer classes."""
    donor_name, donor, name, parent = pair
    donor_format, parent_format = _format(donor), _format(parent)
    has_no_dtype = document.dtype is None and document.out_dtype is None
    if has_no_dtype and donor_format and parent_format and donor_format != parent_format:
        yield Finding(
            "warn",
            f"{name}: dtype",
            found=f"{parent_format} weights",
            expected=f"{donor_format}, as in {donor_name}",
            remedy="set dtype in the recipe; without it, each tensor of the result gets the wider format",
        )
    donor_class, parent_class = _tokenizer_class(donor.companions), _tokenizer_class(parent.companions)
    if document.tokenizer is None and donor_class and parent_class and donor_class != parent_class:
        yield Finding(
            "warn",
            f"{name}: tokenizer_config.json: tokenizer_class",
            found=parent_class,
            expected=f"{donor_class}, as in {donor_name}, whose tokenizer the result gets",
            remedy="make sure that both split text in the same way; equal token ids do not show that",
        )


def _tokenizer_class(files: Companions) -> str:
    try:
        settings = files.json("tokenizer_config.json", TOKENIZER_BOUNDS) or {}
    except InvalidInput:  # The tokenizer comparison reports it.
        return ""
    # The fast and slow classes follow the same rules.
    class_name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    return "" if class_name in _TOKENIZERS_WITHOUT_RULES else class_name


def _compare_templates(
    plan: MergePlan, tables: Mapping[str, Checkpoint], accepted_differences: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding for each model with chat templates that the result does not get.

    Only templates of the same name are compared. If the recipe chooses the default template, its difference is ignored.
    """
    is_chosen = plan.recipe.chat_template is not None
    result = plan.chat_templates
    if plan.recipe.output is not None:
        result = tables[tokenizer_donor(plan.recipe, tables)].chat_templates
    for name in dict.fromkeys(item.model for job in plan.jobs for item in job.inputs):
        templates = tables[name].chat_templates if name in tables else {}
        lost_titles = [
            title
            for title, template in sorted(templates.items())
            if result.get(title) != template and not (is_chosen and title == DEFAULT)
        ]
        if not lost_titles:
            continue
        titles = ["template"] if lost_titles == [DEFAULT] else [to_printable(title) for title in lost_titles]
        changed = [title for title, key in zip(titles, lost_titles, strict=True) if key in result]
        absent = [title for title, key in zip(titles, lost_titles, strict=True) if key not in result]
        parts = [f"the result gets a different {', '.join(changed)}"] if changed else []
        parts += [f"the result gets no {', '.join(absent)}"] if absent else []
        yield Finding(
            "info" if _TEMPLATE_KEY in accepted_differences else "warn",
            f"{name}: chat template",
            found="; ".join(parts),
            expected="the templates that the model was trained with",
            remedy="set chat_template in the recipe to auto, a known name or the template; or accept the difference in "
            f"the profile: checks.tokenizer.accepted: [{_TEMPLATE_KEY}]",
        )
