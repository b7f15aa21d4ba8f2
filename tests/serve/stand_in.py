"""A stand-in for an OpenAI-compatible server on loopback, with a small transformers model or canned answers.

It implements only the paths and fields of vLLM that a smoke test uses, and faults that a test can select. Run it as a
process with::

    python stand_in.py --port 8000 --name smoke [--model DIRECTORY] [--fault NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LONGEST = 64  # Maximum tokens per request.
WORKER = """
import os, signal, sys, tempfile, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
from multiprocessing import shared_memory
name = f"{os.environ['MERGEGATE_TEST_SERVER']}-{os.getpid()}"
segment = shared_memory.SharedMemory(name, create=True, size=4096)
tempfile.mkstemp(prefix="worker-")
print("worker started", flush=True)
time.sleep(14400)
"""


def plain_content(content: str | list[dict[str, Any]], *, is_blind: bool = False) -> str:
    """Return the content of a message as text, in which a number stands for a picture."""
    if isinstance(content, str):
        return content
    pictures = (zlib.crc32(part["image_url"]["url"].encode()) for part in content if part["type"] == "image_url")
    texts = [part["text"] for part in content if part["type"] == "text"]
    return " ".join([*texts, *(str(number % 1000) for number in pictures if not is_blind)])


class Canned:
    """Answers without a model: token ids count up, and all log-likelihoods are -0.5."""

    ends = (2,)

    def ids(self, text: str) -> list[int]:
        return [3 + ord(letter) % 40 for letter in text]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.ids("".join(plain_content(message["content"]) for message in messages))

    def text(self, ids: list[int]) -> str:
        return "".join(chr(97 + number % 26) for number in ids if number not in self.ends)

    def likelihoods(self, ids: list[int]) -> list[float]:
        return [-0.5] * (len(ids) - 1)

    def go_on(self, ids: list[int], count: int, bias: Mapping[int, float], ignore_end: bool) -> list[int]:
        if any(value >= 100 for value in bias.values()):
            certain = max(bias, key=lambda number: bias[number])
            return [certain] * (count if ignore_end else 1)
        return [(sum(ids) + step) % 40 + 3 for step in range(count)]


class Tiny:
    """A transformers checkpoint in float32, decoded greedily one token at a time."""

    def __init__(self, directory: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.network: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        self.ends = (self.tokenizer.eos_token_id,)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        plain = [{**message, "content": plain_content(message["content"])} for message in messages]
        return list(
            self.tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def likelihoods(self, ids: list[int]) -> list[float]:
        import torch

        with torch.inference_mode():
            logits = self.network(torch.tensor([ids])).logits[0].float()
        scores = torch.log_softmax(logits, dim=-1)
        return [float(scores[at, ids[at + 1]]) for at in range(len(ids) - 1)]

    def go_on(self, ids: list[int], count: int, bias: Mapping[int, float], ignore_end: bool) -> list[int]:
        import torch

        said: list[int] = []
        for _ in range(count):
            with torch.inference_mode():
                logits = self.network(torch.tensor([(ids + said)[-LONGEST:]])).logits[0, -1]
            logits = logits.float().clone()
            for number, value in bias.items():
                logits[number] += value
            if ignore_end and not bias:
                logits[list(self.ends)] = -torch.inf
            said.append(int(logits.argmax()))
            if said[-1] in self.ends and not ignore_end:
                break
        return said


class StandIn(ThreadingHTTPServer):
    """The stand-in server.

    Args:
        faults: ``nan``: NaN likelihoods; ``empty``: no text; ``loop``: one token forever; ``moody``: a different
            answer each time; ``shifted``: likelihoods of another model; ``endless``: no end of sequence;
            ``unbiased``:
            no logit_bias; ``cut prompts``: truncates and answers prompts that are too long; ``swallows``: a prompt
            that is too long kills the server; ``silent``: no answer to completions; ``dies``, ``killed``: ends
            at the
            second request; ``plain``: only OpenAI's fields; ``strict``: rejects unknown fields; ``other ids``:
            /tokenize returns wrong ids; ``no chat``: no chat endpoint; ``blind``: ignores pictures; ``only text``:
            rejects pictures.
    """

    daemon_threads = True

    def __init__(self, answers: Canned | Tiny, name: str, *faults: str, port: int = 0) -> None:
        self.answers, self.name, self.faults = answers, name, set(faults)
        self.requests = 0
        super().__init__(("127.0.0.1", port), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        """Discard log lines."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, {})
        elif self.path == "/v1/models":
            self._say(200, {"data": [{"id": self.server.name, "max_model_len": LONGEST}]})
        else:
            self._say(404, {"error": {"message": "Not Found"}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        faults = self.server.faults
        self.server.requests += 1
        if "dies" in faults and self.server.requests > 1:
            print("RuntimeError: the floor is gone", flush=True)
            os._exit(7)
        if "killed" in faults and self.server.requests > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if "silent" in faults:
            threading.Event().wait()
        if "strict" in faults and {"return_token_ids", "prompt_logprobs", "ignore_eos"} & set(asked):
            self._say(400, {"error": {"message": "Unrecognized request argument"}})
        elif self.path == "/tokenize" and "plain" not in faults:
            answers = self.server.answers
            ids = answers.chat(asked["messages"]) if "messages" in asked else answers.ids(asked["prompt"])
            self._say(200, {"tokens": ids[::-1] if "other ids" in faults else ids})
        elif self.path == "/v1/completions":
            prompt = asked["prompt"]
            self._complete(asked, self.server.answers.ids(prompt) if isinstance(prompt, str) else prompt, chat=False)
        elif self.path == "/v1/chat/completions" and "no chat" not in faults:
            messages = asked["messages"]
            if "only text" in faults and not all(isinstance(message["content"], str) for message in messages):
                self._say(400, {"error": {"message": "tiny is not a multimodal model"}})
                return
            if "blind" in faults:
                messages = [{**each, "content": plain_content(each["content"], is_blind=True)} for each in messages]
            self._complete(asked, self.server.answers.chat(messages), chat=True)
        else:
            self._say(404, {"error": {"message": "Not Found"}})

    def _complete(self, asked: dict[str, Any], ids: list[int], *, chat: bool) -> None:
        answers, faults = self.server.answers, self.server.faults
        if len(ids) > LONGEST and "cut prompts" not in faults:
            if "swallows" in faults:
                print("IndexError: index out of range in self", flush=True)
                self._say(500, {"error": {"message": "the engine is dead"}})
                os._exit(1)
            self._say(400, {"error": {"message": f"at most {LONGEST} tokens, not {len(ids)}"}})
            return
        bias = {} if "unbiased" in faults else {int(key): value for key, value in asked.get("logit_bias", {}).items()}
        extended = not {"plain", "strict"} & faults
        endless = "endless" in faults or (extended and bool(asked.get("ignore_eos")))
        said = answers.go_on(ids, asked["max_tokens"], bias, endless)
        if "loop" in faults:
            said = [said[0]] * asked["max_tokens"]
        if "moody" in faults:
            said = [3 + self.server.requests % 9] * 2 + said
        text = "" if "empty" in faults else answers.text(said)
        ended = said[-1] in answers.ends and not endless
        likelihoods = [-0.5] * len(said)
        prompt_likelihoods = answers.likelihoods(ids)
        if "shifted" in faults:
            prompt_likelihoods = [value - 0.2 for value in prompt_likelihoods]
        if "nan" in faults:
            likelihoods = [float("nan")] * len(said)
        choice: dict[str, Any] = {"finish_reason": "stop" if ended else "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            choice["logprobs"] = {"content": [{"logprob": value} for value in likelihoods]}
        else:
            choice["text"] = text
            if asked.get("logprobs") is not None:
                tokens, numbers = [f"t{number}" for number in said], [*likelihoods]
                if asked.get("echo"):
                    tokens = [f"t{number}" for number in ids] + tokens
                    numbers = [None, *prompt_likelihoods, *numbers]
                choice["logprobs"] = {"tokens": tokens, "token_logprobs": numbers}
            if extended and asked.get("return_token_ids"):
                choice["token_ids"] = said
            if extended and asked.get("prompt_logprobs") is not None:
                pairs = zip(ids[1:], prompt_likelihoods, strict=True)
                choice["prompt_logprobs"] = [None, *({str(i): {"logprob": value}} for i, value in pairs)]
        self._say(200, {"choices": [choice], "usage": {"completion_tokens": len(said)}})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def standing_in(answers: Canned | Tiny, *faults: str, name: str = "tiny") -> Iterator[StandIn]:
    """Run the server in a thread of this process for the duration of the block."""
    from loopback import answering  # Not imported at the top, because this file also runs as a standalone script.

    with answering(StandIn(answers, name, *faults)) as server:
        yield server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="tiny")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    faults = arguments.fault
    for fault in faults:
        if fault.startswith("says "):
            print(fault.removeprefix("says "), flush=True)
            sys.exit(1)
    if "deaf" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tempfile.mkstemp(prefix="server-")
    for _ in range(arguments.workers):
        # A new session, so that the worker leaves the process group.
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, *faults], stdout=subprocess.PIPE, start_new_session=True
        )
        assert worker.stdout is not None
        worker.stdout.readline()
    if "never ready" in faults:
        print("loading weights", flush=True)
        time.sleep(14400)
    answers = Tiny(arguments.model) if arguments.model else Canned()
    StandIn(answers, arguments.name, *faults, port=arguments.port).serve_forever()


if __name__ == "__main__":
    main()
