"""The pages of ``docs/benchmarks``: figures and tables from the result files alone.

Every figure is written twice, for light and for dark pages. A figure names the sha256 of the data
and of the code that drew it, so that ``report --check`` needs no drawing library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import points
from benchmarks.points import Run

COPY_CEILING = 4.3e12
DTYPES = {"bf16": "BF16", "fp8_e4m3": "FP8", "nvfp4": "NVFP4", "fp32": "FP32"}
#: What the columns of peers are called in figures and tables.
PEERS = {
    "triton_replay_us": "Triton, same replay design",
    "triton_replay_mixed_us": "Triton, same replay design",
    "state_a_token_us": "Triton, a state per token",
    "snapshots_us": "Triton, a state per token",
    "fla_us": "fla-core 0.6.0",
    "triton_us": "Triton split-K, tuned",
    "torch_us": "torch gather + SDPA",
    "graph_torch_us": "torch ops",
    "graph_triton_us": "Triton, plain",
    "graph_compiled_us": "torch.compile",
    "eager_torch_us": "torch ops, eager",
    "graph_torch_gather_us": "torch ops",
    "graph_torch_restore_us": "torch ops",
    "host_torch_us": "torch ops",
    "host_torch_gather_us": "torch ops",
}


@dataclass(frozen=True)
class Theme:
    """Colours of one page background."""

    name: str
    text: str
    faint: str
    grid: str
    ours: str
    peers: tuple[str, ...]


LIGHT = Theme(
    "light", "#1f2328", "#59636e", "#d8dee4", "#0a5fd8", ("#b35900", "#8a8f98", "#6f42c1")
)
DARK = Theme("dark", "#e6edf3", "#9198a1", "#30363d", "#58a6ff", ("#f0883e", "#8b949e", "#bc8cff"))

Rows = Mapping[tuple[Any, ...], tuple[Run, Mapping[str, Any]]]


@dataclass(frozen=True)
class Curve:
    """One line of a plot: x, y by the size of a batch."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    ours: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot of a figure."""

    title: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    logarithmic: bool = True


@dataclass(frozen=True)
class Bars:
    """A group of horizontal bars: label and time in µs of each, ours first."""

    title: str
    bars: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Figure:
    """A figure: its file name, what it says without a picture, and what is drawn."""

    name: str
    alt: str
    draw: Sequence[Panel] | Sequence[Bars]


def digest(found: Sequence[Run]) -> str:
    """sha256 over the result files and over what draws them."""
    sources = [Path(__file__), Path(points.__file__), *(run.path for run in found)]
    parts = sorted((path.name, path.read_bytes()) for path in sources)
    whole = hashlib.sha256()
    for name, data in parts:
        whole.update(f"{name}\0{len(data)}\0".encode() + data)
    return whole.hexdigest()


# What the figures show


def figures(found: Sequence[Run]) -> Iterator[Figure]:
    """Every figure that the results have data for."""
    step = points.latest(found, "whole_step")
    if step:
        yield whole_step(step)
    gdn = points.latest(found, "gdn_replay")
    if gdn:
        yield gdn_latency(gdn)
    sparse = points.latest(found, "sparse_gqa_verify")
    if sparse:
        yield sparse_latency(sparse)
    if gdn and sparse:
        yield bandwidth(gdn, sparse)
        yield speed_up(gdn, sparse)


def whole_step(rows: Rows) -> Figure:
    """The step's time beside both peers, a group of bars a batch size."""
    groups = []
    for (dtype, requests), (_, row) in sorted(rows.items(), key=lambda item: item[0][::-1]):
        if dtype == "bf16":
            peers = [(PEERS[name], row[name]) for name in ("triton_replay_us", "state_a_token_us")]
            title = f"{requests} request{'s' * (requests != 1)}"
            groups.append(Bars(title, [("specplan", row["ours_us"]), *peers]))
    fastest = [min(t for _, t in g.bars[1:]) / g.bars[0][1] for g in groups]
    alt = (
        "Time of one verify step's launches in a CUDA graph: specplan takes "
        f"{min(fastest):.1f} to {max(fastest):.1f} times less than the faster Triton version"
    )
    return Figure("step", alt, groups)


