"""Two layouts that transformers writes of one model merge to the same numbers, in the donor's layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import mixtures
import pytest
import torch
from family import open_models
from hypothesis import given
from hypothesis import strategies as st
from mixtures import FAMILIES, build, logits, related, save
from safetensors.torch import load_file, save_file
from samples import sampled
from test_quantised import scaled

from mergegate import merge_core
from mergegate.merge_core.architecture.experts import disk_name, split_experts
from mergegate.merge_core.checkpoint import BY_CODE, Checkpoint, StoredTensor, render_header
from mergegate.merge_core.engine import EngineSettings
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import InputMeasurements

# Families with per-expert and fused names; the others write fused experts in both layouts.
IN_TWO_LAYOUTS = ("mixtral", "qwen3_moe", "glm4_moe", "lfm2_moe", "phimoe", "granitemoe")
METHODS = sorted(merge_core.merge_methods())
# ``family_trials.try_experts`` merges all families with experts in both layouts.
SAMPLE = sampled(FAMILIES, ("mixtral", "gpt_oss"), pytest.mark.proof)
Parents = Callable[[str], Path]


@pytest.fixture(scope="session")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Parents:
    """Return a function that writes ``base``, ``a`` and ``b`` of a family as on disk, and as in memory: ``a-fused``."""
    root = tmp_path_factory.mktemp("parents")

    @cache
    def write(family: str) -> Path:
        base = build(family)
        for name, model in {"base": base, "a": related(base, 1), "b": related(base, 2)}.items():
            save(model, root / family / name)
            save(model, root / family / f"{name}-fused", fused=True)
        return root / family

    return write


def recipe_of(method: str, names: tuple[str, str, str]) -> str:
    base, a, b = names
    needs = {parameter.name for parameter in merge_core.merge_methods()[method].parameters}
    values = {"weight": 0.6, "density": 0.5, "t": 0.3, "epsilon": 0.1, "select_topk": 0.5, "scale": 0.5, "rate": 0.01}
    given = ", ".join(f"{name}: {value}" for name, value in values.items() if name in needs)
    low, high = merge_core.merge_methods()[method].models
    models = [a, b][: high or 2] if low < 3 else [base, a, b]
    if merge_core.merge_methods()[method].base == "donor" and high == 2:
        models = [base, a]
    own = ", text: own" if merge_core.merge_methods()[method].traits.reads_text else ""
    listed = ", ".join(f"{{model: {name}{own}}}" for name in models)
    kind = merge_core.merge_methods()[method].base
    head = f"base_model: {base}\n" if kind != "ordinary" else ""
    return f"merge_method: {method}\n{head}models: [{listed}]\n" + (f"parameters: {{{given}}}\n" if given else "")


def merged(root: Path, recipe: str, out: Path, *, seed: int = 3, **settings: object) -> dict[str, torch.Tensor]:
    loaded = merge_core.load_recipe(recipe)
    if loaded.needs_distances:
        loaded = replace(loaded, distances={})
    if loaded.texts:  # Without measurements, every tensor is the mean.
        loaded = replace(loaded, measured={str(ref): InputMeasurements("none", "none", {}) for ref in loaded.texts})
    merge_core.merge_weights(
        merge_core.plan_merge(loaded, open_models(loaded, root)), out, seed=seed, settings=EngineSettings(**settings)
    )
    return {name: tensor for file in sorted(out.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def in_memory(directory: Path) -> dict[str, torch.Tensor]:
    return dict(mixtures.load(directory).state_dict())


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


@pytest.mark.parametrize("method", sampled(METHODS, ("slerp", "ties"), pytest.mark.proof))
def test_both_layouts_merge_to_the_same_numbers(parents: Parents, tmp_path: Path, method: str) -> None:
    merged(parents("mixtral"), recipe_of(method, ("base", "a", "b")), tmp_path / "single")
    merged(parents("mixtral"), recipe_of(method, ("base-fused", "a-fused", "b-fused")), tmp_path / "fused")
    assert_same(in_memory(tmp_path / "single"), in_memory(tmp_path / "fused"))


@pytest.mark.parametrize("family", sampled(IN_TWO_LAYOUTS, ("mixtral",), pytest.mark.proof))
def test_parents_in_two_layouts_merge_into_that_of_the_donor(parents: Parents, tmp_path: Path, family: str) -> None:
    home = parents(family)
    expected = merged(home, recipe_of("dare_ties", ("base", "a", "b")), tmp_path / "single")
    mixed = merged(home, recipe_of("dare_ties", ("base", "a-fused", "b")), tmp_path / "mixed")
    assert_same(expected, mixed)
    fused = merged(home, recipe_of("dare_ties", ("base-fused", "a", "b-fused")), tmp_path / "fused")
    assert fused.keys() == load_file(home / "base-fused/model.safetensors").keys() != expected.keys()
    assert_same(in_memory(tmp_path / "single"), in_memory(tmp_path / "fused"))


@pytest.mark.parametrize("family", SAMPLE)
def test_a_fused_layout_is_preserved(parents: Parents, tmp_path: Path, family: str) -> None:
    home = parents(family)
    merged(home, "merge_method: passthrough\nmodels: [{model: a-fused}]", tmp_path / "out")
    assert_same(load_file(home / "a-fused/model.safetensors"), load_file(tmp_path / "out/model.safetensors"))
    assert torch.equal(logits(mixtures.load(tmp_path / "out")), logits(mixtures.load(home / "a")))


@pytest.mark.parametrize("family", SAMPLE)
def test_a_linear_merge_equals_averaging_in_memory(parents: Parents, tmp_path: Path, family: str) -> None:
    home = parents(family)
    models = "[{model: a-fused, parameters: {weight: 0.25}}, {model: b, parameters: {weight: 0.75}}]"
    text = f"merge_method: linear\nmodels: {models}"
    merged(home, text, tmp_path / "out")
    model = mixtures.load(home / "a")
    one, other = model.state_dict(), mixtures.load(home / "b").state_dict()
    model.load_state_dict({name: 0.25 * one[name] + 0.75 * other[name] for name in one})
    assert torch.equal(logits(mixtures.load(tmp_path / "out")), logits(model))


@pytest.mark.story
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_computed_fused_tensors_are_split_too(parents: Parents, tmp_path: Path, family: str) -> None:
    """A model with an adapter on its fused experts has such tensors."""
    recipe = merge_core.load_recipe(recipe_of("ties", ("base", "a-fused", "b-fused")))
    opened = open_models(recipe, parents(family))
    one = opened["a-fused"]
    computed = merge_core.plan_merge(recipe, {**opened, "a-fused": scaled(one, 2.0)})
    found = merge_core.merge_weights(computed, tmp_path / "computed", settings=EngineSettings(block_elements=64))
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice/config.json").write_text((one.directory / "config.json").read_text())
    weights = {name: 2 * tensor for name, tensor in load_file(one.directory / "model.safetensors").items()}
    save_file(weights, tmp_path / "twice/model.safetensors")
    stored = merge_core.plan_merge(recipe, {**opened, "a-fused": merge_core.open_checkpoint(tmp_path / "twice")})
    assert found.files == merge_core.merge_weights(stored, tmp_path / "stored").files


@pytest.mark.parametrize("family", SAMPLE)
def test_the_pieces_of_a_fused_tensor_cover_every_byte(parents: Parents, family: str) -> None:
    checkpoint = merge_core.open_checkpoint(parents(family) / "a-fused")
    table = split_experts(checkpoint)
    assert split_experts(table).tensors.keys() == table.tensors.keys()
    found: dict[str, list[StoredTensor]] = {}
    for tensor in table.tensors.values():
        found.setdefault(disk_name(tensor), []).append(tensor)
    assert found.keys() == checkpoint.tensors.keys()
    for name, pieces in found.items():
        whole = checkpoint.tensors[name]
        assert pieces[0].offset == whole.offset
        assert all(one.offset + one.nbytes == next_.offset for one, next_ in pairwise(pieces))
        assert pieces[-1].offset + pieces[-1].nbytes == whole.offset + whole.nbytes
    assert any(len(pieces) >= mixtures.EXPERTS for pieces in found.values())


@pytest.mark.story
def test_a_killed_merge_resumes_within_a_fused_tensor(parents: Parents, tmp_path: Path) -> None:
    home = parents("qwen3_moe")
    recipe = merge_core.load_recipe(recipe_of("ties", ("base-fused", "a", "b-fused")))
    opened = open_models(recipe, home)
    plan = merge_core.plan_merge(recipe, opened)

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_core.merge_weights(plan, tmp_path / "out", before_sealing=killed)
    (journal,) = (tmp_path / "out").glob("*.journal.partial")
    lines = journal.read_bytes().splitlines(keepends=True)
    pieces = [at for at, line in enumerate(lines) if b".experts." in line]
    # Some experts of a tensor are finished, others are not.
    journal.write_bytes(b"".join(lines[: pieces[len(pieces) // 2]]))
    record = merge_core.merge_weights(plan, tmp_path / "out")
    assert 0 < record.bytes_resumed < record.bytes_written
    assert record.files == merge_core.merge_weights(plan, tmp_path / "fresh").files


def test_a_stack_is_written_in_the_layout_of_its_donor(parents: Parents, tmp_path: Path) -> None:
    cuts = "[{sources: [{model: a-fused, layer_range: [0, 2]}]}, {sources: [{model: b, layer_range: [0, 2]}]}]"
    tensors = merged(parents("mixtral"), f"merge_method: passthrough\nslices: {cuts}", tmp_path / "out")
    last = load_file(parents("mixtral") / "b-fused/model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(tensors["model.layers.3.mlp.experts.gate_up_proj"], last)
    mixtures.load(tmp_path / "out")


def test_a_step_passes_its_layout_on(parents: Parents, tmp_path: Path) -> None:
    text = (
        "name: first\nmerge_method: linear\nmodels: [{model: a-fused}, {model: b}]\nparameters: {weight: 1}\n---\n"
        "merge_method: linear\nmodels: [{model: first}, {model: base}]\nparameters: {weight: 1}\n"
    )
    tensors = merged(parents("qwen3_moe"), text, tmp_path / "out")
    assert tensors.keys() == load_file(parents("qwen3_moe") / "a-fused/model.safetensors").keys()
    mixtures.load(tmp_path / "out")


def test_a_filter_means_the_same_in_both_layouts(parents: Parents, tmp_path: Path) -> None:
    values = "{weight: [{filter: experts.1.w1, value: 0}, {filter: w2, value: 0.2}, {value: 0.7}]}"
    text = "merge_method: task_arithmetic\nbase_model: {0}\nmodels: [{{model: {1}, parameters: {2}}}]\n"
    merged(parents("mixtral"), text.format("base", "a", values), tmp_path / "single")
    merged(parents("mixtral"), text.format("base-fused", "a-fused", values), tmp_path / "fused")
    assert_same(in_memory(tmp_path / "single"), in_memory(tmp_path / "fused"))


@pytest.mark.parametrize("word", ["gate_up_proj", "mlp.experts", "layers.1.mlp"])
def test_a_filter_that_only_names_the_fused_layout_is_refused(parents: Parents, word: str) -> None:
    values = f"{{weight: [{{filter: {word}, value: 0}}, {{value: 1}}]}}"
    text = f"merge_method: linear\nmodels: [{{model: a-fused}}, {{model: b-fused}}]\nparameters: {values}"
    recipe = merge_core.load_recipe(text)
    opened = open_models(recipe, parents("mixtral"))
    with pytest.raises(InvalidInput, match=r"block_sparse_moe\.") as refusal:
        merge_core.plan_merge(recipe, opened)
    assert word in refusal.value.found
    assert merge_core.plan_with_findings(recipe, opened).blocking


@given(
    experts=st.integers(1, 5), hidden=st.integers(1, 6), wide=st.integers(1, 6), transposed=st.booleans(),
)  # fmt: skip
def test_shapes_alone_distinguish_the_two_layouts(experts: int, hidden: int, wide: int, transposed: bool) -> None:
    """This holds for any sizes, even if the hidden size equals that of both projections together."""
    up, down = (experts, 2 * wide, hidden), (experts, hidden, wide)
    if transposed:
        up, down = (experts, hidden, 2 * wide), (experts, wide, hidden)
    one = StoredTensor("model.layers.0.mlp.experts.gate_up_proj", Path("f"), BY_CODE["F32"], up, 8)
    two = replace(one, name="model.layers.0.mlp.experts.down_proj", shape=down, offset=8 + one.nbytes)
    table = split_experts(Checkpoint(Path("x"), {}, {one.name: one, two.name: two})).tensors
    assert len(table) == (2 if transposed else 3) * experts
    first = next(iter(table.values()))
    assert first.shape == ((hidden, 2 * wide) if transposed else (wide, hidden))


EXPERTS, WIDE, HIDDEN = 128, 4096, 4096  # In bfloat16, the gate and up projections take 8.6 GB.
MERGE = r"""
import re
from pathlib import Path
from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
recipe = load_recipe({"merge_method": "linear", "models": [{"model": n, "parameters": {"weight": 1}} for n in "ab"]})
plan = plan_merge(recipe, {name: open_checkpoint(Path(name)) for name in "ab"})
assert len(plan.jobs) == 128, len(plan.jobs)
merge_weights(plan, Path("out"))
# Not ru_maxrss: that begins with what whoever started this process had in use.
print(int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024, plan.bytes_written)
"""


def sparse(directory: Path) -> None:
    """Write a config and a sparse weights file whose experts are holes, which read as zeros."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "qwen3_moe"}))
    module = "model.layers.0.mlp.experts"
    shapes = {f"{module}.gate_up_proj": (EXPERTS, 2 * WIDE, HIDDEN)}
    sizes = [(name, "BF16", shape, 2 * shape[0] * shape[1] * shape[2]) for name, shape in shapes.items()]
    header = render_header(sizes, {"format": "pt"})
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size for *_, size in sizes))


@pytest.mark.proof
def test_a_fused_tensor_of_8_gb_takes_less_than_1_gib(tmp_path: Path) -> None:
    for name in "ab":
        sparse(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", MERGE], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, written = map(int, done.stdout.split())
    (tmp_path / "out/model.safetensors").unlink()
    assert written > 8 << 30
    assert peak < 1 << 30
