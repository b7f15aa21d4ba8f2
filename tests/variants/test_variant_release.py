"""A release with quantized variants, from the profile to the published files."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mergegate.merge_core.checkpoint import GgufTensor, read_gguf_header
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.base.store import MANIFEST, Artifact, digest
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.quality.variants import VariantFormat, VariantRecord

sys.path.append(str(Path(__file__).resolve().parents[1] / "flows"))

from demo_project import PROFILES, SOURCES, Project, make_project  # shared with the tests of the flows
from kept import digest_of, kept
from patience import HANG_S
from rounded_format import RoundedFormat, rounded_registered
from test_killed_run import DIES, environment, files_of
from walkthrough import blocks_of, reader

from mergegate.tasks.quality.variants.gguf import GgufFormat

Mutation = Callable[[Path, random.Random], None]
WEIGHTS = "model.safetensors"
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attn_", "ffn_")
# Bytes per block; the scale is the first two.
_HALF_SCALE = {"Q8_0": 34, "Q5_1": 24, "Q5_0": 22, "Q4_1": 20, "Q4_0": 18}


def truncate(directory: Path, rng: random.Random) -> None:
    """Cut the weights off somewhere: in the header, in a tensor, or right before the last byte."""
    path = _weights_of(directory)
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, 7, rng.randrange(64, size), rng.randrange(size // 2, size), size - 1]))


def corrupt_scales(directory: Path, rng: random.Random) -> None:
    """Multiply all scales of three matrices, or set them to zero."""
    factor = rng.choice([0.0, 6.0, -1.0])
    weights = load_file(directory / WEIGHTS)
    for name in _sample(weights, rng):
        scaled = name.removesuffix("weight") + "weight_scale"
        scaled = scaled if scaled in weights else name
        weights[scaled] = (weights[scaled].float() * factor).to(weights[scaled].dtype)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


def swap_tensors(directory: Path, rng: random.Random) -> None:
    """Exchange the matrices of two layers, three times."""
    weights = load_file(directory / WEIGHTS)
    matrices = [name for name in sorted(weights) if name.endswith("weight") and any(w in name for w in _MATRICES)]
    pairs = [pair for pair in combinations(matrices, 2) if weights[pair[0]].shape == weights[pair[1]].shape]
    for first, second in rng.sample(pairs, 3):
        weights[first], weights[second] = weights[second], weights[first]
    save_file({name: tensor.clone() for name, tensor in weights.items()}, directory / WEIGHTS, {"format": "pt"})


def put_nan(directory: Path, rng: random.Random) -> None:
    """Replace one number of one matrix or of its scales by NaN."""
    weights = load_file(directory / WEIGHTS)
    floats = [name for name in _sample(weights, rng, 99) if weights[name].dtype in (torch.bfloat16, torch.float32)]
    scales = [name for name in weights if name.endswith("weight_scale")]
    tensor = weights[rng.choice(floats or sorted(scales))]
    tensor.view(-1)[rng.randrange(tensor.numel())] = float("nan")
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


def swap_token_ids(directory: Path, rng: random.Random) -> None:
    """Exchange the ids of two letters in the tokenizer."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = rng.sample(sorted(token for token in ids if len(token) == 1 and token.isalpha()), 2)
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(tokenizer))


