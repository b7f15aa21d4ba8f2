"""Read the pictures of a task's documents, and identify them by content.

lm-eval passes the pictures of a document to a model next to the prompt, whose text has a placeholder ``<image>`` for
each. lm-eval's own hashes of such a document cover a memory address instead of the pictures. In mergegate, every hash
of a document, a prompt or a request covers the pixels, so that two runs agree and another picture is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mergegate.merge_core.errors import InvalidInput

PLACEHOLDER = "<image>"
_DIGITS = 12  # hex digits of a picture's hash in a human-readable prompt


class PicturePrompt(str):
    """A prompt with its pictures, in the order of their placeholders in the task."""

    pictures: tuple[Any, ...]
    digest: str  # over the text and all pictures

    def __new__(cls, text: str, pictures: Sequence[Any]) -> PicturePrompt:
        """Return ``text`` with its pictures."""
        prompt = super().__new__(cls, text)
        prompt.pictures = tuple(pictures)
        prompt.digest = hash_prompt(text, pictures)
        return prompt


def hash_picture(picture: Any) -> str:
    """Return a sha256 over the pixels of a picture, its size and its colors."""
    hasher = hashlib.sha256(f"{picture.mode} {picture.size}".encode())
    if palette := picture.getpalette():
        hasher.update(bytes(palette))
    hasher.update(picture.tobytes())
    return hasher.hexdigest()


def hash_prompt(text: str, pictures: Sequence[Any]) -> str:
    """Return a sha256 over a prompt and its pictures."""
    return hashlib.sha256("\n".join((*map(hash_picture, pictures), text)).encode(errors="surrogatepass")).hexdigest()


def has_pictures(leaf: Any) -> bool:
    """Return whether the documents of lm-eval's task object have pictures."""
    return bool(getattr(leaf, "MULTIMODAL", False))


def pictures_of(leaf: Any, document: Any, location: str) -> tuple[Any, ...]:
    """Return the pictures of a document. Errors name ``location``."""
    value = leaf.doc_to_image(document)
    pictures = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for picture in pictures:
        if not hasattr(picture, "tobytes") or not hasattr(picture, "getpalette"):
            raise InvalidInput(
                f"{location}: doc_to_image",
                found=f"{picture!r:.60}",
                expected="a list of pictures (PIL.Image)",
                remedy="name a column with pictures, or open the file in a function of the task",
            )
    if (count := str(leaf.doc_to_text(document)).count(PLACEHOLDER)) != len(pictures) or not pictures:
        raise InvalidInput(
            f"{location}: doc_to_text",
            found=f"{count} placeholders {PLACEHOLDER} for {len(pictures)} pictures",
            expected=f"one {PLACEHOLDER} in the prompt for each picture",
        )
    return pictures


def describe_prompt(text: str, pictures: Sequence[Any]) -> str:
    """Return a human-readable prompt, in which each placeholder names its picture: ``<image 5f0c8e1d2b3a>``."""
    first, *parts = text.split(PLACEHOLDER)
    names = (f"<image {hash_picture(picture)[:_DIGITS]}>" for picture in pictures)
    return first + "".join(name + part for name, part in zip(names, parts, strict=False))


def hash_document(document: Any, pictures: Sequence[Any]) -> str:
    """Return a sha256 over a document and its pictures, which the document itself may only name."""
    from lm_eval.utils import handle_non_serializable

    def plain(value: object) -> object:
        return hash_picture(value) if hasattr(value, "getpalette") else handle_non_serializable(value)

    serialized = json.dumps(document, sort_keys=True, default=plain, ensure_ascii=False)
    return hash_prompt(serialized, pictures)


def hash_with_pictures(leaf: Any, position: int, prompt: str) -> tuple[str, str]:
    """Return the hashes of the document at ``position`` and of its ``prompt``, both with the pictures."""
    document = leaf.eval_docs[position]
    pictures = pictures_of(leaf, document, f"task {leaf.config.task}")
    return hash_document(document, pictures), hash_prompt(prompt, pictures)


def as_picture_prompt(request: Any) -> None:
    """Move the pictures of lm-eval's request into its prompt, so that text-only code can handle the request."""
    if len(request.args) == 3 and isinstance(media := request.args[2], Mapping):
        pictures = media["visual"]
        prompt = PicturePrompt(request.args[0], pictures if isinstance(pictures, (list, tuple)) else [pictures])
        request.arguments = (prompt, request.args[1])


def split_at_placeholders(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a chat template, in which each placeholder is a part of the content of its own."""
    messages: list[dict[str, Any]] = []
    for message in history:
        first, *texts = str(message["content"]).split(PLACEHOLDER)
        parts: list[dict[str, str]] = [{"type": "text", "text": first}] if first else []
        for text in texts:
            parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        messages.append({**message, "content": parts if texts else message["content"]})
    return messages
