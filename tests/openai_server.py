"""A fake OpenAI-compatible server on loopback: a script, an echo, canned answers, or a small transformers model.

It implements only the paths and fields that mergegate uses, and faults that a test selects by name. A test runs it in
its own process with `serving`, or as another process::

    python openai_server.py --port 8000 --name smoke [--model DIRECTORY] [--fault NAME] [--workers COUNT]
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loopback import Answer, FakeServer, Handler, Request, answering, json_answer

LONGEST = 64  # Maximum tokens per request of servers for smoke tests.
PIECES = 4  # Events of a stream before the last one.
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


def completion(content: object, model: str = "judge-1") -> Answer:
    """Return a chat completion whose text is ``content``, encoded as JSON unless it is a string or None."""
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    return json_answer({"model": model, "choices": [{"message": {"content": text}}]})


def plain_content(content: str | list[dict[str, Any]], *, is_blind: bool = False) -> str:
    """Return the content of a message as text, in which a number stands for a picture."""
    if isinstance(content, str):
        return content
    pictures = (zlib.crc32(part["image_url"]["url"].encode()) for part in content if part["type"] == "image_url")
    texts = [part["text"] for part in content if part["type"] == "text"]
    return " ".join([*texts, *(str(number % 1000) for number in pictures if not is_blind)])


class Canned:
    """Answers without a model: token ids count up, and all log-likelihoods are -0.5."""

    begin, ends = 1, (2,)

    def ids(self, text: str) -> list[int]:
        return [3 + ord(letter) % 40 for letter in text]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.ids("".join(message["content"] for message in messages))

    def text(self, ids: list[int]) -> str:
        return "".join(chr(97 + number % 26) for number in ids if number not in self.ends)

    def likelihoods(self, ids: list[int]) -> list[tuple[float, float]]:
        return [(-0.5, -0.5)] * (len(ids) - 1)

    def go_on(self, ids: list[int], count: int, bias: Mapping[int, float], ignore_end: bool) -> list[int]:
        if any(value >= 100 for value in bias.values()):
            certain = max(bias, key=lambda number: bias[number])
            return [certain] * (count if ignore_end else 1)
        return [(sum(ids) + step) % 40 + 3 for step in range(count)]


class Tiny:
    """A transformers checkpoint, decoded greedily."""

    def __init__(self, directory: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.network: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        self.begin, self.ends = self.tokenizer.bos_token_id, (self.tokenizer.eos_token_id,)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return list(self.tokenizer.apply_chat_template(messages, **options))

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def likelihoods(self, ids: list[int]) -> list[tuple[float, float]]:
        """Return the log-likelihood of each token but the first, and that of the likeliest token at its place."""
        import torch

        with torch.inference_mode():
            scores = torch.log_softmax(self.network(torch.tensor([ids])).logits[0].float(), dim=-1)
        return [(float(scores[at, token]), float(scores[at].max())) for at, token in enumerate(ids[1:])]

    def go_on(self, ids: list[int], count: int, bias: Mapping[int, float], ignore_end: bool) -> list[int]:
        import torch

        with torch.inference_mode():
            if not bias and not ignore_end:
                tokens = torch.tensor([ids])
                options = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
                return list(self.network.generate(tokens, **options, pad_token_id=0)[0, len(ids) :].tolist())
            answer: list[int] = []
            while len(answer) < count and (ignore_end or not {*answer} & {*self.ends}):
                logits = self.network(torch.tensor([ids + answer])).logits[0, -1].float()
                for number, value in bias.items():
                    logits[number] += value
                if ignore_end and not bias:
                    logits[list(self.ends)] = -torch.inf
                answer.append(int(logits.argmax()))
            return answer


Answers = Canned | Tiny


class OpenAiServer(FakeServer):
    """A server whose ``url`` ends with ``/v1``, as clients of OpenAI expect it; ``root`` does not."""

    def __init__(self, routes: Mapping[str, Handler], *faults: str, port: int = 0) -> None:
        super().__init__(routes, port=port)
        self.faults, self.released, self.turn = set(faults), threading.Event(), threading.Lock()

    @property
    def root(self) -> str:
        return super().url

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of all POST requests."""
        return [request.json for request in self.log if request.method == "POST"]

    def fail(self, status: int, message: str) -> Answer:
        return json_answer({"error": {"message": message}}, status)

    def answer(self, request: Request) -> Answer:
        if "hang" in self.faults and request.route.endswith("completions"):
            self.released.wait()
        return super().answer(request)


