"""The real vLLM reads the two pictures of the smoke test.

The model is a tiny Idefics 3, the family of SmolVLM. Without torchvision, vLLM 0.32 on a CPU cannot import the classes
of LLaVA, Gemma 3, Qwen2-VL, InternVL, Mistral 3 and PaliGemma.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from real_server import PROJECT, real_server
from tiny_kinds import PICTURE_SIZE, letter_tokenizer
from variants import model_in

from mergegate.tasks.serve.launch import PYTHON, find_server
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.smoke import SmokeSetup, smoke_checkpoint

pytestmark = real_server

SETTINGS = ServeSettings(
    python=PROJECT / PYTHON,
    environment={"OMP_NUM_THREADS": "1"},
    max_model_len=512,
    prompts=("two cats sit", "a dog runs away"),
    texts=("two cats sit on a mat",),
    max_tokens=8,
)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def idefics(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    tokenizer = letter_tokenizer()
    markers = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    text = {
        **SIZES,
        "model_type": "llama",
        "head_dim": 32,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    vision = {**SIZES, "image_size": PICTURE_SIZE, "patch_size": 14}
    network = transformers.Idefics3ForConditionalGeneration(
        transformers.Idefics3Config(
            text_config=text, vision_config=vision, image_token_id=5, scale_factor=2, pad_token_id=0
        )
    )
    network.generation_config.eos_token_id = [2, 9]
    edge = {"longest_edge": PICTURE_SIZE}
    images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    directory = tmp_path / "idefics"
    for part in (network, processor, tokenizer):
        part.save_pretrained(str(directory))
    return directory


def test_vllm_reads_two_pictures(idefics: Path, tmp_path: Path) -> None:
    setup = SmokeSetup(find_server(SETTINGS, PROJECT), "cpu", tmp_path / "server.log")
    verdict = smoke_checkpoint(model_in(idefics), SETTINGS, setup)
    outcomes = {check.name: check.outcome for check in verdict.checks}
    assert outcomes["two pictures"] == outcomes["parity"] == "pass", verdict.failures
    assert verdict.outcome == "pass", verdict.failures
