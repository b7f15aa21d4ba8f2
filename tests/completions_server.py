"""An OpenAI-compatible completions server on loopback that computes its answers with tiny models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import torch
from loopback import answering
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.tasks.checkpoints.model import Model

# Known behaviors of servers that do not score the prompt.
Habit = Literal[
    "scores prompts", "no log-probabilities", "no echo", "zeros", "begin of text added", "not JSON", "gives up"
]


@dataclass
class Server:
    """A running server; ``asked`` holds the body of every request."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving(models: Mapping[str, Model], habit: Habit = "scores prompts") -> Iterator[Server]:
    """Serve the models under the names that requests use."""
    loaded = {
        name: (
            AutoModelForCausalLM.from_pretrained(model.directory, dtype="auto"),
            AutoTokenizer.from_pretrained(model.directory),
        )
        for name, model in models.items()
    }
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            if self.path != "/v1/completions" or body["model"] not in loaded:
                return self._send(404, {"error": f"no model {body['model']!r}"})
            if habit == "gives up" and len(server.asked) > 1:
                return self._send(500, {"error": "out of memory"})
            with turn:
                choices = [_choice(*loaded[body["model"]], prompt, body, habit) for prompt in body["prompt"]]
            return self._send(200, {"choices": [{"index": i, **choice} for i, choice in enumerate(choices)]})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            text = b"<html>" if habit == "not JSON" else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1")
    with answering(http):
        yield server


def _choice(network: Any, tokenizer: Any, prompt: list[int], body: dict[str, Any], habit: Habit) -> dict[str, Any]:
    if habit == "begin of text added":
        prompt = [tokenizer.bos_token_id, *prompt]
    tokens = list(prompt)
    with torch.no_grad():
        if body.get("logprobs"):
            for _ in range(body["max_tokens"]):
                tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
            log_p = torch.log_softmax(network(torch.tensor([tokens])).logits[0].float(), -1)
        else:
            most = {"max_new_tokens": body["max_tokens"], "do_sample": False, "pad_token_id": 0}
            tokens = network.generate(torch.tensor([tokens]), **most)[0].tolist()
    new = tokens[len(prompt) :]
    text = whole = tokenizer.decode(new, skip_special_tokens=not body.get("echo"))
    for stop in body.get("stop") or []:
        text = text.split(stop)[0]
    reason = "length" if text == whole and new[-1] != tokenizer.eos_token_id else "stop"
    if not body.get("logprobs") or habit == "no log-probabilities":
        return {"text": text, "logprobs": None, "finish_reason": reason}
    said: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for position, token in enumerate(tokens[1:]):
        best = int(log_p[position].argmax())
        said.append(float(log_p[position, token]))
        tops.append({f"token {one}": float(log_p[position, one]) for one in {best, token}})
    if habit == "zeros":
        said = [None, *(0.0 for _ in said[1:])]
    if habit == "no echo" or not body.get("echo"):
        said, tops = said[-len(new) :], tops[-len(new) :]
    return {"text": text, "logprobs": {"token_logprobs": said, "top_logprobs": tops}}
