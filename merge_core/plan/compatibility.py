"""Everything that can be known to be wrong with a merge before a weight is read, all at once, worst first::

planned = plan_with_findings(recipe, checkpoints)
if not planned.blocking:
    merge_weights(planned.plan, out)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mergegate.merge_core.architecture import class_difference, differing_settings, has_own_head, vocabulary_size
from mergegate.merge_core.checkpoint import DEFAULT, Checkpoint, Companions
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS, cached_tokenizers
from mergegate.merge_core.errors import Finding, InvalidInput, finding_of, shown, worst_first
from mergegate.merge_core.plan.companions import lost_files, tokenizer_donor
from mergegate.merge_core.plan.consistency import self_consistency, unused_tensors
from mergegate.merge_core.plan.finding_groups import SIZES, compare_sizes, different_size, different_vocabulary, stated
from mergegate.merge_core.plan.jobs import MergePlan
from mergegate.merge_core.plan.plan import assemble, parents_of, planned_checkpoint, single_experts, with_findings
from mergegate.merge_core.plan.tokenizers import CutPair, compare_to_donor
from mergegate.merge_core.recipe import Recipe

# By which a profile accepts that a template differs.
_TEMPLATE = "chat_template"
# Classes of transformers that do what the tokenizer.json says.
_TOKENIZERS_WITHOUT_RULES = ("PreTrainedTokenizer", "TokenizersBackend")
_END = "eos_token_id"
_HEADS = {True: "an output head of its own", False: "no output head: the embedding is the head"}


@dataclass(frozen=True)
class PlannedMerge:
    """A plan together with everything that is wrong with it.

    Args:
        findings: Worst first; ``block`` means that the merge is impossible or would silently be wrong.
        plan: None when the checkpoints cannot be merged as asked. There can be a plan although a finding blocks:
            models with different vocabularies can be merged, but not into anything useful.
        cut_pairs: Pairs of tokenizers that may cut texts in different ways, with the finding that says so: how many
            texts, only a tokenizer can tell.
    """

    findings: tuple[Finding, ...]
    plan: MergePlan | None
    cut_pairs: tuple[CutPair, ...] = ()

    @property
    def blocking(self) -> tuple[Finding, ...]:
        """The findings that forbid the merge."""
        return tuple(finding for finding in self.findings if finding.severity == "block")


def preflight(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> tuple[Finding, ...]:
    """The findings of :func:`plan_with_findings`."""
    return plan_with_findings(recipe, checkpoints).findings


def plan_with_findings(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], accepted: Collection[str] = ()
) -> PlannedMerge:
    """Plan the merge of ``recipe`` and check it, from headers, configs and tokenizer files.

    Args:
        recipe: From :func:`merge_core.recipe.load_recipe`.
        checkpoints: Opened checkpoints by ``str(ref)`` for every reference of the recipe. One that is missing is a
            finding that blocks.
        accepted: Differences between tokenizers that somebody has looked at and accepts, by their keys: ``merges``,
            ``pre_tokenizer``, ``chat_template``, ...
    """
    with cached_tokenizers():
        return _planned(recipe, checkpoints, frozenset(accepted))


def _planned(recipe: Recipe, checkpoints: Mapping[str, Checkpoint], accepted: frozenset[str]) -> PlannedMerge:
    findings: list[Finding] = []
    sizes: list[Finding] = []
    measurable: list[CutPair] = []
    known, plan = single_experts(checkpoints), None
    try:
        assembled, problems = assemble(recipe, checkpoints)
    except InvalidInput as error:
        findings.append(finding_of(error))
    else:
        findings += problems
        for step in assembled.steps:
            known[str(step.recipe.name)] = planned_checkpoint(step)
        for part in (*assembled.steps, assembled):
            findings += unused_tensors(part, known, {one.where for one in problems if one.severity == "block"})
            findings += _compare_templates(part, known, accepted)
            if part.recipe.output is None:  # An adapter is written without the files of a model.
                findings += lost_files(part.donor, part.tokenizer, parents_of(part.recipe, part.jobs, known))
        if not any(problem.severity == "block" for problem in problems):
            plan = with_findings(assembled, checkpoints, problems)
    for document in (*recipe.steps, recipe):
        own = {str(ref): known[str(ref)] for ref in document.own_references() if str(ref) in known}
        donor, aligned = str(document.donor), document.tokenizer is not None
        if donor not in own:
            continue
        for name, checkpoint in own.items():
            findings += self_consistency(name, checkpoint)
            if name != donor:
                if document.mixture is None:  # Of its experts a mixture takes one part only, which it compares itself.
                    findings += _compare_configs(donor, own[donor], name, checkpoint, aligned=aligned)
                    sizes += compare_sizes(donor, own[donor], name, checkpoint)
                if document.dtype is None and document.out_dtype is None:
                    findings += _compare_formats(donor, own[donor], name, checkpoint)
                if not aligned:
                    findings += _compare_tokenizer_classes(donor, own[donor], name, checkpoint)
        compared = compare_to_donor(document, own, accepted)
        findings += compared.findings
        measurable += compared.pairs
    # First the cause, then what comes of it. A model whose layers are cut to fit is no problem.
    troubled = {finding.cause for finding in findings if finding.severity == "block"}
    causes = [size for size in sizes if size.cause in troubled]
    return PlannedMerge(worst_first([*causes, *findings]), plan, tuple(measurable))


def _compare_configs(
    donor: str, first: Checkpoint, name: str, other: Checkpoint, *, aligned: bool
) -> Iterator[Finding]:
    if class_difference(first, other) == "network":
        yield Finding(
            "block",
            f"{name}: config.json: architectures",
            found=other.architecture or "nothing",
            expected=f"{first.architecture or 'nothing'}, as in {donor}",
            remedy="merge models of one architecture",
            cause=different_size(name),
        )
        return
    yield from _compare_settings(donor, first, name, other)
    mine, theirs = (stated(checkpoint, _END) for checkpoint in (first, other))
    if not aligned and mine != theirs and mine is not None and theirs is not None:
        yield Finding(
            "warn",
            f"{name}: config.json: {_END}",
            found=f"{theirs}",
            expected=f"{mine}, as in {donor}, whose config the result gets",
            remedy="set eos_token_id to the token that ends a text, in each model and in the result",
        )
    mine_vocab, their_vocab = vocabulary_size(first.config), vocabulary_size(other.config)
    if mine_vocab != their_vocab and not aligned:
        yield Finding(
            "block",
            f"{name}: config.json: vocab_size",
            found=f"{their_vocab}",
            expected=f"{mine_vocab}, as in {donor}",
            remedy="set tokenizer_source, or resize one model's embeddings",
            cause=different_vocabulary(name),
        )
    if has_own_head(first) != has_own_head(other):
        tied = donor if has_own_head(other) else name
        yield Finding(
            "warn",
            f"{name}: config.json: tie_word_embeddings",
            found=_HEADS[has_own_head(other)],
            expected=f"{_HEADS[has_own_head(first)]}, as in {donor}",
            remedy=f"the result gets an output head of its own, for which the embedding of {tied} counts as its head",
        )


def _compare_settings(donor: str, first: Checkpoint, name: str, other: Checkpoint) -> Iterator[Finding]:
    """Yield the settings with which the two models compute different functions of the same weights."""
    without_effect: list[str] = []
    for mine, theirs in differing_settings(first.config, other.config):
        if not mine.is_read or "derived" in (mine.source, theirs.source):
            without_effect.append(theirs.key)
            continue
        key = theirs.key.rpartition(".")[2]
        spelling = f" ({mine.key})" if mine.key != theirs.key and mine.source == "stated" else ""
        yield Finding(
            "warn",
            f"{name}: config.json: {theirs.key}",
            found=f"{theirs}",
            expected=f"{mine}{spelling}, as in {donor}, whose config the result gets",
            remedy="make sure that the models compute the same function of their weights",
            cause=different_size(name) if key in SIZES else "",
        )
    if without_effect:
        yield Finding(
            "info",
            f"{name}: config.json: {', '.join(without_effect)}",
            found=f"not as in {donor}",
            expected="no effect: transformers reads no such key for this model_type, or derives it",
            remedy="nothing to do, unless other software that reads them runs the result",
        )


def _compare_formats(donor: str, first: Checkpoint, name: str, other: Checkpoint) -> Iterator[Finding]:
    """Formats of the weights; where they differ the result gets the wider one, tensor by tensor."""
    mine, theirs = _format(first), _format(other)
    if mine and theirs and mine != theirs:
        yield Finding(
            "warn",
            f"{name}: dtype",
            found=f"{theirs} weights",
            expected=f"{mine}, as in {donor}",
            remedy="say dtype in the recipe: without it the result is written in the wider format",
        )


def _format(checkpoint: Checkpoint) -> str:
    """Name of the floating-point format that holds most of a checkpoint's bytes."""
    held: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind == "float":
            held[tensor.dtype.torch_name] += tensor.nbytes
    return held.most_common(1)[0][0] if held else ""


