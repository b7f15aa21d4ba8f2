"""A stand-in for the package ``vllm`` that lm-eval's own vLLM class drives. It computes with transformers.

Its outputs have the attributes of vLLM's ``RequestOutput`` and ``CompletionOutput`` (version 0.32). ``finish_reason``
is ``length`` at ``max_tokens`` or at the end of the context, and ``stop`` in all other cases. ``stop_reason`` is the
stop string, or None for the model's own end token.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.32.0"

_ENGINE = """
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, max_tokens=16, stop=(), temperature=1.0, **settings):
        self.max_tokens, self.stop = max_tokens, list(stop or ())


class TokensPrompt(dict):
    pass


class LLM:
    def __init__(self, model, max_model_len=None, **arguments):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        length = max_model_len or self.network.config.max_position_embeddings
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))

    def generate(self, prompts, sampling_params, use_tqdm=True, lora_request=None):
        return [self._answer(each["prompt_token_ids"], how) for each, how in zip(prompts, sampling_params, strict=True)]

    def _answer(self, prompt, how):
        import torch

        room = self.llm_engine.model_config.max_model_len - len(prompt)
        with torch.no_grad():
            new = self.network.generate(
                torch.tensor([prompt]), max_new_tokens=min(how.max_tokens, room), do_sample=False, pad_token_id=0
            )[0, len(prompt):].tolist()
        reason, by = "length", None
        if new[-1] == self.tokenizer.eos_token_id:
            reason = "stop"
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        for string in how.stop:
            if string in text:
                reason, by, text = "stop", string, text.split(string)[0]
        answer = SimpleNamespace(text=text, token_ids=new, finish_reason=reason, stop_reason=by)
        return SimpleNamespace(outputs=[answer], prompt_token_ids=list(prompt))
"""
_FILES = {
    "vllm/__init__.py": _ENGINE,
    "vllm/lora/__init__.py": "",
    "vllm/lora/request.py": "class LoRARequest: ...\n",
    "vllm/renderers/__init__.py": "",
    "vllm/renderers/hf.py": "def resolve_chat_template(**_): ...\n",
    "vllm/tokenizers.py": (
        "def get_tokenizer(name, trust_remote_code=False, **_):\n"
        "    from transformers import AutoTokenizer\n"
        "    return AutoTokenizer.from_pretrained(name)\n"
    ),
    f"vllm-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n",
}


def write_vllm(site: Path) -> None:
    """Write the package and its metadata into a directory of the import path."""
    for name, text in _FILES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
