"""Small servers for `demo-shadow.yaml`, where no vLLM is at hand: a model of the demo family, or a judge of answers.

    python profiles/demo/server.py profiles/demo/models/reverser 8001       # the parent
    python profiles/demo/server.py releases/demo/latest 8002                # the candidate
    python profiles/demo/server.py judge 8003                               # knows the right answers

They speak as much of OpenAI's API as the demo needs: completions, greedy, one at a time; and chat for the judge. The
judge is not a model: it computes the right answers.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_QUESTION = re.compile(r"(copy|rev|shift): ([a-z]+)>")


class Model:
    """A checkpoint that completes prompts.

    Args:
        directory: Directory of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.network = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
        self._alone = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a completion in OpenAI's form."""
        import torch

        asked = self.tokenizer(body["prompt"], return_tensors="pt")
        most = int(body.get("max_tokens", 16))
        with self._alone, torch.inference_mode():
            ids = self.network.generate(**asked, max_new_tokens=most, do_sample=False)[0, asked.input_ids.shape[1] :]
        text = self.tokenizer.decode(ids, skip_special_tokens=True).split("\n")[0].strip()
        return {"object": "text_completion", "model": "demo", "choices": [{"index": 0, "text": text}]}


class Judge:
    """A judge that prefers the right answer to a wrong one. All other pairs are ties."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a judgment as a chat completion."""
        said = body["messages"][-1]["content"]
        question = _QUESTION.search(_part(said, "question"))
        right = [question is not None and _is_right(question, _part(said, f"answer {name}")) for name in "AB"]
        verdict = "tie" if right[0] == right[1] else "A" if right[0] else "B"
        reasoning = f"A is {'right' if right[0] else 'wrong'}, B is {'right' if right[1] else 'wrong'}."
        content = json.dumps({"reasoning": reasoning, "correctness": verdict, "verdict": verdict})
        message = {"role": "assistant", "content": content}
        return {"object": "chat.completion", "model": "speller", "choices": [{"index": 0, "message": message}]}


def _part(text: str, title: str) -> str:
    found = re.search(rf"<<< {title} (\w+)\n(.*?)\n>>> end of {title} \1", text, re.DOTALL)
    return found[2] if found else ""


def _is_right(question: re.Match[str], answer: str) -> bool:
    kind, word = question[1], question[2]
    wanted = {"copy": word, "rev": word[::-1], "shift": "".join(chr((ord(c) - 96) % 26 + 97) for c in word)}[kind]
    return answer.strip() == wanted


def serve(who: Model | Judge, port: int) -> ThreadingHTTPServer:
    """Return a server on loopback; call its ``serve_forever``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._say({"object": "list", "data": [{"id": "demo", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._say(who.answer(body))

        def _say(self, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    """Serve the model or the judge on the command line until the process ends."""
    who, port = sys.argv[1], int(sys.argv[2])
    server = serve(Judge() if who == "judge" else Model(Path(who)), port)
    print(f"{who} on http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