def _curve(
    rows: Rows, where: Mapping[str, Any], x: str, column: str, label: str, **options: Any
) -> Curve | None:
    """The points of one column over x, of the rows that agree with ``where``."""
    found = sorted(
        (row[x], row[column])
        for _, row in rows.values()
        if all(row[name] == value for name, value in where.items())
        and isinstance(row.get(column), float)
    )
    if len(found) < 2:
        return None
    return Curve(label, [p[0] for p in found], [p[1] for p in found], **options)


def _there(*curves: Curve | None) -> list[Curve]:
    return [curve for curve in curves if curve is not None]


def gdn_latency(rows: Rows) -> Figure:
    """Latency over requests at 4 tokens, 16/32 heads."""
    panels = []
    for dtype in ("bf16", "fp32"):
        where = {"heads": "16/32", "dtype": dtype, "tokens": 4}
        curves = _there(
            _curve(rows, where, "requests", "ours_us", "specplan", ours=True),
            *(
                _curve(rows, where, "requests", name, PEERS[name])
                for name in ("triton_replay_us", "fla_us", "snapshots_us")
            ),
            _curve(rows, where, "requests", "floor_us", "bytes at 4.3 TB/s", dashed=True),
        )
        if curves:
            panels.append(
                Panel(f"{DTYPES[dtype]} state", curves, "requests of 4 tokens", "µs a launch")
            )
    return Figure(
        "gdn_replay",
        "gdn_replay.verify: time of a launch over the number of requests, beside its peers and "
        "the time that its bytes take",
        panels,
    )


def sparse_latency(rows: Rows) -> Figure:
    """Latency over rows at 90 % overlap, context 8192."""
    panels = []
    for dtype in ("bf16", "fp8_e4m3", "nvfp4"):
        where = {"dtype": dtype, "context": 8192, "overlap": 0.9}
        curves = _there(
            _curve(rows, where, "rows", "ours_us", "specplan", ours=True),
            _curve(rows, where, "rows", "triton_us", PEERS["triton_us"]),
            _curve(rows, where, "rows", "floor_us", "bytes at 4.3 TB/s", dashed=True),
        )
        if curves:
            panels.append(Panel(f"{DTYPES[dtype]} cache", curves, "rows", "µs a call"))
    return Figure(
        "sparse_gqa_verify",
        "sparse_gqa_verify: time of a call over the number of rows, beside a tuned Triton kernel "
        "and the time that the union of the lists takes",
        panels,
    )


def bandwidth(gdn: Rows, sparse: Rows) -> Figure:
    """Share of the copy ceiling that each family draws."""

    def share(curve: Curve | None, floor: Curve | None, label: str) -> Curve | None:
        if curve is None or floor is None:
            return None
        return Curve(label, curve.x, [100 * f / t for t, f in zip(curve.y, floor.y, strict=True)])

    left, right = [], []
    for dtype in ("bf16", "fp32"):
        where: dict[str, Any] = {"heads": "16/32", "dtype": dtype, "tokens": 4}
        left.append(
            share(
                _curve(gdn, where, "requests", "ours_us", ""),
                _curve(gdn, where, "requests", "floor_us", ""),
                f"{DTYPES[dtype]} state",
            )
        )
    for dtype in ("bf16", "fp8_e4m3", "nvfp4"):
        where = {"dtype": dtype, "context": 8192, "overlap": 0.9}
        right.append(
            share(
                _curve(sparse, where, "rows", "ours_us", ""),
                _curve(sparse, where, "rows", "floor_us", ""),
                f"{DTYPES[dtype]} cache",
            )
        )
    label = "% of 4.3 TB/s"
    return Figure(
        "bandwidth",
        "Share of 4.3 TB/s that gdn_replay.verify and sparse_gqa_verify draw, over the batch",
        [
            Panel("gdn_replay.verify", _there(*left), "requests of 4 tokens", label, False),
            Panel("sparse_gqa_verify", _there(*right), "rows", label, False),
        ],
    )


