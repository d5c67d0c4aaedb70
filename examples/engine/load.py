"""A load test: many clients over loopback, some of which leave, some of which send rubbish."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from random import Random
from typing import Any

import httpx

RUBBISH: tuple[Any, ...] = (
    {"prompt": []},
    {"prompt": [1 << 40]},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": {"a": 1}},
    {"prompt": "x" * 9000, "max_tokens": 4000},
    {"prompt": "x", "temperature": 2},
    [],
)


async def client(
    http: httpx.AsyncClient, number: int, end: float, seen: Counter[str], seconds: list[float]
) -> None:
    """Requests one after another until the time is over."""
    chance = Random(number)
    while time.monotonic() < end:
        kind = chance.random()
        start = time.monotonic()
        if kind < 0.1:
            found = await http.post("/v1/completions", json=chance.choice(RUBBISH))
            seen["rubbish refused" if found.status_code in (400, 422) else "RUBBISH TAKEN"] += 1
            continue
        prompt = [chance.randrange(256) for _ in range(chance.choice((1, 5, 40, 90)))]
        body = {"prompt": prompt, "max_tokens": chance.choice((4, 16, 48)), "stream": kind < 0.6}
        if not body["stream"]:
            found = await http.post("/v1/completions", json=body)
            if found.status_code == 429:
                seen["told to wait"] += 1
                await asyncio.sleep(0.2)
                continue
            tokens = len(found.json()["choices"][0]["token_ids"]) if found.is_success else -1
            seen["whole" if tokens == body["max_tokens"] else f"WRONG {found.status_code}"] += 1
            seconds.append(time.monotonic() - start)
            continue
        leaves, tokens, ended = chance.random() < 0.3, 0, False
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                seen["told to wait"] += 1
                await answer.aread()
                await asyncio.sleep(0.2)
                continue
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
                ended |= line == "data: [DONE]"
                if leaves and tokens >= body["max_tokens"] // 2:
                    break
        if leaves and not ended:
            seen["left"] += 1
        else:
            right = ended and tokens == body["max_tokens"]
            seen["streamed" if right else f"WRONG stream {answer.status_code}"] += 1
            seconds.append(time.monotonic() - start)


async def load(
    url: str, clients: int, seconds: float
) -> tuple[Counter[str], list[float], dict[str, Any]]:
    """Run the clients; what came of their requests, how long those took that ended by themselves,
    and the server's status once it has nothing left to do.
    """
    seen: Counter[str] = Counter()
    took: list[float] = []
    limits = httpx.Limits(max_connections=clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(http, n, end, seen, took) for n in range(clients)))
        for _ in range(100):
            status = (await http.get("/status")).json()
            if not status["running"] and not status["waiting"]:
                break
            await asyncio.sleep(0.2)
        assert (await http.get("/health")).status_code == 200
    return seen, took, status


def report(seen: Counter[str], took: list[float], status: dict[str, Any]) -> list[str]:
    """Print what was seen; returns what is wrong."""
    print(", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    took = sorted(took)
    if took:
        middle, late = took[len(took) // 2], took[int(len(took) * 0.99)]
        print(f"{len(took)} ended by themselves: median {middle:.2f} s, 99 % within {late:.2f} s")
    print(json.dumps(status))
    wrong = [what for what in seen if what.isupper() or what.startswith(("WRONG", "RUBBISH"))]
    if status["slots"][0] or status["pages"][0] != 1 or status["running"] or status["waiting"]:
        wrong.append(f"left behind: {status}")
    return wrong
