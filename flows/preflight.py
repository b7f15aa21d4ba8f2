"""Everything that can be wrong, found before any weight is read: for a release, a check, a plan, a merge alone.

Whoever calls says what a problem does: a release and a merge stop at the first, a check collects all of them. What was
learnt on the way (parents, evidence, verdicts of the checks, the plan) is handed on: nothing is looked up twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.flows.candidates import Candidate
from mergegate.flows.profile import Profile
from mergegate.merge_core import Finding, Recipe
from mergegate.merge_core.errors import (
    EXIT_CODES,
    InvalidInput,
    MergegateError,
    Status,
    finding_of,
    findings_of,
    worst_first,
)
from mergegate.tasks.checkpoints import ResolvedCheckpoint, resolve_all_parents, search_parents
from mergegate.tasks.evaluation import (
    CalibrationTexts,
    ContaminatedDocuments,
    CountLimit,
    EvalTask,
    TaskPreview,
    TokenizerPlace,
    choose_known_metrics,
    count_task,
    data_revisions,
    find_contaminated_documents,
    preview,
)
from mergegate.tasks.gate import PastGuardOutcome, needs_champion, power_finding
from mergegate.tasks.merge import MergeSettings, numerics
from mergegate.tasks.preflight import (
    Compatibility,
    Evidence,
    HeaderDigest,
    check_compatibility,
    collect_calibration_texts,
    forecast_power,
    header_digests,
    machine_findings,
    measure_machine_capacity,
    overlap_findings,
)
from mergegate.tasks.preflight.licenses import (
    AncestorLookup,
    LicenseSettings,
    LicenseTable,
    LicenseVerdict,
    check_licenses,
    hub_ancestors,
    license_table,
    read_licenses,
)
from mergegate.tasks.publish.targets import check_target
from mergegate.tasks.report import read_history
from mergegate.tasks.serve import check_server
from mergegate.tasks.stage import announce, home, store
from mergegate.tasks.store import StoredValue

# Any of these is enough for transformers.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True)
class ClearedCandidate:
    """A recipe that may be merged, as far as licences, headers and machine tell. No weight has been read."""

    candidate: Candidate
    found: tuple[ResolvedCheckpoint, ...]
    license: StoredValue[LicenseVerdict]
    compatibility: StoredValue[Compatibility]
    headers: tuple[HeaderDigest, ...] = ()  # what identifies those that were looked at


class TaskExample(NamedTuple):
    """A document of a task as a parent would read it."""

    task: str
    parent: str
    preview: TaskPreview
    asked: str = ""  # what the profile says of how this task is asked, and not of all


@dataclass
class Problems:
    """What is wrong, in the order in which it was found.

    Args:
        stop_at_once: Raise the first instead of noting it: for whoever will not go on with it anyway.
    """

    stop_at_once: bool
    findings: list[Finding] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)  # what is well, a line each
    examples: list[TaskExample] = field(default_factory=list)  # a document of each task, as each parent reads it
    status: Status = "passed"  # that ``run``, which stops at the first problem, would end with

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is raised inside, or let it through."""
        try:
            yield
        except MergegateError as error:
            if self.stop_at_once:
                raise
            self.note(error)

    def note(self, error: MergegateError) -> None:
        """A problem that would end a run."""
        self.add(findings_of(error))

    def add(self, findings: Iterable[Finding]) -> None:
        """What a check found. A run would end at the first that blocks."""
        found = list(findings)
        self.findings += found
        blocking = [one for one in found if one.severity == "block"]
        if self.status == "passed" and blocking:
            self.status = blocking[0].refusal().status

    def ask(self, stage: Any, *inputs: Any) -> Any:
        """A check that is a stage: in a release as a task of the flow, which its refusal ends; else without Prefect."""
        return stage(*inputs) if self.stop_at_once else stage.build(*inputs)

    @property
    def exit_code(self) -> int:
        """That ``run`` would end with, as far as can be told now."""
        return EXIT_CODES[self.status]

    def worst_first(self) -> tuple[Finding, ...]:
        """Each finding once, those that block before all others."""
        return worst_first(self.findings)