def speed_up(gdn: Rows, sparse: Rows) -> Figure:
    """Peer over ours, over the batch."""

    def over(rows: Rows, where: Mapping[str, Any], x: str, peer: str, label: str) -> Curve | None:
        ours, theirs = _curve(rows, where, x, "ours_us", ""), _curve(rows, where, x, peer, "")
        if ours is None or theirs is None or ours.x != theirs.x:
            return None
        return Curve(label, ours.x, [t / o for o, t in zip(ours.y, theirs.y, strict=True)])

    where = {"heads": "16/32", "dtype": "bf16", "tokens": 4}
    left = [
        over(gdn, where, "requests", name, PEERS[name]) for name in ("triton_replay_us", "fla_us")
    ]
    right = [
        over(
            sparse,
            {"dtype": dtype, "context": 8192, "overlap": 0.9},
            "rows",
            "triton_us",
            f"{PEERS['triton_us']}, {DTYPES[dtype]}",
        )
        for dtype in ("bf16", "fp8_e4m3")
    ]
    label = "peer's time / specplan's"
    return Figure(
        "speed_up",
        "How many times faster than each peer of the same run, over the batch",
        [
            Panel("gdn_replay.verify, BF16", _there(*left), "requests of 4 tokens", label, False),
            Panel("sparse_gqa_verify", _there(*right), "rows", label, False),
        ],
    )


# Drawing


def draw(figure: Figure, theme: Theme, stamp: str) -> str:
    """A figure as SVG text."""
    import io

    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": figure.name,
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": theme.text,
        "axes.labelcolor": theme.faint,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "axes.edgecolor": theme.grid,
        "grid.color": theme.grid,
    }
    with mpl.rc_context(style):
        bars = isinstance(figure.draw[0], Bars)
        count = len(figure.draw)
        size = (8.4, 0.3 + 0.95 * count) if bars else (4.2 * count, 3.5)
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasSVG(canvas)
        if bars:
            _draw_bars(canvas, figure.draw, theme)  # type: ignore[arg-type]
        else:
            axes = canvas.subplots(1, count, squeeze=False)[0]
            for ax, panel in zip(axes, figure.draw, strict=True):
                _draw_panel(ax, panel, theme)  # type: ignore[arg-type]
        text = io.StringIO()
        canvas.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = text.getvalue()
    at = svg.index("<svg")
    return f"{svg[:at]}<!-- drawn from {stamp} -->\n{svg[at:]}"


def _draw_bars(canvas: Any, groups: Sequence[Bars], theme: Theme) -> None:
    """Bars of a group are relative to its slowest one; times stand beside them."""
    axes = canvas.subplots(len(groups), 1, squeeze=False)[:, 0]
    colours = (theme.ours, *theme.peers)
    for ax, group in zip(axes, groups, strict=True):
        most = max(time for _, time in group.bars)
        for place, ((label, time), colour) in enumerate(zip(group.bars, colours, strict=False)):
            ax.barh(-place, time / most, height=0.72, color=colour)
            told = f"{time / 1000:.2f} ms" if time >= 1000 else f"{time:.0f} µs"
            more = "" if place == 0 else f", {time / group.bars[0][1]:.1f} times specplan's"
            ax.text(
                time / most + 0.008,
                -place,
                f"{label}: {told}{more}",
                va="center",
                fontsize=9,
                color=theme.text,
                fontweight="bold" if place == 0 else "normal",
            )
        ax.set_xlim(0, 1.75)
        ax.set_yticks([-(len(group.bars) - 1) / 2], [group.title])
        ax.set_xticks([])
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)


def _draw_panel(ax: Any, panel: Panel, theme: Theme) -> None:
    others = iter(theme.peers if any(c.ours for c in panel.curves) else (theme.ours, *theme.peers))
    for curve in panel.curves:
        colour = theme.ours if curve.ours else theme.faint if curve.dashed else next(others)
        ax.plot(
            curve.x,
            curve.y,
            color=colour,
            label=curve.label,
            linewidth=2.2 if curve.ours else 1.4,
            linestyle=":" if curve.dashed else "-",
            marker=None if curve.dashed else "o",
            markersize=4 if curve.ours else 3,
        )
    ax.set_title(panel.title, fontsize=11)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    ax.set_xscale("log", base=2)
    places = sorted({x for curve in panel.curves for x in curve.x})
    ax.set_xticks(places, [f"{x:g}" for x in places], fontsize=8)
    if panel.logarithmic:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        ax.set_ylim(bottom=0)
    ax.grid(True, axis="y", linewidth=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, fontsize=8, labelcolor=theme.text)


# The page


