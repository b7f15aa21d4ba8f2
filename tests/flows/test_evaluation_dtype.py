"""Data type of evaluation: the stored type, or float32 if the machine has no arithmetic units for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, make_project

from mergegate.flows.preflight import pin_profile_evidence
from mergegate.flows.profile import load_profile, parse_profile
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.base.stage import formats_without_units
from mergegate.tasks.models.checkpoints.pin import resolve_parents
from mergegate.tasks.preflight import Evidence, with_supported_dtype

X86 = "flags\t\t: fpu sse2 avx2 fma {}\n"
ARM = "Features\t: fp asimd {}\n"


@pytest.mark.parametrize(
    ("processor", "lacking"),
    [
        (X86.format(""), "bfloat16 float16"),
        (X86.format("avx512f avx512bw avx512_vnni"), "float16"),
        (X86.format("avx512f avx512_bf16"), "float16"),
        (X86.format("avx512_bf16 amx_bf16 avx512_fp16"), ""),
        (ARM.format("evtstrm aes"), "bfloat16 float16"),
        (ARM.format("fphp asimdhp"), "bfloat16"),
        (ARM.format("asimdhp i8mm bf16"), ""),
        ("vendor_id : IBM/S390\nfeatures\t: esan3 zarch\n", ""),
        ("", ""),
    ],
)
def test_what_a_processor_lacks_is_read_from_its_own_description(processor: str, lacking: str) -> None:
    assert formats_without_units("cpu", "processor\t: 0\n" + processor) == set(lacking.split())
    assert formats_without_units("cuda", processor) == set()


MODEL = {"model": str(PROFILES / "demo/models/base"), "parameters": {"weight": 1}}
RECIPE = {"merge_method": "linear", "models": [MODEL]}
EVALUATE = {"tasks": [{"task": "demo/tasks/copy.yaml", "guarded_by": "base", "max_drop": 3}]}
PERPLEXITY = {"documents": "demo/data/held-out.jsonl"}
SERVER = {"url": "http://127.0.0.1:1/v1"}
JUDGED = {**SERVER, "guarded_by": "base", "model": "m", "prompts": "demo/data/copy.jsonl"}
SERVED = {"evaluate": {**EVALUATE, "backend": "served", "server": SERVER}, "perplexity": None}


def computed_in(dtype: str) -> dict[str, Any]:
    return {"evaluate": {**EVALUATE, "dtype": dtype}, "perplexity": {**PERPLEXITY, "dtype": dtype}}


def lack(monkeypatch: pytest.MonkeyPatch, *formats: str) -> None:
    """Let the processor lack units for some formats."""
    monkeypatch.setattr("mergegate.flows.preflight.formats_without_units", lambda device: {*formats})


def evidence(tmp_path: Path, *, recipe: Mapping[str, object] = RECIPE, **changes: object) -> Evidence:
    content = {"name": "small", "recipe": recipe, "evaluate": EVALUATE, "perplexity": PERPLEXITY, "root": PROFILES}
    asked = parse_profile({**content, **changes}, "profile")
    parents = resolve_parents(asked.candidates()[0].recipe)
    return pin_profile_evidence(asked, parents, HashMemo(tmp_path / "memo.sqlite"))


@pytest.mark.parametrize(
    ("lacking", "changes", "expected", "missing"),
    [
        ("bfloat16", {"judge": JUDGED}, "float32 float32 float32", "bfloat16"),
        ("float16", {}, "auto auto", ""),
        ("float16", {"recipe": {**RECIPE, "dtype": "float16"}}, "float32 float32", "float16"),
        *(("bfloat16 float16", computed_in(it), f"{it} {it}", "") for it in ("bfloat16", "float16", "float32")),
        ("bfloat16", SERVED, "auto", ""),
    ],
)
def test_auto_means_float32_where_a_format_of_the_parents_or_the_merge_has_no_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, changes: dict[str, Any], expected: str, missing: str
) -> None:
    """The expected types are those of tasks, text and answers. Only a server's own type stays ``auto``."""
    lack(monkeypatch, *lacking.split())
    found = evidence(tmp_path, **changes)
    settings = (found.scoring, found.windows, found.answers and found.answers.settings)
    assert [part.dtype for part in settings if part] == expected.split()
    reason = f"no units for {missing}, in which models are stored"
    assert found.computed.endswith(reason) if missing else found.computed == ""


def test_models_in_float32_are_computed_as_ever(tmp_path: Path) -> None:
    found = evidence(tmp_path)
    for lacking in (set(), {"float16"}, {"bfloat16", "float16"}):
        assert with_supported_dtype(found, {"float32"}, lacking) == found
        assert with_supported_dtype(found, set(), lacking) == found


@pytest.mark.proof
def test_the_fallback_to_float32_is_announced_and_equals_float32(
    tmp_path: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path)
    for name, dtype in (("small", "auto"), ("wide", "float32")):
        evaluate = {**EVALUATE, "documents": 40, "dtype": dtype}
        perplexity = {**PERPLEXITY, "max_documents": 20, "max_increase": "50%", "dtype": dtype}
        profile = {"name": "small", "recipe": "demo/recipes/ties.yaml", "evaluate": evaluate, "perplexity": perplexity}
        (project.root / f"profiles/{name}.yaml").write_text(json.dumps(profile))
    models = [str(PROFILES / "demo/models" / name) for name in ("base", "reverser")]
    stages = ("perplexity", "evaluate")

    written = project.mergegate("compare", *models, "--profile", "profiles/wide.yaml", "--json")
    made = {stage: project.artifacts(stage) for stage in stages}
    lack(monkeypatch, "bfloat16")
    chosen = project.mergegate("compare", *models, "--profile", "profiles/small.yaml", "--json")
    assert {stage: project.artifacts(stage) for stage in stages} == made
    assert all(made.values())

    contents = [json.loads(done.stdout)["content"] for done in (written, chosen)]
    assert "computed" not in contents[0]
    assert [content["models"] for content in contents[:1]] == [contents[1]["models"]]
    assert contents[1]["scoring"]["dtype"] == contents[1]["windows"]["dtype"] == "float32"
    page = Path(json.loads(chosen.stdout)["report"]).read_text()
    assert "Models were computed in float32: this processor has no units for bfloat16" in " ".join(page.split())

    checked = project.mergegate("check", "profiles/small.yaml")
    assert "no units for bfloat16" in " ".join(checked.stdout.split())


def test_the_shipped_profiles_leave_it_to_the_machine() -> None:
    for file in PROFILES.glob("*.yaml"):
        profile = load_profile(file)
        settings = filter(None, (profile.perplexity, profile.evaluate))
        assert {"auto"} >= {str(setting.dtype) for setting in settings}, file