@dataclass(frozen=True)
class Preflight:
    """What a release goes on with.

    Args:
        cleared: The recipe and its remedies; where problems are only noted, those of which all could be found out.
        evidence: What the merge will be measured on; None where there are problems with it.
    """

    cleared: tuple[ClearedCandidate, ...]
    evidence: Evidence | None


def preflight_profile(
    profile: Profile,
    problems: Problems,
    candidates: Sequence[Candidate] | None = None,
    compared: Sequence[Candidate] = (),
) -> Preflight:
    """Look at target, server, recipes, parents, evidence; then at each recipe's licences, headers and machine.

    Args:
        candidates: In place of the profile's own recipe and remedies.
        compared: Recipes that are merged as well, and never released: no guard asks for their parents.

    Raises:
        MergegateError: the first problem, if ``problems`` stops at once.
        InvalidInput: for a recipe that cannot mean anything.
    """
    with problems.noted():
        profile.limits.require_known()
    with problems.noted():
        check_target(profile.publish, profile.root)
    with problems.noted():
        if profile.publish and profile.evaluate and profile.evaluate.anchor:
            profile.publish.earlier(profile.root, profile.evaluate.anchor)
    with problems.noted():
        check_server(profile.serve, profile.root)
    candidates = profile.candidates() if candidates is None else candidates
    for remark in candidates[0].remarks:
        problems.summary.append(remark)
        if problems.stop_at_once:
            announce(remark)
    every = (*candidates, *compared)
    for candidate in every:
        if not candidate.change:  # a change of the profile's own recipe inherits its warnings
            problems.add(candidate.recipe.all_findings)
            if problems.stop_at_once:
                for finding in candidate.recipe.all_findings:
                    announce(f"warning: {finding}" + (f"; {finding.remedy}" if finding.remedy else ""))
    parents = _parents([candidate.recipe for candidate in every], problems)
    evidence = None
    if _is_whole(candidates[0].recipe, parents[0]):
        with problems.noted():
            evidence = profile.pin_evidence(parents[0], store().hashes)
    if evidence and evidence.computed:
        problems.summary.append(evidence.computed)
    rules = _Rules.of(profile, evidence)
    cleared = []
    for candidate, found in zip(every, parents, strict=True):
        with problems.noted():
            if candidate.recipe.output and evidence and needs_champion(evidence.guards):
                raise InvalidInput(
                    f"profile {profile.name}: evaluate.tasks",
                    found="a guard by the champion, of a recipe whose result is an adapter",
                    expected="guards by parents",
                    remedy="compare with the base or with one of the adapters: guarded_by: base+adapter",
                )
            if _is_whole(candidate.recipe, found) and candidate not in compared:
                profile.check_references(found)
        cleared.append(_clear(candidate, found, rules, problems))
    if evidence:
        measured = tuple(parent for parent in parents[0] if not parent.is_state)
        _require_tokenizers(evidence, measured, problems)
        readers: Sequence[TokenizerPlace] = ()
        with problems.noted():
            readers = _readers(measured, profile.checks.code.trusted)
        evidence = _with_data(evidence, readers, problems)
        _require_unread([candidate.recipe for candidate in every], evidence, problems)
        if not problems.stop_at_once:  # a release will see soon enough
            _note_power(evidence, measured, profile, len(candidates), problems)
    return Preflight(tuple(one for one in cleared if one), evidence)


def clear_further(candidate: Candidate, profile: Profile) -> ClearedCandidate:
    """A recipe that nobody wrote beforehand, after all checks of one that somebody did.

    Raises:
        InvalidInput: when its parents are not there, or a guard asks for one that it has not.
        Refused: when a check says no.
    """
    problems = Problems(stop_at_once=True)
    (found,) = _parents([candidate.recipe], problems)
    profile.check_references(found)
    cleared = _clear(candidate, found, _Rules.of(profile), problems)
    assert cleared is not None  # or its problem had been raised
    return cleared