def picture(figure: Figure, folder: str = "") -> str:
    """Markdown that shows a figure in the colours of the reader's page."""
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" '
        f'srcset="{folder}{figure.name}-dark.svg">\n'
        f'<img alt="{figure.alt}" src="{folder}{figure.name}-light.svg">\n</picture>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _us(value: Any) -> str:
    if not isinstance(value, float):
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _times(row: Mapping[str, Any], ours: str, peers: Sequence[str]) -> list[str]:
    """Our time, then each peer's with its ratio to ours."""
    texts = [_us(row.get(ours))]
    for peer in peers:
        value = row.get(peer)
        told = f" ({value / row[ours]:.2f}x)" if isinstance(value, float) and ours in row else ""
        texts.append(_us(value) + told)
    return texts


def _section(
    title: str, rows: Rows, lead: str, columns: Sequence[str], ours: str, peers: Sequence[str],
    point: Callable[[tuple[Any, ...]], str], keep: Callable[[Mapping[str, Any]], bool],
) -> str:  # fmt: skip
    there = [
        peer for peer in peers if any(isinstance(r.get(peer), float) for _, r in rows.values())
    ]
    body = [
        [point(at), *_times(row, ours, there)]
        for at, (_, row) in rows.items()
        if keep(row) and isinstance(row.get(ours), float)
    ]
    if not body:
        return ""
    places = sorted({run.where for at, (run, row) in rows.items() if keep(row)})
    head = [*columns, "specplan, µs", *(PEERS.get(p, p) for p in there)]
    return f"## {title}\n\n{lead} Measured on {'; '.join(places)}.\n\n{table(head, body)}\n"


def _counts(rows: Rows) -> str:
    """Launches and nodes between two steps, in words."""
    said = [
        f" {row['requests']} requests: {row['torch_launches']} launches and {row['torch_nodes']} "
        f"nodes of torch, {row['ours_launches']} and {row['ours_nodes']} of ours."
        for _, row in rows.values()
    ]
    return "".join(said)


