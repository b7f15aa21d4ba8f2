"""Format the numbers, sizes and sentences of the report. All functions are pure."""

from __future__ import annotations

import re

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.evaluation import TaskScore
from mergegate.tasks.quality.gate import (
    BROKEN_LOSS,
    DriftVerdict,
    GateVerdict,
    GuardVerdict,
    StratumDrift,
    SuiteVerdict,
    selection_inflation,
)
from mergegate.tasks.release.report.content import ReportContent, ReportedModel

MINUS, TIMES, NONE = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
NOT_FINITE = "not finite"
# Metrics of built-in tasks.
_ERROR_RATES = {"wer": "word error rate", "cer": "character error rate"}
_METRIC_NAMES = {"mrr": "MRR", "accuracy": "accuracy", **_ERROR_RATES}
_RANK_METRIC = re.compile(r"(ndcg|recall)@\d+")
GLYPHS: dict[Outcome, str] = {"pass": "✓", "fail": "✗", "inconclusive": "?"}


def number(value: float, decimals: int) -> str:
    """Format ``value`` with fixed decimals and a real minus sign, never as negative zero."""
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def plain(value: float) -> str:
    """Format a threshold as a user would write it: 3, 2.5. Long decimals, such as those of a mean, are cut to two."""
    text = f"{value:g}"
    if len(text.partition(".")[2]) > 4 and abs(value) >= 0.1 and "e" not in text:
        text = f"{value:.2f}"
    return text.replace("-", MINUS)


def interval(low: float, high: float, decimals: int) -> str:
    return f"[{number(low, decimals)}, {number(high, decimals)}]"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def guard_decimals(guard: GuardVerdict) -> int:
    """Return the fewest decimals (1 to 3) that display every bound on the correct side of its limit.

    A bound of 3.04 is not displayed as 3.0 if the limit is 3. A proven loss is not displayed as zero.
    """
    limits = (guard.max_drop, guard.margin if guard.limit is None else guard.limit)
    pairs = [(bound, limit) for bound in (guard.drop, guard.high) for limit in limits]
    shown_worse = [(guard.low, 0.0)] * (guard.low > 0)
    return _decimals_that_keep_order([*pairs, *shown_worse], fewest=1, most=3)


def drift_decimals(drift: DriftVerdict) -> int:
    """Return the fewest decimals (3 to 5) that display the ratio and its bounds on the correct side of the limits."""
    # Far from the limits, more digits add no information.
    if drift.ratio is not None and drift.ratio >= 10:
        return 1
    bounds = [bound for bound in (drift.ratio, drift.low, drift.high) if bound is not None]
    pairs = [(bound, limit) for bound in bounds for limit in (drift.warn_ratio, drift.max_ratio)]
    return _decimals_that_keep_order(pairs, fewest=3, most=5)


def _decimals_that_keep_order(pairs: list[tuple[float, float]], *, fewest: int, most: int) -> int:
    for decimals in range(fewest, most):
        if all((a > b) == (round(a, decimals) > b) and (a < b) == (round(a, decimals) < b) for a, b in pairs):
            return decimals
    return most


def metric_name(label: str, kind: ModelKind, *, with_direction: bool = False) -> str:
    """Return the name of a metric for people, such as 'nDCG@10'. Labels of lm-eval are returned unchanged.

    ``with_direction`` adds that lower is better to the name of an error rate.
    """
    metric, _, variant = label.partition(",")
    known = _RANK_METRIC.fullmatch(metric) or metric in _METRIC_NAMES
    if kind == TEXT_GENERATOR or variant not in ("", "none") or not known:
        return label
    direction = " (lower is better)" if with_direction and metric in _ERROR_RATES else ""
    return _METRIC_NAMES.get(metric, metric.replace("ndcg", "nDCG")) + direction


def is_share(score: TaskScore, kind: ModelKind) -> bool:
    """Return whether reports show a score in points: a share of correct answers, a graded score or an error rate."""
    is_rate = score.higher_is_better or metric_name(score.metric, kind) in _ERROR_RATES.values()
    return is_rate and 0 <= score.score <= 1