def _compare_tokenizer_classes(donor: str, first: Checkpoint, name: str, other: Checkpoint) -> Iterator[Finding]:
    """Classes that cut text by different rules; those that read a ``tokenizer.json`` as it is have no rules of their
    own."""
    mine, theirs = _tokenizer_class(first.companions), _tokenizer_class(other.companions)
    if mine and theirs and mine != theirs:
        yield Finding(
            "warn",
            f"{name}: tokenizer_config.json: tokenizer_class",
            found=theirs,
            expected=f"{mine}, as in {donor}, whose tokenizer the result gets",
            remedy="make sure that both cut text in the same way: equal ids do not say so",
        )


def _tokenizer_class(files: Companions) -> str:
    try:
        settings = files.json("tokenizer_config.json", TOKENIZER_BOUNDS) or {}
    except InvalidInput:  # Said of the tokenizer.
        return ""
    plain = str(settings.get("tokenizer_class") or "").removesuffix("Fast")  # one class in two implementations
    return "" if plain in _TOKENIZERS_WITHOUT_RULES else plain


def _compare_templates(
    plan: MergePlan, known: Mapping[str, Checkpoint], accepted: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding for each model with chat templates that the result does not get.

    Templates are compared by name. Where the recipe says which default template the result gets, only other names
    can be lost.
    """
    is_chosen = plan.recipe.chat_template is not None
    result = plan.chat_templates
    if plan.recipe.output is not None:
        result = known[tokenizer_donor(plan.recipe, known)].chat_templates
    for name in dict.fromkeys(item.model for job in plan.jobs for item in job.inputs):
        own = known[name].chat_templates if name in known else {}
        lost = [
            title
            for title, template in sorted(own.items())
            if result.get(title) != template and not (is_chosen and title == DEFAULT)
        ]
        if not lost:
            continue
        if lost == [DEFAULT]:
            found = "another than the result gets" if DEFAULT in result else "the result gets none"
        else:
            changed = [shown(title) for title in lost if title in result]
            absent = [shown(title) for title in lost if title not in result]
            parts = [f"another {', '.join(changed)} than the result gets"] if changed else []
            parts += [f"the result gets no {', '.join(absent)}"] if absent else []
            found = "; ".join(parts)
        yield Finding(
            "info" if _TEMPLATE in accepted else "warn",
            f"{name}: chat template",
            found=found,
            expected="the templates that the model was trained with",
            remedy="set chat_template in the recipe: auto, a known name, or the template itself; or accept it in "
            f"the profile: checks.tokenizer.accepted: [{_TEMPLATE}]",
        )
