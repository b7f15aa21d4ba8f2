"""A release with quantized variants, from the profile to the published files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "flows"))

from demo_project import PROFILES, SOURCES, Project, make_project  # shared with the tests of the flows
from kept import digest_of, kept
from patience import HANG_S
from rounded_format import RoundedFormat, rounded_registered
from test_killed_run import DIES, environment, files_of
from variant_mutations import MUTATIONS, injected
from walkthrough import blocks_of, reader

from mergegate.tasks.checkpoints import Model
from mergegate.tasks.store import digest
from mergegate.tasks.variants import VariantFormat
from mergegate.tasks.variants.gguf import GgufFormat

HERE = Path(__file__).parent
ROOT = PROFILES.parent
PROFILE = "profiles/variants.yaml"

ROUNDED: Sequence[Mapping[str, Any]] = (
    {"format": "rounded", "bits": [8, 5]},
    {"format": "rounded", "bits": 7, "suffix": "Bad", "fault": "scales"},
)
REAL: Sequence[Mapping[str, Any]] = (
    {"format": "gguf", "types": ["Q8_0"]},
    {"format": "compressed-tensors", "scheme": "FP8_DYNAMIC"},
)
KINDS = ["rounded", pytest.param("real", marks=pytest.mark.variants)]
VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {"rounded": ROUNDED, "real": REAL}
GOOD = {"rounded": ("R8", "R5"), "real": ("Q8_0", "FP8_DYNAMIC")}
PLACES = {"rounded": {"tiny", "tiny-Rounded"}, "real": {"tiny", "tiny-GGUF", "tiny-FP8"}}


def write_profile(project: Project, variants: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """Write a profile with one task of the demo, which is enough to notice a bad variant, and return its path."""
    profile = yaml.safe_load((PROFILES / "demo-variants.yaml").read_text())
    profile["evaluate"]["tasks"] = [{"task": "demo/tasks/reverse.yaml", "guarded_by": "bpe-reverser", "max_drop": 3}]
    profile |= {"name": "tiny", "publish": {"to": "directory", "path": "../releases/tiny"}}
    (project.root / PROFILE).write_text(yaml.safe_dump({**profile, "variants": list(variants), **more}))
    return PROFILE


def variant_project(root: Path, variants: Sequence[Mapping[str, Any]], **more: Any) -> Project:
    """Create a project with a profile that has ``variants``, and the environments of the quantizers."""
    project = make_project(root)
    for tools in (".venv-gguf", ".venv-quantize"):
        (root / tools).symlink_to(ROOT / tools)
    write_profile(project, variants, **more)
    return project


def run_process(project: Project, *command: str) -> subprocess.CompletedProcess[str]:
    """Run mergegate (or ``-c PROGRAM``) in a process of its own, which a test may kill."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    start = command if command[0] == "-c" else ("-m", "mergegate", *command)
    options = {"capture_output": True, "text": True, "timeout": HANG_S, "check": False}
    variables = environment(project) | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *start], cwd=project.root, env=variables, **options)


def published_places(project: Project) -> set[str]:
    """Return the names of all places in which something complete was published."""
    return {path.parent.name for path in (project.root / "releases").glob("*/latest")}


def outcome_of(project: Project, *options: str) -> dict[str, Any]:
    printed = project.mergegate("run", PROFILE, "--json", *options)
    return {"exit_code": printed.exit_code, **json.loads(printed.stdout)}