def error_rate_note(verdict: GateVerdict, kind: ModelKind) -> str:
    """Return a sentence about the sign of a drop in an error rate. Empty if no guard has one."""
    if any(metric_name(guard.metric, kind) in _ERROR_RATES.values() for guard in verdict.all_guards):
        return "An error rate must not rise: its drop is the rate of the merge minus the rate of the reference."
    return ""


def samples_note(content: ReportContent) -> str:
    """Describe the samples of the report, for the form of the tasks of this kind of model."""
    forms, order = content.kind.task_forms, "the largest differences first"
    if forms == ("retrieval",):
        return (
            f"Queries for which the merge and the reference rank the texts differently, {order}. Each has the expected "
            "texts, and the text that each model ranks first."
        )
    if forms == ("transcription",):
        return (
            f"Recordings on which the merge and the reference score differently, {order}. Each has the expected "
            "transcript, and the transcript of each model."
        )
    return f"Documents on which the merge and the reference score differently, {order}. Few-shot examples are left out."


def drop(verdict: GuardVerdict | SuiteVerdict) -> str:
    """Return the drop on a guard, or the mean drop in a suite, in points: '4.1 [2.3, 5.9]'. Negative: a gain."""
    decimals = guard_decimals(verdict) if isinstance(verdict, GuardVerdict) else 1
    return f"{number(verdict.drop, decimals)} {interval(verdict.low, verdict.high, decimals)}"


def limits(verdict: GuardVerdict | SuiteVerdict) -> str:
    """Return both limits of a decision: 'max_drop 3, margin 4', or with the per-task limit for a task of a suite."""
    task_limit = verdict.limit if isinstance(verdict, GuardVerdict) else None
    upper = f"margin {plain(verdict.margin)}" if task_limit is None else f"per-task limit {plain(task_limit)}"
    return f"max_drop {plain(verdict.max_drop)}, {upper}"


def upper_limit(guard: GuardVerdict) -> str:
    """Return the limit of the upper bound of a guard: its margin, or in a suite the per-task limit, as '11/task'."""
    return plain(guard.margin) if guard.limit is None else f"{plain(guard.limit)}/task"


def format_ratio(drift: DriftVerdict) -> str:
    """Return the perplexity ratio as text: '1.003 [0.998, 1.008]', or that it is not finite."""
    if drift.ratio is None:
        return NOT_FINITE
    if drift.ratio >= 10_000:
        return _scientific(drift.ratio)  # the model is broken; more precision does not matter
    decimals = drift_decimals(drift)
    if drift.low is None or drift.high is None or drift.broken:
        return number(drift.ratio, decimals)  # the bounds say little about a broken merge, because they are clipped
    return f"{number(drift.ratio, decimals)} {interval(drift.low, drift.high, decimals)}"


def stratum_ratio(stratum: StratumDrift) -> str:
    """Return the perplexity ratio of one stratum as text: '1.003 [0.998, 1.008]'."""
    if stratum.ratio >= 10_000:
        return _scientific(stratum.ratio)
    return f"{number(stratum.ratio, 3)} {interval(stratum.low, stratum.high, 3)}"


def drift_notes(drift: DriftVerdict) -> tuple[str, ...]:
    """Return a sentence for each finding in addition to the ratio, and one for the ratio over all tokens."""
    notes = [f"{finding.reason}." for finding in drift.findings if finding.reason != drift.reason]
    if not drift.broken_documents and drift.ratio is not None:
        notes.append(
            f"No document loses more than {BROKEN_LOSS:g} nats per token, so at most {100 * drift.broken_high:.1f} % "
            f"of such documents do (limit {plain(100 * drift.max_broken_documents)} %)."
        )
    if drift.total_ratio is not None:
        notes.append(
            f"Each document counts once. Over all {drift.unit}s of the text, where long documents count more, the "
            f"ratio is {format_magnitude(drift.total_ratio)}; it does not decide."
        )
    return tuple(notes)