def page(found: Sequence[Run], drawn: Sequence[Figure], stamp: str) -> str:
    """The Markdown page."""
    by_name = {figure.name: picture(figure) for figure in drawn}
    step, gdn = points.latest(found, "whole_step"), points.latest(found, "gdn_replay")
    sparse = points.latest(found, "sparse_gqa_verify")
    rollback, copies = points.latest(found, "rollback"), points.latest(found, "step_copies")
    accept, setup = points.latest(found, "accept"), points.latest(found, "step_setup")
    between = points.latest(found, "between_steps")

    def always(row: Mapping[str, Any]) -> bool:
        return True

    parts = [
        f"<!-- Written by `python -m benchmarks report` from {stamp}. Do not edit. -->",
        "# Benchmarks",
        "Generated from the result files in [`benchmarks/results`](../../benchmarks/results) "
        "alone; method and history: [`benchmarks/README.md`](../../benchmarks/README.md). All "
        "arms of a table row ran in one process on the same inputs, after each had been compared "
        "with ours. Absolute times differ between machines, ratios in brackets (peer over "
        "specplan) travel.",
    ]
    sections = [
        ("step", _section(
            "The whole step", step,
            "One CUDA graph: gather, rollback.gather, 36 gdn_replay.verify (16/32 heads, BF16 "
            "state, histories drawn row by row), 12 sparse_gqa_verify (24/2 heads, lists of 2051 "
            "of 8192 tokens), rollback.restore, advance, scatter; 4 tokens per request; no matrix "
            "products between. The peers are the same step written by hand in Triton; FlashInfer's "
            "flush replay, a stronger peer of gdn_replay in mixed batches, is not among them yet.",
            ["cache, requests"], "ours_us", ["triton_replay_us", "state_a_token_us"],
            lambda at: f"{DTYPES[at[0]]}, {at[1]}", always)),
        ("gdn_replay", _section(
            "gdn_replay.verify, mixed batches", gdn,
            "16/32 heads; histories drawn row by row, so that some rows commit, as in a server.",
            ["state, tokens, requests"], "ours_mixed_us", ["triton_replay_mixed_us"],
            lambda at: f"{DTYPES[at[1]]}, {at[2]}, {at[3]}", lambda r: r["heads"] == "16/32")),
        ("", _section(
            "gdn_replay.verify, plain and committing steps weighted", gdn,
            "16/32 heads; steps in which no row commits and steps in which every row does, timed "
            "apart and weighted by the commit rate of a simulated run.",
            ["state, tokens, requests"], "ours_us",
            ["triton_replay_us", "fla_us", "snapshots_us"],
            lambda at: f"{DTYPES[at[1]]}, {at[2]}, {at[3]}", lambda r: r["heads"] == "16/32")),
        ("sparse_gqa_verify", _section(
            "sparse_gqa_verify", sparse,
            "24/2 heads, page 32, lists of 2051 tokens, 4 rows per request, gate fused.",
            ["cache, context, overlap, rows"], "ours_us", ["triton_us", "torch_us"],
            lambda at: f"{DTYPES[at[0]]}, {at[1]}, {at[2]:.0%}, {at[3]}", always)),
        ("", _section(
            "rollback.gather", rollback, "13 planes, places random.", ["rows"],
            "graph_gather_us", ["graph_torch_gather_us"], lambda at: str(at[0]), always)),
        ("", _section(
            "rollback.restore", rollback, "Half of the rows rejected.", ["rows"],
            "graph_restore_us", ["graph_torch_restore_us"], lambda at: str(at[0]), always)),
        ("", _section(
            "scatter and gather", copies, "A node of a CUDA graph, L2 warm.",
            ["op, requests, tokens"], "graph_ours_us", ["graph_torch_us"],
            lambda at: f"{at[0]}, {at[1]}, {at[2]}", always)),
        ("", _section(
            "Everything between two decode steps", between,
            "stage, step_setup, rollback.gather, accept from ready tokens, rollback.commit, three "
            "times draft_step, scatter, in a CUDA graph; no model between."
            f"{_counts(between)}",
            ["requests, tokens"], "graph_ours_us", ["graph_torch_us"],
            lambda at: f"{at[0]}, {at[1]}", always)),
        ("", _section(
            "accept from logits", accept,
            "With next token, rows, lengths, positions and cursors; a node of a CUDA graph.",
            ["logits, columns, requests, tokens"], "graph_ours_us", points.BOOKKEEPING,
            lambda at: f"{DTYPES[at[0]]}, {at[1]:,}, {at[2]}, {at[3]}", always)),
        ("", _section(
            "step_setup, draft_step and stage", setup,
            "A node of a CUDA graph, L2 warm; stage reads pinned memory of the host.",
            ["op, size"], "graph_ours_us", points.BOOKKEEPING,
            lambda at: f"{at[0]}, {at[1]}", always)),
        ("", _section(
            "Host time of a call", copies, "The public call, by a loop that never waits.",
            ["op, requests, tokens"], "host_op_us",
            ["host_bare_us", "host_bind_us", "host_raw_us", "host_torch_us"],
            lambda at: f"{at[0]}, {at[1]}, {at[2]}", always)),
    ]  # fmt: skip
    for name, text in sections:
        if text:
            head, _, rest = text.partition("\n\n")
            shown = f"{by_name[name]}\n\n" if name in by_name else ""
            parts.append(f"{head}\n\n{shown}{rest}".rstrip())
    more = [by_name[name] for name in ("speed_up", "bandwidth") if name in by_name]
    if more:
        parts.append("## Speed-up and bandwidth\n\n" + "\n\n".join(more))
    return "\n\n".join(parts) + "\n"


def write(found: Sequence[Run], out: Path) -> Sequence[Path]:
    """Write the page and the figures; returns the files.

    Raises
    ------
    ImportError
        matplotlib is not there.
    """
    stamp, drawn = digest(found), list(figures(found))
    files = {
        out / f"{figure.name}-{theme.name}.svg": draw(figure, theme, stamp)
        for figure in drawn
        for theme in (LIGHT, DARK)
    }
    files[out / "README.md"] = page(found, drawn, stamp)
    out.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


def differences(found: Sequence[Run], out: Path) -> Sequence[str]:
    """How the pages in a directory differ from what the results give; needs no drawing library."""
    stamp, drawn = digest(found), list(figures(found))
    wrong = []
    text = page(found, drawn, stamp)
    at = out / "README.md"
    if not at.is_file() or at.read_text(encoding="utf-8") != text:
        wrong.append(f"{at} is not what the results give; python -m benchmarks report")
    for figure in drawn:
        for theme in (LIGHT, DARK):
            path = out / f"{figure.name}-{theme.name}.svg"
            if not path.is_file() or f"drawn from {stamp}" not in path.read_text(encoding="utf-8"):
                wrong.append(f"{path} is of other data or code; python -m benchmarks report")
    return wrong
