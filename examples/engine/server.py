"""An HTTP front with OpenAI-style completions.

``POST /v1/completions`` with ``prompt`` (a text or token ids), ``max_tokens``, ``stream`` and
``stop_token_ids``; ``GET /health``, ``/metrics`` (Prometheus) and ``/`` (a status page). One thread
runs the engine; requests reach it through a queue, and what a client no longer waits for is
cancelled. Beyond ``most_waiting`` queued requests the answer is 429.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, Field

from .engine import Engine
from .engine import Request as Completion

PAGE = (Path(__file__).parent / "status.html").read_text(encoding="utf-8")


class Tokenizer:
    """Texts as bytes: for a model with random weights, which has no tokenizer of its own."""

    def encode(self, text: str) -> list[int]:
        """A token a byte."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Bytes, and a dot for what is none."""
        return bytes(t if t < 256 else ord(".") for t in tokens).decode(errors="replace")


class Body(BaseModel):
    """The body of ``/v1/completions``; fields of OpenAI's that are not here are ignored."""

    prompt: str | list[Annotated[int, Field(ge=0)]]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 16
    stream: bool = False
    stop_token_ids: list[int] = []
    model: str = ""
    #: Decoding is greedy: another temperature is refused, not ignored.
    temperature: Annotated[float, Field(ge=0, le=0)] = 0.0