class EchoServer(OpenAiServer):
    """Answers ``NAME echo QUESTION``, as JSON or as a stream, so that an answer identifies the server and the request.

    Faults: ``hang``: no answer until ``released`` is set; ``error``: 500; ``garbage``: invalid JSON; ``cut``: ends in
    mid-stream; ``stall``: hangs in mid-stream.
    """

    def __init__(self, name: str, *faults: str) -> None:
        super().__init__({"POST /v1/(?:chat/)?completions": self.echo, ".*": self.describe}, *faults)
        self.name = name

    def describe(self, request: Request) -> Answer:
        return Answer(200, f"{self.name} {request.method} {request.path}".encode(), {"x-of": self.name})

    def echo(self, request: Request) -> Answer:
        if "error" in self.faults:
            return self.fail(500, "out of order")
        if "garbage" in self.faults:
            return Answer(200, b"\x00\xff no JSON \xfe", {"Content-Type": "application/octet-stream"})
        try:
            body = request.json
        except ValueError:
            return self.fail(400, "no JSON")
        is_chat = "/chat/" in request.route
        text = f"{self.name} echo {body['messages'][-1]['content'] if is_chat else body['prompt']}"
        headers = {"x-served-by": self.name, "x-request-id": request.headers.get("x-request-id", "none")}
        if body.get("stream"):
            headers |= {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
            return Answer(200, self.stream(text, is_chat), headers)
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choices = [{"index": 0, **choice}]
        return json_answer({"object": "chat.completion", "model": body.get("model"), "choices": choices}, 200, headers)

    def stream(self, text: str, is_chat: bool) -> Iterator[bytes]:
        """Return the chunks of a stream of events."""
        step = -(-len(text) // PIECES)
        events = []
        for piece in (text[start : start + step] for start in range(0, len(text), step)):
            choice = {"delta": {"content": piece}} if is_chat else {"text": piece}
            events.append(json.dumps({"choices": [{"index": 0, **choice}]}))
        for number, event in enumerate([*events, "[DONE]"]):
            if number == 2 and "cut" in self.faults:
                raise ConnectionAbortedError
            if number == 2 and "stall" in self.faults:
                self.released.wait()
            content = f"data: {event}\n\n".encode()
            yield b"%x\r\n%s\r\n" % (len(content), content)
        yield b"0\r\n\r\n"


class ModelServer(OpenAiServer):
    """Computes its answers, with one model for each name that requests use.

    Faults of answers: ``nan``: NaN likelihoods; ``empty``: no text; ``loop``: one token forever; ``moody``: a different
    answer each time; ``shifted``: likelihoods of another model; ``endless``: no end of sequence; ``unbiased``: no
    logit_bias; ``cut prompts``: answers prompts that are too long; ``swallows``: a prompt that is too long kills the
    server; ``other ids``: /tokenize returns wrong ids; ``blind``: ignores pictures; ``only text``: rejects pictures.

    Faults of the interface: ``plain``: only OpenAI's fields; ``strict``: rejects unknown fields; ``no chat``: no chat
    endpoint; ``no log-probabilities``, ``no echo``, ``zeros``, ``begin of text added``: ways not to score a prompt.

    Faults of the server: ``silent``: no answer to completions; ``dies``, ``killed``: ends at the second request;
    ``gives up``: fails from the second request on; ``not JSON``: answers with a page.
    """

    def __init__(self, models: Mapping[str, Answers], *faults: str, longest: int = LONGEST, port: int = 0) -> None:
        routes: dict[str, Handler] = {
            "GET /health": lambda request: {},
            "GET /v1/models": lambda request: {"data": [{"id": name, "max_model_len": longest} for name in models]},
            "POST /v1/completions": self.complete,
        }
        routes |= {} if "plain" in faults else {"POST /tokenize": self.tokenize}
        routes |= {} if "no chat" in faults else {"POST /v1/chat/completions": self.chat}
        super().__init__({**routes, ".*": lambda request: self.fail(404, "Not Found")}, *faults, port=port)
        self.models, self.longest = models, longest

    def answer(self, request: Request) -> Answer:
        answer = self._post(request) if request.method == "POST" else super().answer(request)
        return Answer(answer.status, b"<html>", answer.headers) if "not JSON" in self.faults else answer

    def _post(self, request: Request) -> Answer:
        is_second = sum(each.method == "POST" for each in self.log) > 1
        if "dies" in self.faults and is_second:
            print("RuntimeError: the floor is gone", flush=True)
            os._exit(7)
        if "killed" in self.faults and is_second:
            os.kill(os.getpid(), signal.SIGKILL)
        if "silent" in self.faults:
            threading.Event().wait()
        if "gives up" in self.faults and is_second:
            return self.fail(500, "out of memory")
        if "strict" in self.faults and {"return_token_ids", "prompt_logprobs", "ignore_eos"} & set(request.json):
            return self.fail(400, "Unrecognized request argument")
        if request.json["model"] not in self.models:
            return self.fail(404, f"no model {request.json['model']!r}")
        with self.turn:
            return super().answer(request)

    def tokenize(self, request: Request) -> object:
        body = request.json
        answers = self.models[body["model"]]
        ids = answers.chat(self._plain(body["messages"])) if "messages" in body else answers.ids(body["prompt"])
        return {"tokens": ids[::-1] if "other ids" in self.faults else ids}

    def complete(self, request: Request) -> object:
        body, prompt = request.json, request.json["prompt"]
        if isinstance(prompt, list) and isinstance(prompt[0], list):
            choices = [self._choice(body, ids) for ids in prompt]
            return {"choices": [{"index": number, **choice} for number, (choice, _) in enumerate(choices)]}
        return self._single(body, self.models[body["model"]].ids(prompt) if isinstance(prompt, str) else prompt)

    def chat(self, request: Request) -> object:
        body = request.json
        messages = body["messages"]
        if "only text" in self.faults and not all(isinstance(message["content"], str) for message in messages):
            return self.fail(400, "tiny is not a multimodal model")
        return self._single(body, self.models[body["model"]].chat(self._plain(messages)))

    def _plain(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        is_blind = "blind" in self.faults
        return [{**message, "content": plain_content(message["content"], is_blind=is_blind)} for message in messages]

    def _single(self, body: dict[str, Any], ids: list[int]) -> object:
        if len(ids) > self.longest and "cut prompts" not in self.faults:
            if "swallows" in self.faults:
                print("IndexError: index out of range in self", flush=True)
                os._exit(1)
            return self.fail(400, f"at most {self.longest} tokens, not {len(ids)}")
        choice, count = self._choice(body, ids)
        return {"choices": [choice], "usage": {"completion_tokens": count}}

    def _choice(self, body: dict[str, Any], ids: list[int]) -> tuple[dict[str, Any], int]:
        """Return an answer, and its number of tokens."""
        answers, faults = self.models[body["model"]], self.faults
        ids = [answers.begin, *ids] if "begin of text added" in faults else ids
        bias = {} if "unbiased" in faults else {int(key): value for key, value in body.get("logit_bias", {}).items()}
        extended = not {"plain", "strict"} & faults
        endless = "endless" in faults or (extended and bool(body.get("ignore_eos")))
        new = answers.go_on(ids, body["max_tokens"], bias, endless)
        if "loop" in faults:
            new = [new[0]] * body["max_tokens"]
        if "moody" in faults:
            new = [3 + len(self.bodies) % 9] * 2 + new
        whole = text = "" if "empty" in faults else answers.text(new)
        for stop in body.get("stop") or []:
            text = text.split(stop)[0]
        ended = text != whole or (new[-1] in answers.ends and not endless)
        choice: dict[str, Any] = {"finish_reason": "stop" if ended else "length"}
        is_scored = body.get("logprobs") is not None or body.get("prompt_logprobs") is not None
        scores = answers.likelihoods(ids + new) if is_scored else []
        values = [0.0 if "zeros" in faults else value for value, _ in scores]
        asked, own = values[: len(ids) - 1], values[len(ids) - 1 :]
        asked = [value - 0.2 for value in asked] if "shifted" in faults else asked
        own = [float("nan")] * len(own) if "nan" in faults else own
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text}
            choice["logprobs"] = {"content": [{"logprob": value} for value in own]}
            return choice, len(new)
        choice |= {"text": text, "logprobs": None}
        if body.get("logprobs") is not None and "no log-probabilities" not in faults:
            start = 0 if body.get("echo") and "no echo" not in faults else len(ids)
            tokens = [f"token {number}" for number in ids + new]
            tops = [None, *({"token": value, "best": best} for value, best in scores)]
            numbers = {"token_logprobs": [None, *asked, *own], "top_logprobs": tops, "tokens": tokens}
            choice["logprobs"] = {name: each[start:] for name, each in numbers.items()}
        if extended and body.get("return_token_ids"):
            choice["token_ids"] = new
        if extended and body.get("prompt_logprobs") is not None:
            pairs = zip(ids[1:], asked, strict=True)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": value}} for i, value in pairs)]
        return choice, len(new)


def serving(content: Any, *faults: str, name: str = "tiny") -> AbstractContextManager[Any]:
    """Run a server in this process for the duration of a block.

    Args:
        content: A function from the body of a request to its answer, a server, answers under ``name``, or checkpoints
            by name.
        faults: Names of faults, see `ModelServer`.
        name: The only model.
    """
    if isinstance(content, OpenAiServer):
        return answering(content)
    if isinstance(content, Answers):
        return answering(ModelServer({name: content}, *faults))
    if isinstance(content, Mapping):
        models = {served: Tiny(model.directory) for served, model in content.items()}
        return answering(ModelServer(models, *faults, longest=1 << 20))
    return answering(scripted(content))


def scripted(script: Callable[[dict[str, Any]], Answer]) -> OpenAiServer:
    """Return a server that answers every POST request, one at a time, with the result of ``script``."""

    def respond(request: Request) -> Answer:
        with turn:
            return script(request.json)

    turn = threading.Lock()
    return OpenAiServer({"POST .*": respond})


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
        command = [sys.executable, "-c", WORKER, *faults]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert worker.stdout is not None
        worker.stdout.readline()
    if "never ready" in faults:
        print("loading weights", flush=True)
        time.sleep(14400)
    answers = Tiny(arguments.model) if arguments.model else Canned()
    ModelServer({arguments.name: answers}, *faults, port=arguments.port).serve_forever()


if __name__ == "__main__":
    main()
