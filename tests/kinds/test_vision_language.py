"""Vision-language models are loaded whole, and scored on text as transformers scores them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from safetensors.torch import load_file, save_file
from samples import sampled
from scoring_runs import model_in
from tiny_kinds import VISION_LANGUAGE, write

from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints import LoadedModel, load_model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.backends.hf import wrap_model
from mergegate.tasks.quality.perplexity.measurement import TextWindow, read_batch
from mergegate.tasks.quality.variants.compressed_tensors import CompressedTensorsFormat
from mergegate.tasks.quality.variants.contract import VariantFormat
from mergegate.tasks.quality.variants.gguf import GgufFormat

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


@pytest.fixture(autouse=True)
def _no_models() -> Iterator[None]:
    yield
    unload_models()


FAMILIES = sampled(VISION_LANGUAGE, ["llava"], pytest.mark.proof)


@contextmanager
def loading(directory: Path) -> Iterator[LoadedModel]:
    with load_model(model_in(directory), dtype="float32", device="cpu") as loaded:
        yield loaded


def loaded_directly(directory: Path) -> Any:
    """Return transformers' own class with weights in float64, and check that it reads every tensor."""
    network: Any
    network, info = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return network.eval()


def likelihoods(network: Any, tokens: list[int]) -> torch.Tensor:
    """Return the log-likelihood of each token except the first."""
    with torch.inference_mode():
        logits = network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def requests_with_shared_prefixes(seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)

    def text(length: int) -> str:
        return "".join(rng.choices(LETTERS, k=length))

    examples = text(30)
    shared = [(f"{examples}{text(6)}", text(length)) for length in (1, 4, 4, 9)]
    question = text(25)
    return [*shared, *((question, text(length)) for length in (2, 5, 5)), (text(3), text(2)), (text(70), text(3))]


@pytest.mark.parametrize("family", FAMILIES)
def test_likelihoods_and_answers_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    directory = write(family, tmp_path / family)
    network = loaded_directly(directory)
    requests = requests_with_shared_prefixes(len(family))
    rng = random.Random(1)
    examples = "".join(rng.choices(LETTERS, k=24))
    prompts = [examples + "".join(rng.choices(LETTERS, k=length)) for length in (5, 12, 20)]
    settings = {"until": ["~"], "max_gen_toks": 12}
    with loading(directory) as loaded:
        assert type(loaded.network) is type(network)
        lm = _wrapped(loaded)
        answers = lm.loglikelihood(_instances("loglikelihood", requests), disable_tqdm=True)
        windows = [loaded.tokenizer.encode(prompt) for prompt, _ in sorted(requests, key=lambda pair: -len(pair[0]))]
        rows = read_batch(loaded, [TextWindow(0, 0, window[:-1], window[1:]) for window in windows])
        for (prompt, continuation), (likelihood, _) in zip(requests, answers, strict=True):
            context, target = lm._encode_pair(prompt, continuation)
            expected = likelihoods(network, context + target)[-len(target) :].sum()
            assert likelihood == pytest.approx(float(expected), abs=1e-4)
        asked = _instances("generate_until", [(prompt, settings) for prompt in prompts])
        for prompt, answer in zip(prompts, lm.generate_until(asked, disable_tqdm=True), strict=True):
            tokens = torch.tensor([lm.tok_encode(prompt)])
            mask = {"attention_mask": torch.ones_like(tokens)}
            expected = network.generate(input_ids=tokens, **mask, max_new_tokens=12, do_sample=False)
            assert answer == lm.tok_decode(expected[0, tokens.shape[1] :].tolist()).split("~")[0]
    for window, row in zip(windows, rows, strict=True):  # padded on the right, as perplexity reads texts
        assert torch.allclose(row, likelihoods(network, window), atol=1e-4)


def _wrapped(loaded: LoadedModel) -> Any:
    return wrap_model(loaded, SimpleNamespace(dtype="float32", batch_size=8, max_length=None, own_settings=None))


def _instances(kind: Any, requests: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, request, number) for number, request in enumerate(requests)]


def test_a_class_that_ignores_the_vision_tower_is_refused(tmp_path: Path) -> None:
    directory = write("llama4", tmp_path / "llama4")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Llama4ForCausalLM"]}))
    with pytest.raises(InvalidInput, match=r"does not read .*vision.* more tensors"), loading(directory):
        pass


def test_a_tensor_that_no_part_reads_is_refused(tmp_path: Path) -> None:
    directory = write("llava", tmp_path / "llava")
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "left.over": torch.ones(2)}, directory / "model.safetensors", {"format": "pt"})
    message = r"LlavaForConditionalGeneration does not read .*left\.over"
    with pytest.raises(InvalidInput, match=message), loading(directory):
        pass


@pytest.mark.parametrize(
    ("variants", "reason"),
    [
        (GgufFormat(format="gguf", types=("Q8_0",)), "mmproj"),
        (CompressedTensorsFormat(format="compressed-tensors", scheme="FP8_DYNAMIC"), "drop the other towers"),
    ],
)
def test_variants_that_would_lose_the_pictures_are_refused(
    variants: VariantFormat, reason: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write("gemma3", tmp_path / "gemma3"))
    with pytest.raises(InvalidInput, match=f"a vision-language model, which reads pictures: .*{reason}"):
        variants.check_shapes(checkpoint)


LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@pytest.mark.story
def test_a_chat_template_that_reads_only_lists_renders_a_plain_text(tmp_path: Path) -> None:
    directory = write("llava", tmp_path / "llava")
    (directory / "chat_template.jinja").write_text(LLAVA_TEMPLATE)
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a color."}]
    picture = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which color?"}]}]
    with loading(directory) as loaded:
        lm = _wrapped(loaded)
        lm.chat_template_args = {}
        assert lm.apply_chat_template(plain) == "SYSTEM: Be brief. USER: Name a color. ASSISTANT:"
        assert lm.apply_chat_template(picture) == "USER: <image>\nWhich color? ASSISTANT:"


@pytest.mark.story
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_a_chat_template_that_reads_plain_texts_is_not_changed(family: str, tmp_path: Path) -> None:
    directory = write(family, tmp_path / family)
    template = transformers.AutoTokenizer.from_pretrained(directory).chat_template
    with loading(directory) as loaded:
        assert loaded.tokenizer.chat_template == template