def _with_data(evidence: Evidence, readers: Sequence[TokenizerPlace], problems: Problems) -> Evidence:
    """The evidence with the data of its tasks pinned as they are now, so that one run asks one benchmark; each guard's
    metric is one that its task has; and one document of each task is filled in as each parent reads it, so that a
    tokenizer, a template or a task that fails is found now, and not after merging."""
    limit = CountLimit(seconds=evidence.scoring.time_limit)
    tasks = []
    for task in evidence.tasks:
        with problems.noted():  # data that cannot be loaded is found out before hours of merging, not after
            size = problems.ask(count_task, task, data_revisions(task, limit), limit).value
            tasks.append(size.of(task))
            for guard in evidence.guards:
                if guard.task == task.name:
                    choose_known_metrics(size.metrics, guard.metric, task.name)
            for reader in readers:
                with problems.noted():
                    found = preview.build(tasks[-1], evidence.scoring, reader, limit).value
                    asked = task.asked.described() if task.asked else ""
                    problems.examples.append(TaskExample(task.name, reader.name, found, asked))
                    if found.room is not None and found.tokens > found.room:
                        problems.add([_cut_prompt(task.name, reader.name, found)])
    return evidence._replace(tasks=tuple(tasks)) if len(tasks) == len(evidence.tasks) else evidence


def _cut_prompt(task: str, model: str, shown: TaskPreview) -> Finding:
    return Finding(
        "warn",
        f"evaluate.tasks: {task}",
        found=f"its first prompt has {shown.tokens:,} tokens; {model} has room for {shown.room:,} beside the longest "
        "answer, so the beginning is cut off",
        expected="prompts that the model reads whole",
        remedy="a smaller max_gen_toks under gen_kwargs, or fewer num_fewshot",
    )


def _require_unread(recipes: Sequence[Recipe], evidence: Evidence, problems: Problems) -> None:
    """See that nothing by which a merge is judged was read for it."""
    limit = CountLimit(seconds=evidence.scoring.time_limit)
    for recipe in recipes:
        with problems.noted():
            if (read := collect_calibration_texts(recipe, store().hashes)) is None:
                continue

            def documents_of(task: EvalTask, texts: CalibrationTexts) -> ContaminatedDocuments:
                found: ContaminatedDocuments = problems.ask(find_contaminated_documents, task, texts, limit).value
                return found

            found = list(overlap_findings(read, evidence, documents_of))
            if found and problems.stop_at_once:
                raise found[0].refusal()
            problems.add(found)
            problems.summary.append(
                f"texts: {len(read.texts):,} documents are read for the merge; what none of them shows becomes the mean"
            )


def _require_tokenizers(evidence: Evidence, parents: Sequence[ResolvedCheckpoint], problems: Problems) -> None:
    """See that each parent that is measured can read at all."""
    if not (evidence.tasks or evidence.documents):
        return
    for parent in parents:
        with problems.noted():
            names = parent.snapshot.files if parent.snapshot else {one.name for one in parent.directory.iterdir()}
            if parent.is_merged and not any(name in names for name in _TOKENIZERS):
                raise InvalidInput(
                    parent.ref,
                    found="no tokenizer, without which it cannot be measured",
                    expected=f"one of {', '.join(_TOKENIZERS)}",
                    remedy="copy the tokenizer of the model that it was made from into its directory",
                )


def _readers(parents: Sequence[ResolvedCheckpoint], trusted: Collection[str]) -> list[TokenizerPlace]:
    """Where the tokenizers of the parents lie; without those whose own code would have to be run."""
    return [
        TokenizerPlace(name=parent.name, directory=parent.directory, digest=header.digest)
        for parent, header in zip(parents, header_digests(parents), strict=True)
        if not any(f"{one.repo}@{one.commit}" in trusted for one in parent.snapshots)
    ]


def _note_power(
    evidence: Evidence, parents: Sequence[ResolvedCheckpoint], profile: Profile, candidates: int, problems: Problems
) -> None:
    """What the night's documents can tell, before any is asked: some lines, and a warning where that is little."""
    if power := forecast_power(evidence, parents, candidates + profile.proposed, past_guards(profile.name)):
        problems.summary += power.lines()
        problems.add([finding] if (finding := power_finding(power)) else [])


def past_guards(profile: str) -> tuple[PastGuardOutcome, ...]:
    """What the last nights of a profile showed of each guard that its merge did not fail, in their order. A merge that
    failed says nothing about how one will differ that is as good as its reference."""
    return tuple(
        PastGuardOutcome(score.task, score.reference, score.documents, score.differing)
        for record in read_history(home() / "reports").records
        if record.profile == profile and record.flow in ("release", "sweep")
        for score in record.scores
        if score.documents and score.outcome != "fail"
    )