class Worker:
    """The thread that owns the engine."""

    def __init__(self, engine: Engine, most_waiting: int) -> None:
        self.engine, self.most_waiting = engine, most_waiting
        self.lock = threading.Condition()
        self.inbox: list[Callable[[], None]] = []
        self.ending = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End after the step under way."""
        with self.lock:
            self.ending = True
            self.lock.notify()
        self.thread.join()

    def call(self, what: Callable[[], None]) -> None:
        """Have the thread call something between two steps."""
        with self.lock:
            self.inbox.append(what)
            self.lock.notify()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and self.error is None

    def _run(self) -> None:
        try:
            while True:
                with self.lock:
                    while not (self.inbox or self.ending or self.engine.busy):
                        self.lock.wait()
                    if self.ending:
                        return
                    calls, self.inbox = self.inbox, []
                for call in calls:
                    call()
                if self.engine.busy:
                    self.engine.step()
        except BaseException as error:
            self.error = error
            raise


class Metrics:
    """What ``/metrics`` says, read from the engine when asked."""

    def __init__(self, engine: Engine, describe: Callable[[], dict[str, float]]) -> None:
        self.engine, self.describe = engine, describe

    def collect(self) -> Any:
        """Prometheus metric families."""
        engine, counts = self.engine, self.engine.counts
        for name, help_text, value in (
            ("steps", "Verify steps", counts.steps),
            ("tokens", "Tokens generated", counts.tokens),
            ("prefilled_tokens", "Tokens of prompts", counts.prefilled),
            ("drafted_tokens", "Tokens guessed", counts.drafted),
            ("accepted_tokens", "Guesses that the model agreed with", counts.agreed),
            ("preemptions", "Requests that had to make room", counts.preempted),
            ("finished_requests", "Requests that ended by themselves", counts.finished),
            ("cancelled_requests", "Requests whose client left", counts.cancelled),
            ("step_seconds", "Time in steps, prefills included", counts.seconds),
        ):
            yield CounterMetricFamily(f"engine_{name}", help_text, value=value)
        for name, help_text, value in (
            ("running_requests", "Requests in the batch", len(engine.running)),
            ("waiting_requests", "Requests in the queue", len(engine.waiting)),
            ("used_slots", "Slots of states in use", engine.caches.slots.used),
            (
                "used_pages",
                "Cache pages in use, one of nobody among them",
                engine.caches.pages.used,
            ),
            *((n, "Calls of the pack", v) for n, v in self.describe().items()),
        ):
            yield GaugeMetricFamily(f"engine_{name}", help_text, value=value)


def application(
    engine: Engine,
    *,
    name: str = "tiny",
    tokenizer: Any = None,
    most_waiting: int = 64,
    describe: Callable[[], dict[str, float]] = dict,
) -> FastAPI:
    """The web application; it starts and ends the engine's thread with itself."""
    worker = Worker(engine, most_waiting)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(engine, describe))
    texts = tokenizer or Tokenizer()
    started = time.time()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="specplan engine", lifespan=life)
    app.state.worker = worker

    @app.post("/v1/completions")
    async def completions(body: Body, request: Request) -> Response:
        prompt = texts.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        if len(engine.waiting) + len(worker.inbox) >= most_waiting:
            raise HTTPException(429, "the queue is full", headers={"Retry-After": "1"})
        loop, news = asyncio.get_running_loop(), asyncio.Queue[list[int] | Exception]()
        found: list[Completion] = []

        def tell(what: list[int] | Exception) -> None:
            loop.call_soon_threadsafe(news.put_nowait, what)

        def submit() -> None:
            try:
                found.append(engine.submit(prompt, body.max_tokens, body.stop_token_ids, tell))
            except ValueError as error:
                tell(error)

        def leave() -> None:
            if found:
                engine.cancel(found[0])

        worker.call(submit)
        identity = f"cmpl-{id(news):x}"

        async def parts() -> AsyncIterator[list[int]]:
            got = 0
            while True:
                try:
                    new = await asyncio.wait_for(news.get(), 0.5)
                except TimeoutError:
                    if not worker.alive:
                        raise HTTPException(503, f"the engine stopped: {worker.error!r}") from None
                    if await request.is_disconnected():
                        return
                    continue
                if isinstance(new, Exception):
                    raise HTTPException(400, str(new))
                got += len(new)
                yield new
                if found and found[0].done and got >= len(found[0].generated):
                    return

        def answer(tokens: list[int], ended: bool) -> dict[str, Any]:
            reason = None
            if ended:
                reason = "stop" if tokens and tokens[-1] in body.stop_token_ids else "length"
            choice = {
                "index": 0,
                "text": texts.decode(tokens),
                "token_ids": tokens,
                "finish_reason": reason,
            }
            return {
                "id": identity,
                "object": "text_completion",
                "created": int(time.time()),
                "model": name,
                "choices": [choice],
            }

        async def events(source: AsyncIterator[list[int]], first: list[int]) -> AsyncIterator[str]:
            try:
                last = first
                yield f"data: {json.dumps(answer(first, False))}\n\n"
                async for last in source:
                    yield f"data: {json.dumps(answer(last, False))}\n\n"
                end = answer(last, True)
                end["choices"][0] |= {"text": "", "token_ids": []}
                yield f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n"
            finally:
                worker.call(leave)

        source = parts()
        if body.stream:
            # What is wrong with the request is said before the stream begins.
            first = await anext(source, None)
            if first is None:
                worker.call(leave)
                return Response(status_code=499)
            return StreamingResponse(events(source, first), media_type="text/event-stream")
        try:
            tokens = [token async for part in source for token in part]
        finally:
            worker.call(leave)
        whole = answer(tokens, True)
        whole["usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
        }
        return Response(json.dumps(whole), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not worker.alive:
            raise HTTPException(503, f"the engine stopped: {worker.error!r}")
        return {"status": "ok", "backend": engine.ops.name, "model": name}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/status")
    async def status() -> dict[str, Any]:
        counts = engine.counts
        return {
            "model": name,
            "backend": engine.ops.name,
            "device": str(engine.model.device),
            "uptime_s": round(time.time() - started, 1),
            "tokens_per_step": engine.tokens,
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "slots": [engine.caches.slots.used, engine.caches.slots.count],
            "pages": [engine.caches.pages.used, engine.caches.pages.count],
            **{key: getattr(counts, key) for key in counts.__dataclass_fields__},
        }

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    return app