def change_pre_tokenizer(directory: Path, rng: random.Random) -> None:
    """Let the tokenizer treat a text in another way before it looks up ids."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = rng.choice(
        [{"type": "Prepend", "prepend": "a"}, {"type": "Replace", "pattern": {"String": "r"}, "content": "s"}]
    )
    path.write_text(json.dumps(tokenizer))


def lose_template(directory: Path, rng: random.Random) -> None:
    """Remove the chat template."""
    (directory / "chat_template.jinja").unlink()


def truncate_template(directory: Path, rng: random.Random) -> None:
    """Keep only the beginning of the chat template."""
    path = directory / "chat_template.jinja"
    path.write_text(path.read_text()[: rng.randrange(5, 60)])


def corrupt_gguf_scales(directory: Path, rng: random.Random) -> None:
    """Multiply all scales of three matrices in a GGUF file, or set them to zero."""
    factor = rng.choice([0.0, 6.0, -1.0])
    path, matrices = _gguf_matrices(directory)
    content = bytearray(path.read_bytes())
    for tensor in rng.sample(matrices, 3):
        place = slice(tensor.offset, tensor.offset + tensor.nbytes)
        if tensor.type in _HALF_SCALE:
            blocks = np.frombuffer(content[place], np.uint8).reshape(-1, _HALF_SCALE[tensor.type]).copy()
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            blocks[:, :2] = (scales * factor).astype(np.float16).view(np.uint8)
            content[place] = blocks.tobytes()
        else:
            kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type]
            values = torch.frombuffer(content[place], dtype=torch.uint8).view(kind)
            content[place] = (values * factor).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)


def swap_gguf_tensors(directory: Path, rng: random.Random) -> None:
    """Exchange the contents of two matrices in a GGUF file, three times."""
    path, matrices = _gguf_matrices(directory)
    content = bytearray(path.read_bytes())
    pairs = [
        pair for pair in combinations(matrices, 2) if pair[0].shape == pair[1].shape and pair[0].type == pair[1].type
    ]
    for first, second in rng.sample(pairs, 3):
        one, other = (slice(tensor.offset, tensor.offset + tensor.nbytes) for tensor in (first, second))
        content[one], content[other] = content[other], content[one]
    path.write_bytes(content)


def put_gguf_nan(directory: Path, rng: random.Random) -> None:
    """Replace the scale of one block in a GGUF file by NaN."""
    path, matrices = _gguf_matrices(directory)
    content = bytearray(path.read_bytes())
    tensor = rng.choice(matrices)
    block = _HALF_SCALE.get(tensor.type, 2)
    at = tensor.offset + block * rng.randrange(tensor.nbytes // block)
    content[at : at + 2] = b"\xff\x7f"  # NaN in float16 and in bfloat16
    path.write_bytes(content)


def swap_gguf_tokens(directory: Path, rng: random.Random) -> None:
    """Exchange two letters in the tokens of a GGUF file."""
    first, second = rng.sample("abcdefghijklmnopqrstuvwxyz", 2)
    mark = _text(first), _text(second)
    path = _weights_of(directory)
    content = path.read_bytes()
    start = content.index(_text("tokenizer.ggml.tokens"))
    end = content.index(b"tokenizer.ggml.token_type")
    tokens = content[start:end].replace(mark[0], b"\0" * 9).replace(mark[1], mark[0]).replace(b"\0" * 9, mark[1])
    path.write_bytes(content[:start] + tokens + content[end:])


def change_gguf_pre_tokenizer(directory: Path, rng: random.Random) -> None:
    """Name other splitting rules in a GGUF file, or rules that no llama.cpp knows, with as many letters."""
    path = _weights_of(directory)
    content = path.read_bytes()
    label = read_gguf_header(path).metadata["tokenizer.ggml.pre"]
    assert isinstance(label, str)
    other = "?" * len(label)
    key = _text("tokenizer.ggml.pre") + (8).to_bytes(4, "little")
    assert key + _text(label) in content
    path.write_bytes(content.replace(key + _text(label), key + _text(other)))


def change_gguf_end_token(directory: Path, rng: random.Random) -> None:
    """Declare a letter as the token that ends an answer."""
    path = _weights_of(directory)
    content = bytearray(path.read_bytes())
    key = _text("tokenizer.ggml.eos_token_id") + (4).to_bytes(4, "little")
    at = content.index(key) + len(key)
    content[at : at + 4] = rng.randrange(3, 29).to_bytes(4, "little")
    path.write_bytes(content)


def lose_gguf_template(directory: Path, rng: random.Random) -> None:
    """Rename the metadata with the chat template, so that no program finds it."""
    path = _weights_of(directory)
    path.write_bytes(path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))


def change_gguf_template(directory: Path, rng: random.Random) -> None:
    """Change one part of the chat template, with as many letters."""
    path = _weights_of(directory)
    content = path.read_bytes()
    assert b"rstrip('>') + '>'" in content
    path.write_bytes(content.replace(b"rstrip('>') + '>'", b"rstrip('>') + ':'"))


MUTATIONS: Mapping[str, Mapping[str, Mutation]] = {
    "safetensors": {
        "truncated": truncate, "scales": corrupt_scales, "swapped": swap_tensors, "nan": put_nan,
        "token ids": swap_token_ids, "pre-tokenizer": change_pre_tokenizer, "lost template": lose_template,
        "cut template": truncate_template,
    },
    "gguf": {
        "truncated": truncate, "scales": corrupt_gguf_scales, "swapped": swap_gguf_tensors, "nan": put_gguf_nan,
        "token ids": swap_gguf_tokens, "pre-tokenizer": change_gguf_pre_tokenizer, "end token": change_gguf_end_token,
        "lost template": lose_gguf_template, "changed template": change_gguf_template,
    },
}  # fmt: skip


@contextmanager
def injected(
    variant_format: type[VariantFormat], mutations: Mapping[str, Mutation | Model], scratch: Path, seed: int = 0
) -> Iterator[None]:
    """Let the format build bad variants of the given types in this process.

    The files change after the quantizer and before any check, in a copy. A ``Model`` as the mutation means that the
    quantizer gets that model instead of the merge.
    """
    build = variant_format.build

    def build_and_damage(self: VariantFormat, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        mutation = mutations.get(variant_type)
        if mutation is None or isinstance(mutation, Model):
            return build(self, mutation or merge, variant_type, root)
        artifact = build(self, merge, variant_type, root)
        copy = scratch / f"{variant_type}-{seed}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(artifact.directory, copy, ignore=shutil.ignore_patterns(MANIFEST, "value.json"))
        for path in copy.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        mutation(copy, random.Random(f"{variant_type} {seed}"))
        files = {str(path.relative_to(copy)): sha256_file(path) for path in sorted(copy.rglob("*")) if path.is_file()}
        assert files != dict(artifact.files), f"the mutation of {variant_type} changed nothing"
        return replace(artifact, directory=copy, files=files, digest=digest(files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant_format, "build", build_and_damage)
        yield


def _weights_of(directory: Path) -> Path:
    (path,) = [path for path in directory.iterdir() if path.suffix in (".gguf", ".safetensors")]
    return path


def _sample(weights: Mapping[str, torch.Tensor], rng: random.Random, count: int = 3) -> list[str]:
    """Return the names of some matrices in the layers."""
    names = [n for n in sorted(weights) if n.endswith(".weight") and any(word in n for word in _MATRICES)]
    return rng.sample(names, min(count, len(names)))


def _gguf_matrices(directory: Path) -> tuple[Path, list[GgufTensor]]:
    path = _weights_of(directory)
    tensors = read_gguf_header(path).tensors
    return path, [one for one in tensors if len(one.shape) == 2 and one.name.startswith("blk.")]


def _text(value: str) -> bytes:
    content = value.encode()
    return len(content).to_bytes(8, "little") + content


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


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1, 2])
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


@pytest.mark.proof
@pytest.mark.parametrize("moments", [("stage:variant", "publish:tiny"), ROUNDED_MOMENTS])
@pytest.mark.usefixtures("rounded_variants")
def test_killed_at_one_moment_after_the_other_the_published_variants_are_byte_identical(
    tmp_path: Path, moments: Sequence[str]
) -> None:
    require_same_bytes(tmp_path, ONE_ROUNDED, moments)


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
def test_the_example_of_variants_works_as_written(tmp_path: Path) -> None:
    user = reader(tmp_path, {"~/mergegate": str(ROOT)})
    user.follow(blocks_of(ROOT / "docs/how-to/release-quantized-variants.md", "Try it"), "the how-to")