def check_recipe(recipe: Recipe, root: Path, name: str, problems: Problems) -> None:
    """All that can be said of a recipe alone. It does not say what the merge is for: the strictest use is assumed, and
    what that forbids is only a warning."""
    problems.add(recipe.all_findings)
    (found,) = _parents([recipe], problems)
    rules = _Rules.of_a_recipe(root, name)
    if _is_whole(recipe, found):
        _clear(Candidate("", recipe, ""), found, rules, problems)


@dataclass(frozen=True)
class _Rules:
    """By which recipes are cleared; the table of licences is read, and ancestors are asked for, once."""

    license: LicenseSettings
    table: LicenseTable
    ancestors: AncestorLookup
    root: Path
    name: str
    merging: MergeSettings
    dtypes: tuple[str, ...]  # in which the models will be loaded here to be measured
    tokenizers: tuple[str, ...] = ()  # parts in which they may differ
    code: tuple[str, ...] | None = None  # that may travel with the release; None: nobody has said
    remedy: str = ""  # of a licence that forbids a use which was only assumed: a warning

    @staticmethod
    def of(profile: Profile, evidence: Evidence | None = None) -> _Rules:
        settings, root, checks = profile.checks.license, profile.root, profile.checks
        table, dtypes = license_table(settings, root), profile.dtypes_to_evaluate()
        if evidence and evidence.computed:
            dtypes = ("float32",)
        return _Rules(
            settings,
            table,
            hub_ancestors(),
            root,
            profile.name,
            profile.merge,
            dtypes,
            tokenizers=checks.tokenizer.accepted,
            code=checks.code.accepted,
        )

    @staticmethod
    def of_a_recipe(root: Path, name: str) -> _Rules:
        settings, remedy = LicenseSettings(), "say in a profile what the merge is for"
        table = license_table(settings, root)
        return _Rules(settings, table, hub_ancestors(), root, name, MergeSettings(), (), remedy=remedy)


def _clear(
    candidate: Candidate, found: tuple[ResolvedCheckpoint, ...], rules: _Rules, problems: Problems
) -> ClearedCandidate | None:
    """Licences, then headers, then the machine: the cheap and the hard noes first."""
    if not found:
        return None  # why not is noted
    settings = rules.license
    declared = read_licenses(found, rules.table, rules.ancestors)
    allowed = problems.ask(check_licenses, declared, settings.use(rules.name), rules.table, settings.accepted)
    if refusal := allowed.value.refusal():
        if rules.remedy:
            problems.findings.append(finding_of(refusal).as_warning(rules.remedy))
        else:
            problems.note(refusal)
    if not _is_whole(candidate.recipe, found):
        return None  # half a family may be forbidden, but neither allowed nor compared
    with problems.noted():
        headers = header_digests(found)
        fits = problems.ask(check_compatibility, candidate.recipe, headers, found, rules.code, rules.tokenizers)
        device = numerics(rules.merging).where
        machine = measure_machine_capacity(fits.value, found, device)
        lacking = machine_findings(fits.value, machine, device=device, dtypes=rules.dtypes)
        problems.add([*fits.value.remarks, *lacking])
        if problems.stop_at_once and (blocking := [one for one in lacking if one.severity == "block"]):
            raise blocking[0].refusal()
        if not fits.value.blocking():
            problems.summary.append(f"{candidate.recipe.summary()}: {fits.value.summary()}")
        if not refusal:
            problems.summary.append(f"licences: {allowed.value.summary()}")
        return ClearedCandidate(candidate, found, allowed, fits, headers)
    return None


def _parents(recipes: Sequence[Recipe], problems: Problems) -> tuple[tuple[ResolvedCheckpoint, ...], ...]:
    """The parents of each recipe that were found; those that were not are problems, all of them at once."""
    if problems.stop_at_once:
        return resolve_all_parents(recipes)
    search = search_parents(recipes)
    for problem in search.problems:
        problems.note(problem)
    return search.found


def _is_whole(recipe: Recipe, found: Sequence[ResolvedCheckpoint]) -> bool:
    return len(found) == len(recipe.references())
