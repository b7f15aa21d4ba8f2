"""Load-test the shadow's proxy with thousands of requests, streamed and not, and measure its cost.

    python benchmarks/shadow_load.py                  # 200 clients, 10,000 requests: nothing lost or mixed up
    python benchmarks/shadow_load.py --latency        # what it adds to an answer, at a tenth of saturation

Both servers are small, answer immediately, and run in separate processes. The proxy also has its own process. Every
answer names the server and repeats the question, which reveals a lost, duplicated or mixed-up answer. For the latency,
direct and proxied requests take turns, one at a time, at a tenth of the rate that the proxy was measured to sustain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

STUB = """
import asyncio, json, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

async def answer(request):
    body = await request.json()
    text = sys.argv[1] + " echo " + body["messages"][-1]["content"]
    headers = {"x-served-by": sys.argv[1], "x-request-id": request.headers.get("x-request-id", "none")}
    if body.get("stream"):
        return StreamingResponse(events(text), media_type="text/event-stream", headers=headers)
    message = {"role": "assistant", "content": text}
    content = {"object": "chat.completion", "model": body.get("model"), "choices": [{"index": 0, "message": message}]}
    return JSONResponse(content, headers=headers)

async def events(text):
    step = -(-len(text) // 4)
    for start in range(0, len(text), step):
        choice = {"index": 0, "delta": {"content": text[start : start + step]}}
        yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n"
        await asyncio.sleep(0)
    yield b"data: [DONE]\\n\\n"

application = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[2]), log_config=None, access_log=False)
"""
CHAT = "/v1/chat/completions"
SHARE = 0.1


def main() -> None:
    """Run the measurement and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--modes", default="mirror,split")
    options = parser.parse_args()
    for mode in options.modes.split(","):
        with tempfile.TemporaryDirectory(prefix="mergegate-shadow-") as place, watched(Path(place), mode) as site:
            if options.latency:
                print_latency(site, mode)
            else:
                print_load(site, mode, options.requests, options.clients)


class Site:
    """Addresses of two servers and a proxy, and the process id of the proxy."""

    def __init__(self, parent: str, candidate: str, proxy: str, pid: int, records: Path) -> None:
        self.parent, self.candidate, self.proxy, self.pid, self.records = parent, candidate, proxy, pid, records

    def cpu(self) -> float:
        """Return the processor seconds that the proxy has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def watched(place: Path, mode: str) -> Iterator[Site]:
    """Start servers and proxy in separate processes."""
    ports = {name: _free() for name in ("parent", "candidate", "proxy")}
    profile = place / "profile.yaml"
    profile.write_text(
        f"""name: load
recipe: {{merge_method: linear, models: [{{model: a}}, {{model: b}}]}}
shadow:
  parent: {{url: "http://127.0.0.1:{ports["parent"]}/v1"}}
  candidate: {{url: "http://127.0.0.1:{ports["candidate"]}/v1"}}
  listen: 127.0.0.1:{ports["proxy"]}
  mode: {mode}
  share: {SHARE}
  in_flight: 1000
  kill_switch: {{max_slowdown: 1000}}   # at saturation it would end the candidate, and move its users
  judge: {{model: judge, url: "http://127.0.0.1:9/v1"}}