def verdicts_of(outcome: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {verdict["type"]: verdict for verdict in outcome["content"]["variants"]}


@pytest.fixture(scope="session")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let all profiles of this session use the format ``rounded``, because fixtures of the session need it."""
    with rounded_registered(tmp_path_factory.mktemp("rounded") / "site"):
        yield


@pytest.fixture(scope="session", params=KINDS)
def released(request: pytest.FixtureRequest, prefect_api: None, registered: None) -> tuple[str, Path, dict[str, Any]]:
    """Return the kind of the variants, a project that has released them, and the outcome of its run."""
    kind = request.param
    if kind == "real":
        for environment in ("gguf_python", "quantize_python"):
            request.getfixturevalue(environment)

    def make(place: Path) -> None:
        project = variant_project(place, VARIANTS[kind])
        outcome = outcome_of(project)
        assert outcome["exit_code"] == 0, outcome
        (place / "outcome.json").write_text(json.dumps(outcome))

    sources = (*SOURCES, *HERE.glob("*.py"))
    root = kept(request.config, f"variants-{kind}", digest_of(sources), make)
    return kind, root, json.loads((root / "outcome.json").read_text())


@pytest.fixture
def own(released: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> tuple[str, Project]:
    """Return the test's own copy of the project that has released variants."""
    kind, root, _ = released
    shutil.copytree(root, tmp_path / "project", symlinks=True)
    return kind, Project(tmp_path / "project")


@pytest.mark.story
def test_good_variants_are_published_with_their_verdicts(released: tuple[str, Path, dict[str, Any]]) -> None:
    kind, root, outcome = released
    verdicts = verdicts_of(outcome)
    for variant_type in GOOD[kind]:
        verdict = verdicts[variant_type]
        assert (verdict["outcome"], verdict["publishable"], verdict["reasons"]) == ("pass", True, [])
        assert verdict["gate"]["guards"]
    assert published_places(Project(root)) == PLACES[kind]
    assert {name for one in outcome["variants"] for name in one["types"]} == set(GOOD[kind])


@pytest.mark.story
def test_a_bad_optional_variant_is_named_with_its_reason_and_not_published(
    released: tuple[str, Path, dict[str, Any]],
) -> None:
    kind, root, outcome = released
    if kind != "rounded":
        pytest.skip("the other tests damage real variants")
    bad = verdicts_of(outcome)["R7"]
    assert (bad["outcome"], bad["publishable"]) == ("fail", False)
    assert "perplexity" in bad["reasons"][0]
    assert not list((root / "releases").glob("*Bad*"))
    page = next((root / "releases").glob("tiny/*/report.html")).read_text()
    assert "R7" not in page  # the release of the merge does not mention its variants


@pytest.mark.story
def test_a_second_run_says_nothing_new_and_starts_no_process(
    own: tuple[str, Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, project = own
    before = files_of(project.root / "releases")
    for start in ("os.posix_spawn", "os.fork", "os.forkpty", "os.execv", "os.execve", "os.system"):
        monkeypatch.setattr(start, pytest.fail)
    monkeypatch.setattr("subprocess.Popen.__init__", pytest.fail)
    again = outcome_of(project)
    assert (again["exit_code"], again["status"]) == (0, "nothing new"), again["message"]
    assert files_of(project.root / "releases") == before


@pytest.mark.story
def test_verify_notices_one_changed_byte_of_a_variant_and_reproduce_makes_its_weights_again(
    own: tuple[str, Project],
) -> None:
    kind, project = own
    for place in sorted(PLACES[kind] - {"tiny"}):
        release = project.root / "releases" / place / "latest"
        verified = project.mergegate("verify", str(release))
        assert verified.exit_code == 0, verified.output
        reproduced = project.mergegate("reproduce", str(release))
        assert reproduced.exit_code == 0, reproduced.output
        weights = next(path for path in release.iterdir() if path.suffix in (".gguf", ".safetensors"))
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.chmod(0o644)
        weights.write_bytes(content)
        for command in ("verify", "reproduce"):
            refused = project.mergegate(command, str(release))
            assert refused.exit_code == 3, refused.output
            assert weights.name in refused.output


@pytest.mark.story
def test_a_failed_required_variant_refuses_the_release_and_nothing_is_published(
    registered: None, prefect_api: None, tmp_path: Path
) -> None:
    variants = [{**ROUNDED[0], "bits": 8}, {**ROUNDED[1], "required": True}]
    project = variant_project(tmp_path, variants)
    outcome = outcome_of(project)
    assert (outcome["exit_code"], outcome["status"]) == (3, "refused")
    assert outcome["content"]["verdict"]["reasons"], "the report names the reason"
    assert "variant R7: " in outcome["message"]
    assert verdicts_of(outcome)["R8"]["outcome"] == "pass"
    assert published_places(project) == set()

    write_profile(project, [variants[0], {**variants[1], "required": False}])
    outcome = outcome_of(project)
    assert (outcome["exit_code"], outcome["status"]) == (0, "released")
    assert published_places(project) == {"tiny", "tiny-Rounded"}


@pytest.mark.story
def test_a_reason_that_names_a_file_in_the_store_does_not_keep_the_good_variants_from_being_published(
    registered: None, prefect_api: None, tmp_path: Path
) -> None:
    project = variant_project(tmp_path, [{"format": "rounded", "bits": [8, 7]}])
    with injected(RoundedFormat, {"R7": MUTATIONS["safetensors"]["truncated"]}, tmp_path):
        outcome = outcome_of(project)
    assert (outcome["exit_code"], outcome["status"]) == (0, "released"), outcome["message"]
    page = (project.root / "releases" / "tiny-Rounded" / "latest" / "README.md").read_text()
    assert "R7" in page
    assert str(tmp_path) not in page


@pytest.mark.story
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.proof), pytest.param(2, marks=pytest.mark.proof)]
)
def test_every_damaged_variant_is_refused_with_a_reason_and_only_the_intact_one_is_published(
    registered: None, prefect_api: None, tmp_path: Path, seed: int
) -> None:
    types = {f"R{bits}": name for bits, name in enumerate(("intact", *MUTATIONS["safetensors"], "other merge"), 8)}
    project = variant_project(tmp_path, [{"format": "rounded", "bits": [int(one[1:]) for one in types]}])
    require_only_the_intact_one_passes(project, types, RoundedFormat, "safetensors", seed)
    weights = [path for path in files_of(project.root / "releases" / "tiny-Rounded" / "latest") if "-R" in path]
    assert weights == ["tiny-R8.safetensors"]


