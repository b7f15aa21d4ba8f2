"""Tiny Llama and Qwen2 checkpoints with a byte-level tokenizer, as safetensors and as GGUF files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.checkpoints import Model, QuantizedModel
from mergegate.tasks.llama_cpp import BACKEND_NAME, runtime_versions

Family = Literal["llama", "qwen2"]
PROJECT = Path(__file__).resolve().parents[2]
TEXT = (PROJECT / "LICENSE").read_text()
TEXTS = [" ".join(TEXT.split()[start : start + 14]) for start in range(0, 560, 14)]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The converter knows published tokenizers by a hash, so the label of the pre-tokenizer is given here.
_CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for directory in sys.argv[2:]:
    sys.argv = ["convert", directory, "--outtype", "f32", "--outfile", directory + ".gguf"]
    runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def make_checkpoint(directory: Path, family: Family) -> Model:
    """Save a random two-layer network in float32. Its rows are divisible by 256, as K-quants require."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[2], pad_token=special[0]
    )
    fast.chat_template = CHAT
    torch.manual_seed(3)
    sizes = {
        "vocab_size": len(fast),
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,  # larger than the default, so that answers differ clearly
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    network = LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    network.save_pretrained(directory)
    fast.save_pretrained(directory)
    digest = sha256_file(directory / "model.safetensors")
    return Model(name=directory.name, digest=digest, directory=directory)


def convert_checkpoints(directories: list[Path], python: Path) -> None:
    """Convert each directory to ``directory.gguf`` in F32, with llama.cpp's own converter."""
    converter = PROJECT / ".venv-gguf" / "llama.cpp"
    command = [str(python), "-c", _CONVERT, str(converter), *map(str, directories)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def as_variant(file: Path, source: Model) -> QuantizedModel:
    """Describe a GGUF file as ``GgufFormat.open`` does."""
    digest = sha256_file(file)
    return QuantizedModel(
        name=file.name,
        digest=digest,
        directory=file.parent,
        files=((file.name, digest),),
        source=source,
        backend=BACKEND_NAME,
        weights=file.name,
        runtime=tuple(sorted(runtime_versions().items())),
    )


def without_chat_template(source: Path, destination: Path) -> Path:
    """Copy a GGUF file with another key in the place of that of its chat template."""
    content = source.read_bytes()
    assert content.count(b"tokenizer.chat_template") == 1
    destination.write_bytes(content.replace(b"tokenizer.chat_template", b"tokenizer.lost_template"))
    return destination
