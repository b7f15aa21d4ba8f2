"""Which chat template the result gets: the donor's, the parents' most common one, a well-known one, or a given text.

The well-known formats are those the peer knows by name; the texts here are our own renderings of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from merge_core.errors import InvalidInput, suggest
from merge_core.parsing import read_json, read_text

FILE = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 1 << 20


def _talk(turn: str, *, start: str = "", prompt: str = "") -> str:
    """A template of one ``turn`` per message, and what invites the model to speak."""
    asking = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    return f"{start}{{% for message in messages %}}{turn}{{% endfor %}}{asking}"


KNOWN = {
    "alpaca": _talk(
        "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
        "{% else %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}",
        prompt="{{ '### Response:\\n' }}",
    ),
    "chatml": _talk(
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}",
        prompt="{{ '<|im_start|>assistant\\n' }}",
    ),
    "exaone": _talk(
        "{{ '[|' + message['role'] + '|]' + message['content'] }}"
        "{% if message['role'] == 'user' %}{{ '\\n' }}{% else %}{{ '[|endofturn|]\\n' }}{% endif %}",
        prompt="{{ '[|assistant|]' }}",
    ),
    "llama3": _talk(
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}",
        start="{{ bos_token }}",
        prompt="{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
    ),
    "mistral": _talk(
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
        "{% else %}{{ message['content'] + '\\n' }}{% endif %}",
        start="{{ bos_token }}",
    ),
}

# What ends a turn in them, where it is not the tokenizer's own end of sequence.
TURN_ENDS = {"chatml": "<|im_end|>", "exaone": "[|endofturn|]", "llama3": "<|eot_id|>"}


def own_template(directory: Path) -> str | None:
    """The chat template of a checkpoint, from ``chat_template.jinja`` or its tokenizer's config.

    Raises:
        InvalidInput: A file of one of these names that is none of that kind.
    """
    if (directory / FILE).exists():
        return read_text(directory / FILE, _MAX_TEMPLATE_BYTES, within=directory, expected="a chat template")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(directory / name).get("chat_template") if (directory / name).exists() else None
        if isinstance(template, str):
            return template
    return None


def chosen_template(wanted: str, parents: Sequence[str | None], where: str) -> str:
    """The template that a recipe's ``chat_template`` asks for.

    Args:
        wanted: ``auto`` (the most common one of the parents, the first of equally common ones), a known name, or the
            template itself.
        parents: The parents' templates, in the order of the recipe.
        where: Place for messages.

    Raises:
        InvalidInput: None of these.
    """
    if wanted in KNOWN:
        return KNOWN[wanted]
    if wanted == "auto":
        templates = Counter(template for template in parents if template is not None)
        if not templates:
            raise InvalidInput(where, found="auto", expected="a parent with a chat template; none has one")
        return templates.most_common(1)[0][0]
    if "{" not in wanted:
        names = ("auto", *KNOWN)
        raise InvalidInput(
            where,
            found=f"{wanted!r:.60}",
            expected="auto, a known name, or a Jinja text",
            remedy=suggest(wanted, names),
        )
    return wanted
