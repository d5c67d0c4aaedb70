"""``python -m engine`` from ``examples``: a server, or a few completions on the command line.

python -m engine serve --model tiny --port 8000
python -m engine generate --model tiny --prompt "one two one" --tokens 4
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import click
import specplan
import torch

from .drafting import PromptLookup
from .engine import Engine, generate
from .model import HybridModel, load
from .ops import Ops, PackOps, TorchOps


def engine_of(model: str, tokens: int, slots: int, pages: int, state: str, backend: str) -> Engine:
    """An engine; it says who computes its steps."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops: Ops = TorchOps()
    if backend == "specplan" or (backend == "auto" and device.type == "cuda"):
        # Candidates too: what is not certified runs, and is not promised.
        try:
            ops = PackOps(specplan.load(candidates=True))
        except specplan.SpecplanError as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"backend specplan on {device}", err=True)
    else:
        click.echo(
            f"backend torch on {device}: the ops run as their references, not as specplan's "
            "launches",
            err=True,
        )
    hybrid = HybridModel(load(model, device))
    batches = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < slots] + [slots]
    sizes = {"tokens": tokens, "slots": slots, "pages": pages, "batches": batches}
    try:
        return Engine(hybrid, PromptLookup(), state_dtype=state, ops=ops, **sizes)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def main() -> None:
    """A decode engine for hybrid models."""


OPTIONS = (
    click.option("--model", default="tiny", show_default=True, help="A checkpoint's directory."),
    click.option("--tokens", default=4, show_default=True, type=click.IntRange(1, 8)),
    click.option("--slots", default=8, show_default=True, type=click.IntRange(1, 64)),
    click.option("--pages", default=512, show_default=True, type=click.IntRange(2)),
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "specplan", "torch"]),
        help="auto: specplan where there is a GPU.",
    ),
    click.option("--state", default="fp32", show_default=True, type=click.Choice(["bf16", "fp32"])),
)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with what an engine is made of."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@main.command()
@with_options
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=int)
def serve(
    model: str, tokens: int, slots: int, pages: int, state: str, backend: str, host: str, port: int
) -> None:
    """Serve completions over HTTP."""
    import uvicorn

    from .server import application

    engine = engine_of(model, tokens, slots, pages, state, backend)
    uvicorn.run(application(engine, name=model), host=host, port=port, log_level="warning")


@main.command("load")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--clients", default=64, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=120.0, show_default=True)
def load_command(url: str, clients: int, seconds: float) -> None:
    """Load a server that runs; exit 1 where an answer was wrong or something was left behind."""
    import asyncio

    from .load import load as run
    from .load import report

    wrong = report(*asyncio.run(run(url, clients, seconds)))
    if wrong:
        raise SystemExit(f"wrong: {'; '.join(wrong)}")


@main.command("generate")
@with_options
@click.option("--prompt", required=True)
@click.option("--new", default=32, show_default=True, type=click.IntRange(1))
def generate_command(
    model: str, tokens: int, slots: int, pages: int, state: str, backend: str, prompt: str, new: int
) -> None:
    """Print the completion of one prompt, as token ids."""
    engine = engine_of(model, tokens, slots, pages, state, backend)
    (found,) = generate(engine, [list(prompt.encode())], new)
    click.echo(" ".join(map(str, found)))
    click.echo(f"{engine.counts}", err=True)


main()