@pytest.mark.variants
@pytest.mark.usefixtures("gguf_python", "registered", "prefect_api")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.proof  # a minute; the checks of each damage are tested with the files of these tests
def test_every_damaged_gguf_file_is_refused_with_a_reason_and_only_the_intact_one_is_published(
    tmp_path: Path, seed: int
) -> None:
    names = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "F16", "BF16", "Q6_K", "Q5_K_S", "Q4_K_S", "Q3_K_M")
    # Only the first types have scales that a test can change without knowledge of their layout.
    types = dict(zip(names, ("intact", "scales", "swapped", "nan", "other merge"), strict=False))
    types |= dict(zip(names[5:], [name for name in MUTATIONS["gguf"] if name not in types.values()], strict=True))
    project = variant_project(tmp_path, [{**REAL[0], "types": list(types)}])
    require_only_the_intact_one_passes(project, types, GgufFormat, "gguf", seed)
    published = files_of(project.root / "releases" / "tiny-GGUF" / "latest")
    assert [name for name in published if name.endswith(".gguf")] == ["tiny-Q8_0.gguf"]


def require_only_the_intact_one_passes(
    project: Project, types: Mapping[str, str], variant_format: type[VariantFormat], kind: str, seed: int
) -> None:
    """Release variants with the fault that ``types`` names for each type. 'other merge' has no mutation."""
    # This model has the shapes of the merge, but cannot reverse words.
    other = Model(name="other", digest=digest("bpe-base"), directory=PROFILES / "demo" / "models" / "bpe-base")
    faults = {one: MUTATIONS[kind].get(name, other) for one, name in types.items() if name != "intact"}
    with injected(variant_format, faults, project.root, seed):
        outcome = outcome_of(project)
    assert (outcome["exit_code"], outcome["status"]) == (0, "released")
    verdicts = verdicts_of(outcome)
    assert set(verdicts) == set(types)
    for variant_type, mutation in types.items():
        verdict = verdicts[variant_type]
        expected = ("pass", True) if mutation == "intact" else ("fail", False)
        assert (verdict["outcome"], verdict["publishable"]) == expected, f"{mutation}: {verdict['reasons']}"
        assert bool(verdict["reasons"]) == (mutation != "intact")
        assert not any("Traceback" in reason or "Error(" in reason for reason in verdict["reasons"]), mutation


# Kills.

ONE_ROUNDED = ({"format": "rounded", "bits": 8},)
# Cheap ones first: each run continues after the stages that the runs before it completed.
ROUNDED_MOMENTS = ("stage:agreement", "stage:variant", "publish:tiny", "publish:tiny-Rounded")
REAL_MOMENTS = (
    *("child:convert:1", "child:convert:4", "stage:convert", "child:llama:0.5"),
    *("stage:agreement", "stage:variant", "stage:inspect", "stage:answers"),
    *("child:quantize:1", "child:quantize:12", "publish:tiny", "publish:tiny-GGUF", "publish:tiny-FP8"),
)


@pytest.mark.story
@pytest.mark.parametrize(
    "moments", [("stage:variant", "publish:tiny"), pytest.param(ROUNDED_MOMENTS, marks=pytest.mark.proof)]
)
@pytest.mark.usefixtures("rounded_variants")
def test_killed_at_one_moment_after_the_other_the_published_variants_are_byte_identical(
    tmp_path: Path, moments: Sequence[str]
) -> None:
    require_same_bytes(tmp_path, ONE_ROUNDED, moments)


@pytest.mark.story
@pytest.mark.proof
@pytest.mark.variants
@pytest.mark.usefixtures("gguf_python", "quantize_python")
def test_killed_inside_a_converter_a_quantizer_or_llama_cpp_the_published_variants_are_byte_identical(
    tmp_path: Path,
) -> None:
    require_same_bytes(tmp_path, REAL, REAL_MOMENTS)


def require_same_bytes(root: Path, variants: Sequence[dict[str, object]], moments: Sequence[str]) -> None:
    killed, undisturbed = (variant_project(root / name, variants) for name in ("killed", "undisturbed"))
    for moment in moments:
        run = run_process(killed, "-c", textwrap.dedent(DIES), moment, "run", PROFILE)
        assert run.returncode == -signal.SIGKILL, f"{moment}\n{run.stdout}\n{run.stderr}"
        require_whole_releases(killed)
    for project in (killed, undisturbed):
        run = run_process(project, "run", PROFILE)
        assert run.returncode == 0, run.stdout + run.stderr
    assert files_of(killed.root / "releases") == files_of(undisturbed.root / "releases")
    assert not list((killed.home / "store").glob("*/*.partial"))


def require_whole_releases(project: Project) -> None:
    """Check that every published directory has all files that its checksums list."""
    for sums in project.root.glob("releases/*/latest/SHA256SUMS"):
        listed = {line.split(maxsplit=1)[1].lstrip("*") for line in sums.read_text().splitlines()}
        assert listed <= set(files_of(sums.parent))


@pytest.mark.proof  # two minutes; other tests release with the real quantizers
@pytest.mark.variants
@pytest.mark.usefixtures("gguf_python", "quantize_python")
def test_the_tutorial_about_variants_works_as_written(tmp_path: Path) -> None:
    user = reader(tmp_path, {"~/mergegate": str(ROOT)})
    user.follow(blocks_of(ROOT / "docs" / "tutorials" / "release-quantized-variants.md"), "the tutorial")