"""
    )
    commands = {name: [sys.executable, "-c", STUB, name, str(ports[name])] for name in ("parent", "candidate")}
    commands["proxy"] = [str(Path(sys.executable).with_name("mergegate")), "shadow", str(profile), "--candidate", "v1"]
    with ExitStack() as stack:
        started = {}
        for name, command in commands.items():
            environment = {**os.environ, "MERGEGATE_HOME": str(place / "home")}
            started[name] = subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL)
            stack.callback(started[name].wait)
            stack.callback(started[name].terminate)
        for name, path in (("parent", "/health"), ("candidate", "/health"), ("proxy", "/shadow/status")):
            _wait_for(f"http://127.0.0.1:{ports[name]}{path}")
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        yield Site(**urls, pid=started["proxy"].pid, records=place / "home" / "shadow" / "load.sqlite")


def print_load(site: Site, mode: str, requests: int, clients: int) -> None:
    """Send many requests in parallel and print the results."""
    before, began = site.cpu(), time.perf_counter()
    answers = asyncio.run(_many(site.proxy, requests, clients))
    seconds, cpu = time.perf_counter() - began, site.cpu() - before
    wrong = sum(1 for one in answers if one["wrong"])
    statuses = Counter(one["status"] for one in answers)
    users: dict[str, set[str]] = {}
    for one in answers:
        users.setdefault(one["user"], set()).add(one["arm"])
    both = sum(1 for arms in users.values() if len(arms) > 1)
    share = sum("candidate" in arms for arms in users.values()) / len(users)
    width = 1.96 * math.sqrt(SHARE * (1 - SHARE) / len(users))
    status = httpx.get(f"{site.proxy}/shadow/status").json()
    print(
        f"{mode}: {requests} requests of {clients} clients in {seconds:.1f} s, "
        f"{1000 * cpu / requests:.2f} ms of CPU each"
    )
    print(f"  statuses {dict(statuses)}, {wrong} lost or mixed up, {both} of {len(users)} users on both arms")
    if mode == "split":
        print(f"  share of users {share:.4f}, binomial 95 %: {SHARE - width:.4f} to {SHARE + width:.4f}")
    print(f"  {status['counts']}")


async def _many(url: str, requests: int, clients: int) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:

        async def work() -> None:
            for number in numbers:
                answers.append(await _ask(client, number, stream=number % 2 == 1))

        await asyncio.gather(*(work() for _ in range(clients)))
    return answers


async def _ask(client: httpx.AsyncClient, number: int, *, stream: bool) -> dict[str, Any]:
    user, text = f"user-{number % 2000}", f"question {number} of somebody"
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}
    try:
        answer = await client.post(CHAT, json=body, headers={"x-session-id": user, "x-request-id": f"r{number}"})
    except httpx.HTTPError as error:
        return {"user": user, "status": type(error).__name__, "arm": "", "wrong": True}
    arm = answer.headers.get("x-served-by", "")
    said = _text(answer) if answer.status_code == 200 else ""
    wrong = said != f"{arm} echo {text}" or answer.headers.get("x-request-id") != f"r{number}"
    return {"user": user, "status": answer.status_code, "arm": arm, "wrong": wrong}


def _text(answer: httpx.Response) -> str:
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"]["content"] for line in lines)


def print_latency(site: Site, mode: str) -> None:
    """Print the latency of single requests, which alternate between direct and proxied."""
    began = time.perf_counter()
    asyncio.run(_many(site.proxy, 1500, 50))
    rate = 1500 / (time.perf_counter() - began) / 10
    print(f"{mode}: carried {10 * rate:.0f} requests a second; measured at {rate:.0f}; ms, median / 95 %")
    for stream in (False, True):
        took = asyncio.run(_in_turns(site, rate, stream=stream))
        cells = ", ".join(
            f"{name} {statistics.median(took[name]):.1f} / {statistics.quantiles(took[name], n=20)[-1]:.1f}"
            for name in ("direct", "proxied")
        )
        added = statistics.median(took["proxied"]) - statistics.median(took["direct"])
        print(f"  {'streamed, first byte' if stream else 'plain'}: {cells}; added {added:.1f}")


async def _in_turns(site: Site, rate: float, *, stream: bool, pairs: int = 150) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"direct": [], "proxied": []}
    async with httpx.AsyncClient(timeout=60) as client:
        for number in range(2 * pairs):
            name = "proxied" if number % 2 else "direct"
            url = site.proxy if number % 2 else site.parent
            body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}], "stream": stream}
            began = time.perf_counter()
            async with client.stream("POST", url + CHAT, json=body, headers={"x-session-id": f"u{number}"}) as answer:
                pieces = answer.aiter_raw()
                await anext(pieces)
                if stream:
                    took[name].append(1000 * (time.perf_counter() - began))
                async for _ in pieces:
                    pass
            if not stream:
                took[name].append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(max(0.0, 1 / rate - (time.perf_counter() - began)))
    return took


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            httpx.get(url)
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise SystemExit(f"{url} did not answer")


if __name__ == "__main__":
    main()
