"""Find every problem before any weight is read, for a release, a check, a dry run or a search.

The caller decides how to handle problems: a release stops at the first one, a check collects all of them. The results
of the checks (parents, evidence, verdicts) are passed on, so that nothing is looked up twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.flows.candidates import Candidate
from mergegate.flows.profile import Profile
from mergegate.merge_core import Finding, Recipe
from mergegate.merge_core.architecture import TEXT_GENERATOR, TaskForm
from mergegate.merge_core.errors import (
    EXIT_CODES,
    InvalidInput,
    MergegateError,
    Status,
    finding_of,
    findings_of,
    worst_first,
)
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.base.stage import announce, device_kind, formats_without_units, home, store
from mergegate.tasks.base.store import StoredValue
from mergegate.tasks.merge import MergeSettings, numerics
from mergegate.tasks.models.checkpoints import ResolvedCheckpoint, open_parent, resolve_all_parents, search_parents
from mergegate.tasks.preflight import (
    NEXT_TOKENS,
    Comparisons,
    Compatibility,
    Evidence,
    HeaderDigest,
    KindDemand,
    check_compatibility,
    check_references,
    collect_calibration_texts,
    collect_variant_texts,
    describe_judging,
    evidence_for_variant,
    forecast_power,
    forecast_undecidable,
    forecast_variant_power,
    header_digests,
    kind_findings,
    machine_findings,
    measure_machine_capacity,
    overlap_findings,
    pin_evidence,
    sensitivity_findings,
    stored_dtypes,
    with_supported_dtype,
)
from mergegate.tasks.preflight.licenses import (
    INDEX_FILE,
    AncestorLookup,
    KnownModels,
    LicenseSettings,
    LicenseTable,
    LicenseVerdict,
    check_licenses,
    compare_weights,
    hub_ancestors,
    license_table,
    read_known_models,
    read_licenses,
)
from mergegate.tasks.quality.evaluation import (
    CalibrationTexts,
    ContaminatedDocuments,
    CountLimit,
    EvalTask,
    PromptWarning,
    TaskPreview,
    TokenizerSource,
    choose_known_metrics,
    count_task,
    data_revisions,
    find_backend,
    find_contaminated_documents,
    find_repetition,
    preview,
    repetition_findings,
    require_examples,
    resolve_prompt_settings,
    task_tree,
)
from mergegate.tasks.quality.gate import (
    ALL_PARENTS,
    PastGuardOutcome,
    drift_findings,
    needs_champion,
    power_findings,
    reference_findings,
    wear_findings,
)
from mergegate.tasks.quality.perplexity import read_distinct
from mergegate.tasks.quality.serve import find_server
from mergegate.tasks.quality.variants import VariantFormat
from mergegate.tasks.release.publish import expected_signer
from mergegate.tasks.release.publish.targets import CredentialUse, check_target
from mergegate.tasks.release.report import read_history
from mergegate.tasks.sweep import SweepEvidence, pin_sweep

_READS_TEXTS = "a method that measures the weights on calibration texts"
# transformers can load a tokenizer from any of these files.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True)
class ClearedCandidate:
    """A recipe that may be merged according to its licenses, its headers and the machine. No weight has been read."""

    candidate: Candidate
    parents: tuple[ResolvedCheckpoint, ...]
    license: StoredValue[LicenseVerdict]
    compatibility: StoredValue[Compatibility]
    headers: tuple[HeaderDigest, ...] = ()  # identify the headers that were checked


class TaskExample(NamedTuple):
    """One document of a task, as the prompt that a parent would read."""

    task: str
    parent: str
    preview: TaskPreview
    asked: str = ""  # prompt settings that the profile declares for this task only
    budget: str = ""  # how many tokens an answer may have; empty if no answer is generated


@dataclass
class Problems:
    """Problems in the order in which they were found.

    With ``stop_at_once``, for callers that cannot continue, the first problem is raised instead of recorded.
    """

    stop_at_once: bool
    findings: list[Finding] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)  # one line per successful check
    credentials: list[CredentialUse] = field(default_factory=list)  # with which a release would be published
    examples: list[TaskExample] = field(default_factory=list)  # one document of each task, as each parent reads it
    status: Status = "passed"  # status of ``run``, which stops at the first problem

    @contextmanager
    def collect_errors(self) -> Iterator[None]:
        """Record an error that is raised in the block. If ``stop_at_once``, let it through."""
        try:
            yield
        except MergegateError as error:
            if self.stop_at_once:
                raise
            self.note(error)

    def note(self, error: MergegateError) -> None:
        """Record the findings of an error that would end a run."""
        self.add(findings_of(error))

    def add(self, findings: Iterable[Finding]) -> None:
        """Record the findings of a check. The first blocking one decides the status."""
        all_findings = list(findings)
        self.findings += all_findings
        blocking = [finding for finding in all_findings if finding.severity == "block"]
        if self.status == "passed" and blocking:
            self.status = blocking[0].refusal().status

    def ask(self, stage: Any, *inputs: Any) -> Any:
        """Run the check ``stage``.

        In a release, it runs as a task of the flow, and a refusal ends the flow. In a check, it runs without Prefect.
        """
        return stage(*inputs) if self.stop_at_once else stage.build(*inputs)

    @property
    def exit_code(self) -> int:
        """Exit code that ``mergegate run`` would return, as far as it can be determined now."""
        return EXIT_CODES[self.status]

    def worst_first(self) -> tuple[Finding, ...]:
        """Return each finding once, the blocking ones first."""
        return worst_first(self.findings)


@dataclass(frozen=True)
class Preflight:
    """Result of a preflight, the input of a release.

    ``cleared`` contains the recipe and its remedies. If problems are collected, candidates that could not be checked
    completely are missing. ``evidence`` is what the merge will be measured on. It is None if a task or text is invalid.
    """

    cleared: tuple[ClearedCandidate, ...]
    evidence: Evidence | None


def preflight_profile(
    profile: Profile,
    problems: Problems,
    candidates: Sequence[Candidate] | None = None,
    other_candidates: Sequence[Candidate] = (),
) -> Preflight:
    """Check target, server, recipes, parents and evidence, then the licenses, headers and machine needs of each recipe.

    Args:
        profile: Profile to check.
        problems: Collector of findings and of one line for each successful check.
        candidates: Candidates to check instead of the profile's own recipe and remedies.
        other_candidates: More recipes that are merged but never released, so no guard compares with their parents.

    Raises:
        MergegateError: The first problem, if ``problems`` does not collect them.
        InvalidInput: A recipe is invalid.
    """
    with problems.collect_errors():
        profile.limits.require_known_stages()
    with problems.collect_errors():
        suffixes = [variant.place_suffix for variant in profile.variants]
        problems.credentials += check_target(profile.publish, profile.root, suffixes, problems.collect_errors)
        problems.summary += [credential.summary() for credential in problems.credentials]
    with problems.collect_errors():
        if profile.publish and (sigstore := profile.publish.sigstore):
            problems.summary.append(f"publish: signed by {expected_signer(sigstore, profile.root)}")
    with problems.collect_errors():
        if profile.publish and profile.evaluate and profile.evaluate.anchor:
            profile.publish.earlier_release(profile.root, profile.evaluate.anchor)
    with problems.collect_errors():
        if profile.serve is not None:
            find_server(profile.serve, profile.root)  # raises unless it is installed
    candidates = profile.candidates() if candidates is None else candidates
    for remark in candidates[0].remarks:
        problems.summary.append(remark)
        if problems.stop_at_once:
            announce(remark)
    all_candidates = (*candidates, *other_candidates)
    with problems.collect_errors():
        if profile.publish:
            refs = (str(ref) for candidate in all_candidates for ref in candidate.recipe.references())
            profile.publish.about.require_parents(refs)
    for candidate in all_candidates:
        if not candidate.change:  # a change of the profile's own recipe inherits its warnings
            problems.add(candidate.recipe.all_findings)
            if problems.stop_at_once:
                for finding in candidate.recipe.all_findings:
                    announce(f"warning: {finding}" + (f"; {finding.remedy}" if finding.remedy else ""))
    parents = _parents([candidate.recipe for candidate in all_candidates], problems)
    evidence = None
    if _is_complete(candidates[0].recipe, parents[0]):
        with problems.collect_errors():
            evidence = pin_profile_evidence(profile, parents[0], store().hashes)
    if evidence and evidence.computed:
        problems.summary.append(evidence.computed)
    rules = _Rules.of(profile, evidence)
    cleared = []
    for candidate, parents_of_candidate in zip(all_candidates, parents, strict=True):
        with problems.collect_errors():
            if candidate.recipe.output and evidence and needs_champion(evidence.guards):
                raise InvalidInput(
                    f"profile {profile.name}: evaluate.tasks",
                    found="a guard compares with the champion, but the recipe builds an adapter",
                    expected="guards that compare with parents",
                    remedy="compare with the base or with an adapter, for example guarded_by: base+adapter",
                )
            if candidate.recipe.output and profile.variants:
                raise InvalidInput(
                    f"profile {profile.name}: variants",
                    found="quantized variants, but the recipe builds an adapter",
                    expected="a recipe that builds a complete model",
                    remedy="remove variants, or merge the models instead of their adapters",
                )
            if _is_complete(candidate.recipe, parents_of_candidate) and candidate not in other_candidates:
                compared = comparisons(profile, candidate.last_checkpoints, parents_of_candidate)
                check_references(*compared, parents_of_candidate)
        cleared.append(_clear(candidate, parents_of_candidate, rules, problems))
    if evidence:
        measured = tuple(parent for parent in parents[0] if parent.ref not in evidence.unmeasured)
        evidence = _pin_data(evidence, measured, profile.checks.code.trusted, problems)
        _require_unread(profile, [candidate.recipe for candidate in all_candidates], evidence, problems)
        attempts, past = len(candidates) + profile.max_further_attempts, past_guards(profile.name)
        if never := forecast_undecidable(evidence, attempts):
            problems.add([never])
            if problems.stop_at_once:
                announce(f"warning: {never}; {never.remedy}")
        if evidence.documents and evidence.windows and evidence.limits and not problems.stop_at_once:
            with problems.collect_errors():
                text = read_distinct(evidence.documents, evidence.windows.documents)
                problems.add(drift_findings(text, evidence.limits, evidence.rule.confidence))
        # A release soon measures whether its documents are sufficient, so only a check forecasts their power.
        if not problems.stop_at_once and (power := forecast_power(evidence, measured, attempts, past)):
            problems.summary += power.lines()
            problems.add(power_findings(power))
            problems.add(reference_findings(evidence.guards, evidence.rule.rule))
            problems.add(sensitivity_findings(evidence, measured))
            lines, worn = wear_findings(evidence.guards, evidence.tasks, evidence.scoring, resample=evidence.resample)
            problems.summary += lines
            problems.add(worn)
    _check_variants(profile, evidence, problems)
    return Preflight(tuple(candidate for candidate in cleared if candidate), evidence)


def _check_variants(profile: Profile, evidence: Evidence | None, problems: Problems) -> None:
    """Check the quantizers and the guards of all variants. ``evidence`` is that of the release, if it is valid."""
    for settings in profile.variants:
        types = ", ".join(settings.variant_types)
        with problems.collect_errors():
            tool = settings.check(profile.root)
            place = f", published as {profile.name}-{settings.place_suffix}" if profile.publish else ""
            problems.summary.append(f"variants: {types} with {tool}{place}")
        with problems.collect_errors():
            if evidence is None:
                continue
            judged = evidence_for_variant(settings, evidence, profile.root)
            limits = [f"{guard.task} {guard.upper_limit:g}" for guard in judged.guards]
            limits = [f"margins against the merge in points: {', '.join(limits)}"] if limits else []
            limits += [f"perplexity at most {100 * judged.limits.max_increase:g} % higher"] if judged.limits else []
            end = "; a failure refuses the release" if settings.required else ""
            problems.summary.append(f"variants: {types}: {'; '.join(limits)}{end}")
            if not problems.stop_at_once and (power := forecast_variant_power(judged)):
                problems.summary.append(f"variants: {types}: {power.sentence()}")
                problems.add(power.findings(f"variants: {types}"))


def clear_further(candidate: Candidate, profile: Profile) -> ClearedCandidate:
    """Run all checks on a candidate that mergegate proposed during the run.

    Raises:
        InvalidInput: A parent is missing, or a guard compares with a model that is not a parent.
        Refused: A check refused the candidate.
    """
    problems = Problems(stop_at_once=True)
    (parents,) = _parents([candidate.recipe], problems)
    check_references(*comparisons(profile, candidate.last_checkpoints, parents), parents)
    cleared = _clear(candidate, parents, _Rules.of(profile), problems)
    assert cleared is not None  # otherwise its problem would have been raised
    return cleared


def _pin_data(
    evidence: Evidence, parents: Sequence[ResolvedCheckpoint], trusted_code: Collection[str], problems: Problems
) -> Evidence:
    """Pin the data of all tasks, so that one run evaluates one version of a benchmark.

    Also check that each parent has a tokenizer and each task the metric of its guard, and format one document of each
    task for each parent. This finds a broken tokenizer, chat template or task before merging.
    """
    for parent in parents if evidence.tasks or evidence.documents else ():
        with problems.collect_errors():
            names = parent.snapshot.files if parent.snapshot else {path.name for path in parent.directory.iterdir()}
            if parent.is_merged and not any(name in names for name in _TOKENIZERS):
                raise InvalidInput(
                    parent.ref,
                    found="it has no tokenizer, so it cannot be measured",
                    expected=f"one of {', '.join(_TOKENIZERS)}",
                    remedy="copy the tokenizer of its base model into its directory",
                )

    sources: Sequence[TokenizerSource] = ()
    with problems.collect_errors():
        # Leave out a tokenizer that could only be loaded by running code from its repository.
        sources = [
            TokenizerSource(name=parent.name, directory=parent.directory, digest=header.digest)
            for parent, header in zip(parents, header_digests(parents), strict=True)
            if not any(f"{snapshot.repo}@{snapshot.commit}" in trusted_code for snapshot in parent.snapshots)
        ]

    limit = CountLimit(seconds=evidence.scoring.time_limit)
    tasks = []
    for task in evidence.tasks:
        with problems.collect_errors():  # Find data that cannot be loaded before hours of merging, not after.
            size = problems.ask(count_task, task, data_revisions(task, limit), limit).value
            tasks.append(size.pin(task))
            for guard in evidence.guards:
                if guard.task == task.name:
                    choose_known_metrics(size.metrics, guard.metric, task.name)
            if not problems.stop_at_once:  # A release does not need this, because the gate counts repeated documents.
                count = resolve_prompt_settings(task.prompt_settings, evidence.scoring).num_fewshot
                repetition = find_repetition.build(tasks[-1], count, limit).value
                clusters = [guard.cluster_by for guard in evidence.guards if guard.task == task.name]
                problems.add(repetition_findings(task.name, repetition, next(filter(None, clusters), None)))
            warnings: list[PromptWarning] = []
            for source in sources:
                with problems.collect_errors():
                    example = preview.build(tasks[-1], evidence.scoring, source, limit).value
                    prompt_settings = task.prompt_settings.describe() if task.prompt_settings else ""
                    budget = example.describe_budget(evidence.rule.max_answer_tokens)
                    problems.examples.append(TaskExample(task.name, source.name, example, prompt_settings, budget))
                    warnings += example.warnings
                    if example.room is not None and example.tokens > example.room:
                        warning = Finding(
                            "warn",
                            f"evaluate.tasks: {task.name}",
                            found=f"the first prompt has {example.tokens:,} tokens, but {source.name} has room for "
                            f"{example.room:,} before the longest answer, so the beginning is cut off",
                            expected="prompts that fit into the context of the model",
                            remedy="lower max_gen_toks under gen_kwargs, or num_fewshot",
                        )
                        problems.add([warning])
            unread = Counter(warning.setting for warning in warnings)
            problems.add(
                Finding("warn", f"evaluate.tasks: {task.name}", warning.found, warning.expected, warning.remedy)
                for warning in warnings
                if not warning.setting or unread[warning.setting] == len(sources)
            )
    return evidence._replace(tasks=tuple(tasks)) if len(tasks) == len(evidence.tasks) else evidence


def _require_unread(profile: Profile, recipes: Sequence[Recipe], evidence: Evidence, problems: Problems) -> None:
    """Check that no text that a merge or a quantizer reads contains documents on which the result will be judged."""
    limit = CountLimit(seconds=evidence.scoring.time_limit)

    def documents_of(task: EvalTask, texts: CalibrationTexts) -> ContaminatedDocuments:
        contaminated: ContaminatedDocuments = problems.ask(find_contaminated_documents, task, texts, limit).value
        return contaminated

    def require_unread(corpus: CalibrationTexts, subject: str) -> None:
        findings = list(overlap_findings(corpus, evidence, documents_of, subject))
        if findings and problems.stop_at_once:
            raise findings[0].refusal()
        problems.add(findings)

    for recipe in recipes:
        with problems.collect_errors():
            if corpus := collect_calibration_texts(recipe, store().hashes):
                require_unread(corpus, "merge")
                problems.summary.append(
                    f"texts: the merge reads {len(corpus.texts):,} documents; "
                    "weights without an input from them are averaged"
                )
    with problems.collect_errors():
        if corpus := collect_variant_texts(profile.variants, profile.root, store().hashes):
            require_unread(corpus, "variant")
            problems.summary.append(f"texts: quantizers read {len(corpus.texts):,} documents")


def past_guards(profile: str) -> tuple[PastGuardOutcome, ...]:
    """Return the outcomes of each guard in past runs of a profile, in run order, except failures.

    A merge that failed does not show how much a merge as good as its reference will differ. Another run of the same
    merge has the same outcome, which counts once.
    """
    outcomes = {
        (record.recipe, record.parents, score.merge, outcome): outcome
        for record in read_history(home() / "reports").records
        if record.profile == profile and record.flow in ("release", "sweep")
        for score in record.scores
        if score.documents and score.outcome != "fail"
        for outcome in [PastGuardOutcome(score.task, score.reference, score.documents, score.differing)]
    }
    return tuple(outcomes.values())


def check_recipe(candidate: Candidate, root: Path, name: str, problems: Problems) -> None:
    """Check a recipe alone.

    A recipe does not declare the use of the merge. The check therefore assumes the strictest use, and reports what the
    licenses restrict as warnings.
    """
    recipe = candidate.recipe
    problems.summary += candidate.remarks
    problems.add(recipe.all_findings)
    (parents,) = _parents([recipe], problems)
    settings, remedy = LicenseSettings(), "declare the use of the merge in a profile"
    table = license_table(settings, root)
    known = read_known_models(home() / INDEX_FILE)
    rules = _Rules(settings, table, hub_ancestors(), known, root, name, MergeSettings(), (), remedy=remedy)
    if _is_complete(recipe, parents):
        _clear(candidate, parents, rules, problems)


@dataclass(frozen=True)
class _Rules:
    """Rules for clearing recipes, so that the license table is read and ancestors are looked up only once."""

    license: LicenseSettings
    table: LicenseTable
    ancestors: AncestorLookup
    known: KnownModels
    root: Path
    name: str
    merging: MergeSettings
    dtypes: tuple[str, ...]  # formats in which models are loaded for evaluation on this machine
    tokenizers: tuple[str, ...] = ()  # parts in which tokenizers may differ
    code: tuple[str, ...] | None = None  # code files that may be released with the merge. None: not specified.
    variants: tuple[VariantFormat, ...] = ()
    demands: tuple[KindDemand, ...] = ()  # parts of the profile that only some kinds of models support
    remedy: str = ""  # hint for a license that forbids an assumed use, which is only a warning

    @staticmethod
    def of(profile: Profile, evidence: Evidence | None = None) -> _Rules:
        settings, root, checks = profile.checks.license, profile.root, profile.checks
        dtypes = [str(profile.perplexity.dtype)] if profile.perplexity else []
        if profile.evaluate and find_backend(profile.evaluate.scoring.backend).loads_here:
            dtypes.append(profile.evaluate.scoring.dtype)
        if evidence and evidence.computed:
            dtypes = ["float32"]
        return _Rules(
            settings,
            license_table(settings, root),
            hub_ancestors(),
            read_known_models(home() / INDEX_FILE, root / settings.fingerprints if settings.fingerprints else None),
            root,
            profile.name,
            profile.merge,
            tuple(dtypes),
            tokenizers=checks.tokenizer.accepted,
            code=checks.code.accepted,
            variants=profile.variants,
            demands=kind_demands(profile),
        )


def kind_demands(profile: Profile, *, is_comparison: bool = False) -> tuple[KindDemand, ...]:
    """Return the parts of a profile that only some kinds of models support, in the order in which they run.

    A comparison of two models uses only the perplexity and the tasks.
    """
    demands = []
    for guard in profile.evaluate.tasks if profile.evaluate else ():
        form: TaskForm = "text"
        with suppress(InvalidInput):  # A task that cannot be read is reported where it is pinned.
            form = guard.built_in.form if guard.built_in else task_tree(guard.task, profile.root).form
        noun = "a picture task" if form == "pictures" else f"a {form} task"
        demands.append(KindDemand(f"evaluate.tasks: {guard.name or guard.task}", noun, form))
    backend = find_backend(profile.evaluate.scoring.backend) if profile.evaluate else None
    if backend and not backend.encoder_decoders and any(demand.ability == "text" for demand in demands):
        noun = f"text tasks on the backend {backend.name}"
        demands.append(KindDemand("evaluate.backend", noun, NEXT_TOKENS, "set evaluate.backend: hf"))
    sections = (
        ("perplexity", "a perplexity", profile.perplexity),
        ("judge", "answers that a judge compares", profile.judge),
        ("serve", "a smoke test of generated texts", profile.serve),
        ("variants", "quantized variants", profile.variants),
        ("sweep", "a search that scores the predictions of trials", profile.sweep),
        ("shadow", "a test of generated texts on users' traffic", profile.shadow),
    )
    used = sections[:1] if is_comparison else sections
    demands += [KindDemand(name, noun, NEXT_TOKENS) for name, noun, settings in used if settings]
    return tuple(demands)


def _clear(
    candidate: Candidate, parents: tuple[ResolvedCheckpoint, ...], rules: _Rules, problems: Problems
) -> ClearedCandidate | None:
    """Check licenses, then headers, then the machine. Return None if the candidate cannot be checked completely."""
    if not parents:
        return None  # the reason is already recorded
    recipe, settings = candidate.recipe, rules.license
    use, declared = settings.use(rules.name), read_licenses(parents, rules.table, rules.ancestors)
    allowed = problems.ask(check_licenses, declared, use, rules.table, settings.accepted)
    with problems.collect_errors():  # A release is refused by its cards before any weight is read.
        compared = compare_weights(declared, parents, rules.known, settings, rules.table)
        if compared != declared:
            allowed = problems.ask(check_licenses, compared, use, rules.table, settings.accepted)
    if refusal := allowed.value.refusal():  # It contains the warnings.
        if rules.remedy:
            problems.findings.append(finding_of(refusal).as_warning(rules.remedy))
        else:
            problems.note(refusal)
    else:
        problems.add(allowed.value.warnings())
        for warning in allowed.value.warnings() if problems.stop_at_once else ():
            announce(f"warning: {warning}; {warning.remedy}")
    if not _is_complete(recipe, parents):
        return None  # An incomplete set of parents may be forbidden, but it can be neither allowed nor compared.
    with problems.collect_errors():
        headers = header_digests(parents)
        fits = problems.ask(check_compatibility, recipe, headers, parents, rules.code, rules.tokenizers)
        for variant in rules.variants:
            with problems.collect_errors():  # the matrices of the merge have the sizes of those of its parents
                variant.check_shapes(open_parent(next(parent for parent in parents if parent.is_merged)))
        device = numerics(rules.merging).where
        variant_bytes = sum(variant.estimate_bytes(fits.value.bytes_written) for variant in rules.variants)
        machine = measure_machine_capacity(fits.value, parents, device, variant_bytes)
        lacking = machine_findings(fits.value, machine, device=device, dtypes=rules.dtypes)
        problems.add([*fits.value.remarks, *lacking])
        if problems.stop_at_once and (blocking := [finding for finding in lacking if finding.severity == "block"]):
            raise blocking[0].refusal()
        if not fits.value.blocking():
            kind, reading = fits.value.kind, [document for document in (*recipe.steps, recipe) if document.texts]
            texts = [KindDemand(recipe.location, _READS_TEXTS, NEXT_TOKENS) for _ in reading[:1]]
            misfits = list(kind_findings(kind, [*texts, *rules.demands]))
            problems.add(misfits)
            if problems.stop_at_once and misfits:
                raise misfits[0].refusal()
            if kind.name != TEXT_GENERATOR.name:
                problems.summary.append(f"kind: {kind.noun}, {describe_judging(kind)}")
            problems.summary.append(f"{candidate.summary}: {fits.value.summary()}")
        if not refusal:
            problems.summary.append(f"licenses: {allowed.value.summary()}")
        return ClearedCandidate(candidate, parents, allowed, fits, headers)
    return None


def _parents(recipes: Sequence[Recipe], problems: Problems) -> tuple[tuple[ResolvedCheckpoint, ...], ...]:
    """Return the parents of each recipe. If problems are collected, record all parents that cannot be found."""
    if problems.stop_at_once:
        return resolve_all_parents(recipes)
    search = search_parents(recipes)
    for problem in search.problems:
        problems.note(problem)
    return search.parents


def _is_complete(recipe: Recipe, parents: Sequence[ResolvedCheckpoint]) -> bool:
    return len(parents) == len(recipe.references())


def pin_profile_evidence(
    profile: Profile,
    parents: Sequence[ResolvedCheckpoint],
    hashes: HashMemo,
    dtypes: Collection[str] | None = None,
) -> Evidence:
    """Pin tasks and documents by content, and choose the number format in which this machine evaluates the models.

    ``dtypes`` are the formats of the measured models that are not among ``parents``. Default: the formats that the
    recipes declare.

    Raises:
        InvalidInput: A guard, a task or a file does not exist.
    """
    # A comparison of two models has no recipe, and its only reference takes the place of every other one.
    candidates = profile.candidates() if dtypes is None else ()
    windows = [window.checkpoints for candidate in candidates for window in candidate.windows]
    compared = comparisons(profile, candidates[0].last_checkpoints if candidates else [parents[0].ref], parents)
    check_references(*compared, parents)
    evidence = pin_evidence(*compared, profile.root, hashes)
    # A round with one client takes its model as it is, and so does a window of one checkpoint.
    copies = tuple(parent.name for parent in parents if not parent.is_base) if profile.is_client_round else ()
    copies += tuple(parent.name for parent in parents if (parent.ref,) in windows)
    named = compared.names()
    measured = {window[-1] for window in windows} | {parent.ref for parent in parents if parent.name in named}
    earlier = frozenset(ref for window in windows for ref in window if ref not in measured)
    evidence = evidence._replace(
        accepted_copies=(*profile.checks.copies.accepted, *copies),
        unmeasured=frozenset() if ALL_PARENTS in named else earlier,
    )
    if without_units := formats_without_units(device_kind()):
        if dtypes is None:
            declared = [candidate.recipe.out_dtype or candidate.recipe.dtype for candidate in profile.candidates()]
            dtypes = {dtype.torch_name for dtype in declared if dtype}
        evidence = with_supported_dtype(evidence, {*stored_dtypes(parents), *dtypes}, without_units)
    searching = profile if profile.sweep else profile.scale_search
    if searching is None:
        return evidence
    swept = pin_profile_sweep(searching, evidence, hashes)
    return evidence._replace(
        tasks=swept.gate_tasks(evidence.tasks), documents=swept.select_text("gate") or evidence.documents
    )


def comparisons(
    profile: Profile, last_checkpoints: Sequence[str], parents: Sequence[ResolvedCheckpoint]
) -> Comparisons:
    """Return the sections that compare the merge, with the name of the last checkpoint if there is one training run.

    ``last_checkpoints`` are the references of the last checkpoint of each run.
    """
    sections = Comparisons(profile.evaluate, profile.perplexity, profile.judge)
    name = next((parent.name for parent in parents if [parent.ref] == list(last_checkpoints)), None)
    return sections.with_last_checkpoint(name) if name else sections


def pin_profile_sweep(profile: Profile, evidence: Evidence, hashes: HashMemo) -> SweepEvidence:
    """Pin the tasks of the profile's sweep by content and split their documents.

    A task has the same prompts in the trials as in the gate: those of its first guard.

    Raises:
        InvalidInput: A task does not exist, or settings contradict each other.
    """
    assert profile.sweep is not None
    guards = profile.evaluate.tasks if profile.evaluate else ()
    clusters = {guard.task: guard.cluster_by for guard in reversed(guards)}
    clusters |= {guard.task: guard.cluster_by for guard in guards if guard.cluster_by}
    text = evidence.documents and evidence.documents.model_copy(update={"only": None})
    data = profile.evaluate.data if profile.evaluate else None
    code_tasks = profile.evaluate.allow_code if profile.evaluate else ()
    swept = pin_sweep(profile.sweep, text, clusters, profile.root, hashes, data, code_tasks)
    prompts = {swept.names.get(guard.task): guard.own_prompt_settings for guard in reversed(guards)}
    tasks = tuple(task.model_copy(update={"prompt_settings": prompts.get(task.name)}) for task in swept.tasks)
    for task in tasks:
        require_examples(task, resolve_prompt_settings(task.prompt_settings, evidence.scoring).num_fewshot)
    return swept._replace(tasks=tasks)
