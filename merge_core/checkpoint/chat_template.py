"""Chat templates: read them in every form that transformers reads, choose those of the result, write them.

A model may have several templates with names. ``default`` is the one that a library uses unless it is told otherwise;
transformers also picks ``tool_use`` by itself when tools are passed. The well-known formats are those that mergekit
knows by name; the texts here are our own renderings of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mergegate.merge_core.checkpoint.companions import TEMPLATE_FILE, TEMPLATE_FOLDER, Companions
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import JsonBounds

DEFAULT = "default"
ChatTemplates: TypeAlias = Mapping[str, str]
"""Name → Jinja text; empty if a model has no chat template."""

_SETTINGS = "tokenizer_config.json"
_OF_PROCESSOR = "chat_template.json"  # read by processors only, so by no tokenizer
_MAX_TEMPLATE_BYTES = 1 << 20
_SETTINGS_BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)
# A name is also the name of a file, so it must not reach another directory.
_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,199}")


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


def read_chat_templates(files: Companions) -> dict[str, str]:
    """Return the chat templates of a model by name, as ``AutoTokenizer`` of transformers would.

    ``chat_template.jinja`` is the default and ``additional_chat_templates/NAME.jinja`` are the others; if there is any
    such file, it takes the place of ``chat_template`` in ``tokenizer_config.json``, which is a text, a list of
    ``{name, template}`` or an object. ``chat_template.json`` counts if there is nothing else: only processors read it.

    Raises:
        InvalidInput: A file is not what its name says, or its ``chat_template`` has another form.
    """
    found = {
        _name_of(name, files.where(name)): files.text(name, _MAX_TEMPLATE_BYTES, "a chat template")
        for name in sorted(files, key=lambda name: name != TEMPLATE_FILE)
        if name == TEMPLATE_FILE or name.startswith(f"{TEMPLATE_FOLDER}/")
    }
    for name in (_SETTINGS, _OF_PROCESSOR):
        if not found and (content := files.json(name, _SETTINGS_BOUNDS)) is not None:
            found = _declared(content.get("chat_template"), f"{files.where(name)}: chat_template")
    return found


def _name_of(file: str, where: str) -> str:
    if file == TEMPLATE_FILE:
        return DEFAULT
    return _checked(file.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja"), where)


def _declared(value: Any, where: str) -> dict[str, str]:
    """Return the templates that a ``chat_template`` key declares."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value]
    elif isinstance(value, dict):
        pairs = list(value.items())
    else:
        raise InvalidInput(
            where, found=f"{value!r:.60}", expected="a Jinja text, or a list of {name: text, template: Jinja text}"
        )
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            raise InvalidInput(
                where,
                found=f"an entry with name {name!r:.40} and template {template!r:.40}",
                expected="{name: text, template: Jinja text} in every entry",
                remedy="save the tokenizer again with transformers, or correct the entry",
            )
    return {_checked(name, where): template for name, template in pairs}


def _checked(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            where,
            found=f"a template with the name {name!r:.60}",
            expected="a name that can also be a file name, such as 'default' or 'tool_use'",
            remedy="rename the template",
        )
    return name


def chosen_templates(wanted: str, parents: Sequence[ChatTemplates], where: str) -> dict[str, str]:
    """Return the templates that a recipe's ``chat_template`` selects.

    Args:
        wanted: ``auto``, a known name, or the default template itself. ``auto`` selects the most common default
            template of the parents (the first of equally common ones) together with the templates that its parents
            have next to it (the most common set of them).
        parents: The parents' templates, in the order of the recipe.
        where: The recipe's field, for messages.

    Raises:
        InvalidInput: ``wanted`` is none of these, or it is ``auto`` and no parent has a template.
    """
    if wanted in KNOWN:
        return {DEFAULT: KNOWN[wanted]}
    if wanted == "auto":
        known = [templates for templates in parents if templates]
        if not known:
            raise InvalidInput(where, found="auto", expected="a parent with a chat template; none has one")
        default = Counter(templates.get(DEFAULT) for templates in known).most_common(1)[0][0]
        sets = Counter(tuple(one.items()) for one in known if one.get(DEFAULT) == default)
        return dict(sets.most_common(1)[0][0])
    if "{" not in wanted:
        names = ("auto", *KNOWN)
        raise InvalidInput(
            where,
            found=f"{wanted!r:.60}",
            expected="auto, a known name, or a Jinja text",
            remedy=suggest(wanted, names),
        )
    return {DEFAULT: wanted}


def with_chat_templates(files: Companions, templates: ChatTemplates) -> Companions:
    """Return ``files`` with these templates wherever a reader may look for them, and no others.

    Raises:
        InvalidInput: ``tokenizer_config.json`` is not a JSON object.
    """
    stale = [name for name in files if name.startswith(f"{TEMPLATE_FOLDER}/") or name in (TEMPLATE_FILE, _OF_PROCESSOR)]
    changes: dict[str, bytes | None] = dict.fromkeys(stale)
    for name, template in templates.items():
        changes[TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja"] = template.encode()
    if (settings := files.json(_SETTINGS, _SETTINGS_BOUNDS)) is not None:
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        declared = templates[DEFAULT] if list(templates) == [DEFAULT] else listed
        content = {**settings, "chat_template": declared}
        changes[_SETTINGS] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return files.changed(changes)
