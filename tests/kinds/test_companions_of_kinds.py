"""The library that loads the parents of a merge loads the merge in the same way, for models of every kind.

The oracle is the library itself, with state dicts merged in memory. Then each setting and file of a parent is changed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_kinds
import torch
import transformers
from garbage import with_value
from samples import sampled

from mergegate.merge_core import PlannedMerge, load_recipe, merge_weights, open_checkpoint, plan_with_findings
from mergegate.merge_core.architecture import kind_of_directory
from mergegate.merge_core.checkpoint import companion_kind, list_companions
from mergegate.merge_core.errors import InvalidInput, finding_of

WEIGHTS = (0.3, 0.7)
LINEAR = "merge_method: linear\nmodels:\n" + "".join(
    f"  - {{model: {name}, parameters: {{weight: {weight}}}}}\n" for name, weight in zip("ab", WEIGHTS, strict=True)
)
SENTENCES = ["w1 w2 w3", "w4 w5 . w6 w7 w8", "passage : w9"]
PROCESSORS = ("AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor", "AutoTokenizer")


def plan(root: Path) -> PlannedMerge:
    """Plan the merge. A parent that cannot be opened is a blocking finding."""
    try:
        return plan_with_findings(load_recipe(LINEAR), {name: open_checkpoint(root / name) for name in "ab"})
    except InvalidInput as error:
        return PlannedMerge((finding_of(error),), None)


SAMPLE = ("bert embedding", "whisper")
KINDS = sampled(tiny_kinds.KINDS, SAMPLE, pytest.mark.proof)
KIND_NAMES = {
    "text generator": ("text generator",),
    "embedding": ("bert embedding", "modernbert embedding", "qwen3 embedding", "sparse encoder"),
    "cross-encoder": ("cross-encoder", "older cross-encoder", "reranker without modules"),
    "vision-language": tiny_kinds.VISION_LANGUAGE,
    "speech": ("whisper", "wav2vec2", "audio language model"),
    "sequence-to-sequence": ("t5", "bart"),
    "classifier": ("sequence classifier", "token classifier"),
    "other": ("masked language model", "bare encoder", "clip"),
}


@pytest.mark.parametrize("name", sampled(tiny_kinds.KINDS, (*SAMPLE, "llava", "t5", "token classifier", "clip")))
def test_tiny_models_have_their_kind(name: str, tmp_path: Path) -> None:
    kind = kind_of_directory(tiny_kinds.write(name, tmp_path / "model"))
    assert name in KIND_NAMES[kind.name]


@pytest.fixture(scope="module", params=KINDS)
def merged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the parents ``a`` and ``b`` of one kind, and their merge ``out``."""
    root = tmp_path_factory.mktemp("kind")
    tiny_kinds.pair(request.param, root)
    planned = plan(root)
    assert [finding for finding in planned.findings if finding.severity != "info"] == []
    assert planned.plan is not None
    merge_weights(planned.plan, root / "out", device="cpu")
    return root


def load_network(directory: Path) -> Any:
    """Load a model with the class that its kind names."""
    loader = kind_of_directory(directory).loader
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(transformers, loader):
            return getattr(transformers, loader).from_pretrained(directory, dtype="auto").eval()
        import sentence_transformers

        return getattr(sentence_transformers, loader)(str(directory), device="cpu").eval()


def load_processors(directory: Path) -> dict[str, Any]:
    """Return each processor of transformers that loads without further packages, by the class that loads it."""
    found = {}
    for loader in PROCESSORS:
        try:
            found[loader] = getattr(transformers, loader).from_pretrained(directory)
        except (ImportError, OSError, ValueError, KeyError, TypeError):
            continue
    return found


def merge_in_memory(root: Path) -> Any:
    """Return the first parent with the weighted mean of both state dicts."""
    network, other = load_network(root / "a"), load_network(root / "b")
    theirs = other.state_dict()
    # Tied tensors are in the state under each of their names, so compute all means before writing any.
    mean = {
        name: WEIGHTS[0] * tensor.double() + WEIGHTS[1] * theirs[name].double()
        if tensor.is_floating_point()
        else tensor
        for name, tensor in network.state_dict().items()
    }
    network.load_state_dict(mean)
    return network