def format_magnitude(value: float | None) -> str:
    """Format a perplexity or a bits-per-byte value of any magnitude."""
    if value is None:
        return NOT_FINITE
    if value >= 1e6:
        return _scientific(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def title(verdict: GateVerdict) -> str:
    """Return the headline of a verdict: one word."""
    return {"pass": "Passed", "fail": "Refused", "inconclusive": "Inconclusive"}[verdict.outcome]


def consequence(content: ReportContent) -> str:
    """Return a sentence about publication. Empty if nothing was merged and the verdict is clear."""
    verdict = content.verdict
    if verdict.outcome == "inconclusive":
        effect = {"block": "blocks", "warn": "allows, with a warning,", "pass": "allows"}[verdict.on_inconclusive]
        rule = f"profile {effect} inconclusive merges (on_inconclusive: {verdict.on_inconclusive})."
        if not content.recipe:
            return f"The {rule}"
        return f"The merge {'may' if verdict.publishable else 'will not'} be published, because the {rule}"
    if not content.recipe:
        return ""
    return "The merge may be published." if verdict.publishable else "The merge will not be published."


def recommended_action(content: ReportContent) -> str:
    """Return the next step of a reader after this verdict. Empty if there is nothing to do."""
    verdict, explanation = content.verdict, content.explanation
    if verdict.outcome == "pass" or not content.recipe:
        return ""
    if needed := [variant for variant in content.variants if variant.required and not variant.publishable]:
        first = needed[0]  # the merge itself passed, because its variants are built only then
        change = f"Replace {first.type} by a type with more bits" if first.gate else f"Correct the variant {first.type}"
        return f"{change}, or set required: false to release the merge without it."
    if any(finding.kind == "copy" and finding.outcome == "fail" for finding in verdict.findings):
        return "Change the recipe so that it has an effect, or publish the parent itself."
    if verdict.drift is not None and verdict.drift.broken:
        return "Check the recipe: its method, weights and dtype. The merged weights do not form a working model."
    others = {guard.outcome for guard in verdict.guards} | {suite.outcome for suite in verdict.suites}
    others |= {finding.outcome for finding in verdict.findings}
    if verdict.drift is not None and verdict.drift.outcome == "inconclusive" and others <= {"pass"}:
        return "Add held-out text to perplexity.documents. Documents that repeat another one do not count."
    findings = [finding.outcome for guard in verdict.guards for finding in guard.findings]
    if verdict.outcome == "inconclusive" and "inconclusive" in findings:
        return "Change the evaluation as the reasons above say. Another recipe would not help."
    if explanation is not None and explanation.remedies:
        if explanation.remedies[0].kind == "profile":
            return "Set the change under “What to try” in the profile, then run again."
        return (
            "Apply the first change under “What to try”, or let mergegate try all of them: "
            "run it again with --remedy auto."
        )
    judgments: tuple[SuiteVerdict | GuardVerdict, ...] = (*verdict.suites, *verdict.guards)
    documents = [
        judged.documents_needed for judged in judgments if judged.outcome == "inconclusive" and judged.documents_needed
    ]
    if verdict.outcome == "inconclusive" and documents:
        return (
            f"Evaluate more documents: about {max(documents):,} would decide. If the task has no more, use a larger "
            "task for the same skill, or a wider margin."
        )
    if content.judge is not None and content.judge.outcome != "pass" and not verdict.guards:
        return "Read the judged answers, then change the recipe."
    return (
        "Read the samples that the merge lost, then change the recipe. "
        "If you can accept this drop, raise max_drop of the guard."
    )


_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


def page_of_model(model: ReportedModel) -> str:
    """Return the address of a Hub model at its commit, or an empty string for any other model."""
    name = model.ref.partition("@")[0].partition("+")[0]
    if not model.revision or not _HUB_NAME.fullmatch(name) or not re.fullmatch(r"[0-9a-f]{40}", model.revision):
        return ""
    return f"https://huggingface.co/{name}/tree/{model.revision}"


def licence(content: ReportContent) -> str:
    """Return the words before the license's name. A merge that is not published only *would* carry a license."""
    if content.verdict.publishable:
        return "The merge may be published under"
    return "According to the licenses of its parents, the merge would carry"


def sentence(content: ReportContent) -> str:
    """Return the reason for the verdict: the most severe reason, or the guard that passed most narrowly."""
    verdict = content.verdict
    if verdict.reasons:
        return f"{verdict.reasons[0].removesuffix('.')}."
    sentences = []
    if verdict.suites and verdict.guards:
        sentences += [f"{sentence_case(suite.reason)}." for suite in verdict.suites]
        task_limits = sorted({plain(guard.limit) for guard in verdict.guards if guard.limit is not None})
        sentences.append(f"No task exceeds its per-task limit ({', '.join(task_limits)}).")
    elif verdict.guards:
        closest = min(verdict.guards, key=lambda guard: guard.margin - guard.high)
        if len(verdict.guards) > 1:
            count = "Both" if len(verdict.guards) == 2 else f"All {len(verdict.guards)}"
            sentences.append(f"{count} guards passed. The closest: {closest.reason}.")
        else:
            sentences.append(f"{closest.reason}.")
    elif not verdict.notes:
        sentences.append("No task has a guard.")
    sentences += [f"{note}." for note in verdict.notes]
    drift = verdict.drift
    if drift is not None and drift.ratio is not None:
        value = number(drift.ratio, drift_decimals(drift))
        sentences.append(f"Perplexity is {value} times that of {drift.reference} (limit {plain(drift.max_ratio)}).")
    return " ".join(sentences)


def selection_note(content: ReportContent) -> str:
    """Return sentences on the use of the same documents for selection and for scores; empty if nothing was selected."""
    verdict = content.verdict
    judged = verdict.suites[:1] or verdict.guards
    if not verdict.publishable or not judged:
        return ""
    inflation = max(
        selection_inflation(
            each.drop, each.high, each.look.confidence if each.look else each.confidence, each.max_drop, each.margin
        )
        for each in judged
    )
    subject, direction = "mean score" if verdict.suites else "score", "high"
    if not verdict.suites and error_rate_note(verdict, content.kind):
        subject, direction = "error rate", "low"
    return (
        f"The documents that measured these scores also selected this merge. If it is as good as its reference, its "
        f"{subject} is expected to be about {number(inflation, 1)} points too {direction}."
    )


def regenerated_answers(content: ReportContent) -> tuple[str, ...]:
    """Return a sentence for each task and model of which some answers were generated again with a larger budget."""
    return tuple(
        f"{task}: {text.replace(' generated', f' of {model.name} generated')}"
        for model in content.models
        if model.scores is not None
        for task, ends in model.scores.ends.items()
        if (text := ends.describe_regeneration())
    )


def answer_lengths(guard: GuardVerdict) -> tuple[str, ...]:
    """Return one sentence per model about the generated answers of a guard. Empty if there are none."""
    if guard.answers is None:
        return ()
    sentences = []
    for name, answers in ((guard.reference, guard.answers.reference), ("the merge", guard.answers.merge)):
        parts = [f"{number(answers.mean_tokens, 1)} tokens on average"] if answers.mean_tokens is not None else []
        parts += [f"{number(100 * answers.cut_off / guard.n, 1)} % cut off"]
        parts += [f"{number(100 * answers.endless / guard.n, 1)} % never end"] if answers.endless else []
        if answers.regenerated:
            parts += [f"{answers.regenerated:,} generated again with up to {answers.largest_budget:,} tokens"]
        sentences.append(f"{guard.task}: answers of {name}: {', '.join(parts)}")
    if guard.answers.length_ratio is not None:
        sentences[-1] += f", {number(guard.answers.length_ratio, 2)} times as long as those of {guard.reference}"
    return tuple(sentences)


def cut_off_answers(content: ReportContent) -> tuple[str, ...]:
    """Return a warning for each task and model of which some answers or prompts were cut off."""
    scored = [(model.name, model.scores) for model in content.models if model.scores is not None]
    # The limit on transcripts is that of the model, for everyone who runs it.
    is_transcript = content.kind.task_forms == ("transcription",)
    note = "; this limit is its own" if is_transcript else "; its score understates the model"
    answers = [
        f"{task}: {ends.describe().replace(' answers', f' answers of {name}')}{note}"
        for name, scores in scored
        for task, ends in scores.ends.items()
        if ends.cut_off
    ]
    prompts = [
        f"{task}: {cuts.describe().replace(' prompts', f' prompts of {name}')}; raise max_length or lower max_gen_toks"
        for name, scores in scored
        for task, cuts in scores.prompts.items()
        if cuts.cut
    ]
    return (*answers, *prompts)


def thinking_shares(content: ReportContent) -> tuple[str, ...]:
    """Return a sentence for each task and model that thinks: how long its answers are, and how much is a thought."""
    return tuple(
        f"{task}: answers of {model.name}: {ends.describe_length()}"
        for model in content.models
        if model.scores is not None
        for task, ends in model.scores.ends.items()
        if ends.thinking
    )


def gate_notes(verdict: GateVerdict) -> tuple[str, ...]:
    """Return the notes of the gate's checks that have no effect on the verdict, one sentence each."""
    findings = [*(finding for guard in verdict.guards for finding in guard.findings), *verdict.findings]
    notes = [finding.reason for finding in findings if finding.outcome == "pass"]
    notes += [f"advisory: {guard.reason}" for guard in verdict.advisory if guard.outcome != "pass"]
    return tuple(dict.fromkeys(notes))


def documents_saved(verdict: GateVerdict) -> str:
    """Return a sentence about the documents that interim looks and skipped tasks saved. Empty if none."""
    counts_by_task = {
        guard.task: (guard.look.documents, guard.documents_left) for guard in verdict.guards if guard.look
    }
    counts_by_task |= {left_out.task: (0, left_out.documents) for left_out in verdict.not_run}
    evaluated, remaining = (
        (sum(counts) for counts in zip(*counts_by_task.values(), strict=True)) if counts_by_task else (0, 0)
    )
    if not remaining:
        return ""
    share = 100 * remaining / (evaluated + remaining)
    tasks = len({left_out.task for left_out in verdict.not_run})
    skipped = f", and skipping {format_count(tasks, 'task')}," if tasks else ""
    return (
        f"mergegate evaluated {evaluated:,} of {evaluated + remaining:,} documents. "
        f"Deciding early{skipped} saved {share:.0f} %."
    )


def evaluation_text(content: ReportContent) -> str:
    """Return the settings of the evaluation and the use of its documents, without the last period."""
    scoring, parts = content.scoring, []
    if scoring:
        examples = "the tasks' own" if scoring.num_fewshot is None else str(scoring.num_fewshot)
        sample = f"a fixed random sample of documents, at first {scoring.first_look} per task"
        prompts = [f"{examples} few-shot examples", "chat template" if scoring.chat_template else "no chat template"]
        length = [f"at most {scoring.max_length} tokens"] if scoring.max_length else []
        by_text, library = content.kind.reads_text, content.kind.loading_library
        settings = [
            f"lm-eval, {scoring.backend} backend" if by_text else f"the model loaded by {library}",
            sample if scoring.first_look is not None else "all documents",
            *(prompts if by_text else []),
            f"dtype {scoring.dtype}",
            f"batch size {scoring.batch_size}",
            *(length if by_text else []),
        ]
        parts = [", ".join(settings), *(f"{task} has {setup}" for task, setup in content.asked.items())]
        parts += [selection_note(content).removesuffix(".")]
    return ". ".join(filter(None, parts))


def data_digests(verdict: GateVerdict) -> str:
    """Return each guarded task with the digest of its data and the datasets behind it, at their known commits.

    Example: ``gsm8k 3f2a… (openai/gsm8k at 9c1d…)``. The result is empty if no data was inspected.
    """
    digests = {}
    for guard in verdict.all_guards:
        if guard.data is not None:
            sources = {f"{source.path} at {source.revision[:12]}" for source in guard.data.sources if source.revision}
            behind = f" ({', '.join(sorted(sources))})" if sources else ""
            digests[guard.task] = f"{guard.task} {guard.data.digest[:12]}{behind}"
    return ", ".join(digests.values())
