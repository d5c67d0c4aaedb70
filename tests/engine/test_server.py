"""The HTTP front: completions, streams, refusals, clients that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

for needed in ("torch", "transformers", "fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(needed)

import httpx  # noqa: E402


@pytest.fixture(scope="module")
def served(model: Any) -> Iterator[tuple[Any, httpx.Client]]:
    """An engine behind a server on a free port."""
    import uvicorn

    from engine.drafting import PromptLookup
    from engine.engine import Engine
    from engine.server import application

    engine = Engine(model, PromptLookup(), slots=2, pages=40, batches=(1, 2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = application(engine, most_waiting=3)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield engine, client
    server.should_exit = True
    thread.join(20)


def idle(client: httpx.Client) -> dict[str, Any]:
    for _ in range(400):
        status: dict[str, Any] = client.get("/status").json()
        if not status["running"] and not status["waiting"]:
            return status
        time.sleep(0.05)
    raise AssertionError(status)


def tokens_of(text: str) -> tuple[list[int], list[str | None]]:
    parts = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [part["choices"][0] for part in parts]
    return [t for c in choices for t in c["token_ids"]], [c["finish_reason"] for c in choices]


def test_a_stream_says_what_a_whole_answer_says(served: tuple[Any, httpx.Client]) -> None:
    _, client = served
    body = {"prompt": "one two one two", "max_tokens": 9}
    whole = client.post("/v1/completions", json=body).json()
    streamed = client.post("/v1/completions", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    tokens, reasons = tokens_of(streamed.text)
    assert tokens == whole["choices"][0]["token_ids"]
    assert len(tokens) == 9 and reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert whole["usage"] == {"prompt_tokens": 15, "completion_tokens": 9, "total_tokens": 24}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": [5000]}, 400, "token 5000"),
        ({"prompt": [1] * 3000}, 400, "take a context of"),
        ({"prompt": "x", "max_tokens": 0}, 422, "greater than or equal to 1"),
        ({"prompt": "x", "temperature": 1}, 422, "temperature"),
        ({}, 422, "Field required"),
    ],
)
def test_rubbish_is_refused_and_stops_nothing(
    served: tuple[Any, httpx.Client], body: dict[str, Any], code: int, said: str, stream: bool
) -> None:
    _, client = served
    answer = client.post("/v1/completions", json={**body, "stream": stream})
    assert answer.status_code == code
    assert said in answer.text
    assert client.get("/health").json()["status"] == "ok"


def test_a_client_that_leaves_is_cancelled(served: tuple[Any, httpx.Client]) -> None:
    engine, client = served
    before = engine.counts.cancelled
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                break
    status = idle(client)
    assert engine.counts.cancelled == before + 1
    assert status["slots"] == [0, 2] and status["pages"] == [1, 40]


def test_a_full_queue_says_so(served: tuple[Any, httpx.Client]) -> None:
    _, client = served
    codes: list[int] = []

    def ask() -> None:
        body = {"prompt": [1], "max_tokens": 30}
        codes.append(client.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 2
    idle(client)


def test_metrics_and_page(served: tuple[Any, httpx.Client]) -> None:
    engine, client = served
    text = client.get("/metrics").text
    found = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert float(found["engine_tokens_total"]) == engine.counts.tokens > 0
    assert float(found["engine_used_slots"]) == 0
    assert "# HELP engine_steps" in text
    assert "<title>specplan engine</title>" in client.get("/").text