def pictures() -> list[Any]:
    from PIL import Image

    generator = np.random.default_rng(0)
    size = (tiny_kinds.PICTURE_SIZE, 2 * tiny_kinds.PICTURE_SIZE, 3)
    return [Image.fromarray(generator.integers(0, 255, size, dtype=np.uint8)) for _ in range(2)]


def sound() -> Any:
    return np.random.default_rng(0).normal(size=8000).astype(np.float32)


def processed(processors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what the processors make of the same text, pictures and sound."""
    outputs: dict[str, torch.Tensor] = {}
    text = "<|im_start|>user\nw1 W2<|im_end|>\n"
    for loader, processor in processors.items():
        images = getattr(processor, "image_processor", processor if loader == "AutoImageProcessor" else None)
        features = getattr(processor, "feature_extractor", processor if loader == "AutoFeatureExtractor" else None)
        tokens = getattr(processor, "tokenizer", processor if loader == "AutoTokenizer" else None)
        if images is not None:
            outputs |= {f"{loader} {key}": value for key, value in images(pictures(), return_tensors="pt").items()}
        if features is not None:
            values = features(sound(), sampling_rate=16000, return_tensors="pt")
            outputs |= {f"{loader} {key}": value for key, value in values.items()}
        if tokens is not None:
            outputs[f"{loader} ids"] = torch.tensor(tokens(text)["input_ids"])
            if tokens.chat_template:
                chat = [{"role": "user", "content": "w1"}]
                outputs[f"{loader} chat"] = torch.tensor(
                    tokens(tokens.apply_chat_template(chat, tokenize=False))["input_ids"]
                )
    return outputs


def run_network(network: Any, processors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the outputs of a model on fixed inputs."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(network, "predict"):
            return {"scores": torch.as_tensor(network.predict([(SENTENCES[0], text) for text in SENTENCES]))}
        if hasattr(network, "encode"):
            outputs = {"": network.encode(SENTENCES, convert_to_tensor=True)}
            for name in network.prompts:
                outputs[name] = network.encode(SENTENCES, prompt_name=name, convert_to_tensor=True)
            return {name: tensor.to_dense() for name, tensor in outputs.items()}
        output = network(**network_inputs(network, processors))
        names = ("logits", "logits_per_image", "last_hidden_state")
        return {"logits": next(output[name] for name in names if getattr(output, name, None) is not None)}


def network_inputs(network: Any, processors: dict[str, Any]) -> dict[str, Any]:
    """Return inputs of a model of transformers: pictures and sound if its processor loads, and always text."""
    processor = processors.get("AutoProcessor")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(11, 40, (2, 9), generator=generator)
    if network.main_input_name == "input_features":
        features = processor.feature_extractor(sound(), sampling_rate=16000, return_tensors="pt")
        return {"input_features": features["input_features"], "decoder_input_ids": ids[:1]}
    if network.main_input_name == "input_values":
        return {"input_values": torch.as_tensor(sound()[None])}
    if network.config.model_type == "clip":
        return dict(processor(text=["w", "w1"], images=pictures(), return_tensors="pt", padding=True))
    if network.config.model_type in ("llava", "gemma3"):
        picture = {"llava": "<image>", "gemma3": "<|vision_start|>"}[network.config.model_type]
        return dict(
            processor(text=[f"{picture} w", f"{picture} x"], images=[[one] for one in pictures()], return_tensors="pt")
        )
    if network.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    return {"input_ids": ids}


@pytest.mark.story
def test_the_library_loads_the_merge_as_it_loads_the_parents(merged: Path) -> None:
    expected, network = merge_in_memory(merged), load_network(merged / "out")
    assert kind_of_directory(merged / "out") == kind_of_directory(merged / "a")
    assert type(network) is type(expected)
    assert str(network) == str(expected)
    if hasattr(network, "get_model_kwargs"):
        assert network.prompts == expected.prompts
        assert network.max_seq_length == expected.max_seq_length
        assert getattr(network, "similarity_fn_name", None) == getattr(expected, "similarity_fn_name", None)
    if getattr(network, "generation_config", None) is not None:
        assert network.generation_config.to_dict() == expected.generation_config.to_dict()
    states = [model.state_dict() for model in (network, expected)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[1].items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-6, atol=1e-7, msg=name)

    processors = load_processors(merged / "out")
    parents = load_processors(merged / "a")
    assert {name: type(one) for name, one in processors.items()} == {name: type(one) for name, one in parents.items()}
    own, others = processed(processors), processed(parents)
    assert own.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in own.items())

    outputs, references = run_network(network, processors), run_network(expected, parents)
    first = run_network(load_network(merged / "a"), parents)
    assert outputs.keys() == references.keys()
    for name, tensor in references.items():
        torch.testing.assert_close(outputs[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert any(not torch.allclose(tensor, first[name], rtol=1e-4, atol=1e-5) for name, tensor in references.items())
    modalities = kind_of_directory(merged / "a").modalities
    assert not modalities or any(key.endswith(("pixel_values", "input_features", "input_values")) for key in own)


def settings_of(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each setting in a JSON object. Lists count as one setting."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from settings_of(value, (*path, key))
        else:
            yield (*path, key)


def with_other_value(content: Any, path: tuple[str, ...]) -> Any:
    inner = content
    for key in path:
        inner = inner[key]
    return with_value(content, path, other_value(inner))


def other_value(value: Any) -> Any:
    """Return a value of the same form that means something else."""
    match value:
        case None:
            return 7
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [other_value(value[0]), *value[1:]] if value else [3]
        case _:
            return {"other": 1}


# Settings that record where a file came from, or choose the form of a processor's output, but not what the model sees.
# Other checks compare token ids, by the tokens that they stand for.
WITHOUT_EFFECT = {
    "modules.json": {"idx", "name"},
    "config_sentence_transformers.json": {"pytorch", "sentence_transformers", "transformers"},
    "generation_config.json": {"_from_model_config", "transformers_version"},
    "processor_config.json": {"processor_class", "data_format"},
    "preprocessor_config.json": {"processor_class", "data_format"},
}


def changed_files(directory: Path) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield each file of settings with its content, its content with one setting changed, and the setting's name."""
    for name in list_companions(directory):
        if companion_kind(name) not in ("module", "processor", "generation settings") or not name.endswith(".json"):
            continue
        content = json.loads((directory / name).read_text())
        if isinstance(content, list):
            for index, module in enumerate(content):
                for path in settings_of(module):
                    if path[-1] not in WITHOUT_EFFECT[name]:
                        changed = [*content[:index], with_other_value(module, path), *content[index + 1 :]]
                        yield name, content, changed, path[-1]
            yield name, content, content[:-1], "a module"
            continue
        for path in settings_of(content):
            if path[-1] in WITHOUT_EFFECT.get(name, ()) or (
                name == "generation_config.json" and path[-1].endswith("_token_id")
            ):
                continue
            yield name, content, with_other_value(content, path), path[-1]


@pytest.mark.story
def test_every_setting_that_one_parent_changes_is_reported(merged: Path) -> None:
    """Otherwise, the merge would get the setting of one parent silently."""
    unchanged = {finding.where for finding in plan(merged).findings}
    missed = []
    for parent in "ab":
        for name, content, changed, setting in changed_files(merged / parent):
            file = merged / parent / name
            original = file.read_text()
            assert json.loads(original) == content
            file.write_text(json.dumps(changed))
            try:
                if not any(
                    name in f"{one.where} {one.found}" and one.where not in unchanged for one in plan(merged).findings
                ):
                    missed.append((parent, name, setting))
            finally:
                file.write_text(original)
    assert missed == []


@pytest.mark.story
def test_a_file_that_one_parent_lacks_is_reported_or_does_not_change_the_merge(merged: Path, tmp_path: Path) -> None:
    network = load_network(merged / "out")
    for parent in "ab":
        for name in list_companions(merged / parent):
            if companion_kind(name) not in ("module", "processor", "generation settings"):
                continue
            file = merged / parent / name
            content = file.read_bytes()
            file.unlink()
            try:
                planned = plan(merged)
            finally:
                file.write_bytes(content)
            if planned.plan is None or any(name in f"{one.where} {one.found}" for one in planned.findings):
                continue
            if name in planned.plan.companions:
                assert planned.plan.companions.read(name) == content
                continue
            out = tmp_path / parent / name.replace("/", "-")
            merge_weights(planned.plan, out, device="cpu")
            assert str(load_network(out)) == str(network), f"{parent} without {name}"
