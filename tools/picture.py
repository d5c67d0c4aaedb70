"""The picture of a coverage, as SVG and as a page of HTML: no script, nothing fetched from
anywhere, light and dark, and every colour with a pattern and a word of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import NamedTuple

from specplan.plans import ranges
from specplan.plans.coverage import Coverage
from specplan.tools.grids import KINDS, PLANNED, Grid, Kind, Patch, Strip


class Colours(NamedTuple):
    """A pattern's paper and ink, and the one colour where a pattern has no room."""

    paper: str
    ink: str
    thin: str


@dataclass(frozen=True)
class Look:
    """A kind's colours on white and on black (Okabe and Ito's hues, which the colour-blind tell
    apart, and far apart in lightness), and the lines of its pattern in a tile of 6 x 6.
    """

    light: Colours
    dark: Colours
    lines: str


LOOKS: Mapping[str, Look] = {
    "certified": Look(
        Colours("#0072b2", "#0072b2", "#0072b2"), Colours("#3d9fe0", "#3d9fe0", "#3d9fe0"), ""
    ),
    "candidate": Look(
        Colours("#f8dc9c", "#b97d00", "#d69a1c"),
        Colours("#3d2d08", "#d9a02a", "#d9a02a"),
        "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    ),
    "unproven": Look(
        Colours("#56b4e9", "#ffffff", "#56b4e9"),
        Colours("#12384d", "#7cc8f2", "#7cc8f2"),
        "M3,0 v6 M0,3 h6",
    ),
    "missing": Look(
        Colours("#ffffff", "#d55e00", "#d55e00"),
        Colours("#14171a", "#ff8440", "#ff8440"),
        "M0,0 l6,6 M0,6 l6,-6",
    ),
    "unbuilt": Look(
        Colours("#ededed", "#8a8a8a", "#a3a3a3"),
        Colours("#2a3035", "#98a1a8", "#98a1a8"),
        "M1.5,1.5 h1.5 M4.5,4.5 h1.5",
    ),
    "stale": Look(
        Colours("#cc79a7", "#4d1f38", "#cc79a7"),
        Colours("#4d1f38", "#e39cc3", "#e39cc3"),
        "M0,1.5 h6 M0,4.5 h6",
    ),
    "corrupt": Look(
        Colours("#000000", "#ffffff", "#000000"),
        Colours("#ffffff", "#000000", "#ffffff"),
        "M1.5,0 v6 M4.5,0 v6",
    ),
}

#: The sign before a count, so that a kind can be told without its colour or pattern.
SIGNS: Mapping[str, str] = {
    "certified": "\N{BLACK SQUARE}",
    "candidate": "\N{SQUARE WITH UPPER RIGHT TO LOWER LEFT FILL}",
    "unproven": "\N{SQUARE WITH ORTHOGONAL CROSSHATCH FILL}",
    "missing": "\N{MULTIPLICATION X}",
    "unbuilt": "\N{WHITE SQUARE}",
    "stale": "\N{SQUARE WITH HORIZONTAL FILL}",
    "corrupt": "\N{SQUARE WITH VERTICAL FILL}",
}

LABEL, PLOT, GAP, EDGE = 196, 256, 28, 20
#: Height of one line of tokens, and the widths below which a patch has no pattern, and no less.
LINE, NARROW, LEAST = 4, 5, 1.6
#: Width of a bar of the overview.
BAR = 104

_STYLE = """
.sp-page{fill:#ffffff}.sp-plot{fill:#f7f7f7;stroke:#c8c8c8}
.sp-text{fill:#1b1b1b}.sp-dim{fill:#5a5a5a}.sp-bad{fill:#a23c00}.sp-rule{stroke:#c8c8c8}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
@media (prefers-color-scheme:dark){
.sp-page{fill:#14171a}.sp-plot{fill:#1f2428;stroke:#4a5157}
.sp-text{fill:#ececec}.sp-dim{fill:#a9b1b8}.sp-bad{fill:#ff9d66}.sp-rule{stroke:#4a5157}
%s}
"""


class _Drawing:
    """Collects the elements of an SVG."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, kind: str = "text", size: int = 11, more: str = ""
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="sp-{kind}" font-size="{size}"{more}>'
            f"{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, what: str, title: str = ""
    ) -> None:
        inside = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {what}{inside}'
        )

    def swatch(self, kind: Kind, x: float, y: float, width: float, height: float) -> None:
        self.box(x, y, width, height, f'fill="url(#sp-{kind.name})" class="sp-rule"')


def svg(coverage: Coverage, found: Sequence[Grid]) -> str:
    """The whole picture as one SVG document.

    Parameters
    ----------
    coverage
        What coverage found; its archs are the columns.
    found
        Its grids, from :func:`specplan.tools.grids.grids`.
    """
    archs = _archs(coverage)
    width = EDGE * 2 + LABEL + len(archs) * (PLOT + GAP) - GAP
    drawing = _Drawing()
    y = _legend(drawing, found, archs, coverage, width)
    y = _overview(drawing, found, archs, y + 30, width)
    for grid in found:
        y = _grid(drawing, grid, archs, y + 34, width)
    height = y + EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-labelledby="sp-title sp-about">\n'
        '<title id="sp-title">specplan coverage</title>\n'
        f'<desc id="sp-about">{escape(_verdict(found, archs, coverage))}</desc>\n'
        f"<style>{_STYLE % _dark()}</style>\n<defs>{''.join(map(_pattern, KINDS))}</defs>\n"
        f'<rect width="{width:g}" height="{height:g}" class="sp-page"/>\n'
        + "\n".join(drawing.parts)
        + "\n</svg>\n"
    )


def html(coverage: Coverage, found: Sequence[Grid]) -> str:
    """The picture as a page, with a table of counts and the complaints above it."""
    archs = _archs(coverage)
    wrong = "".join(f"<li>{escape(line)}</li>" for line in coverage.complaints)
    complaints = f"<h2>Does not hold</h2>\n<ul>{wrong}</ul>\n" if wrong else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>specplan coverage</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n"
        f'<div class="picture">{svg(coverage, found)}</div>\n{complaints}'
        f"<h2>Cells by family, dtype and arch</h2>\n{_table(found, archs)}\n</body>\n</html>\n"
    )


def _archs(coverage: Coverage) -> list[str]:
    return list(dict.fromkeys(row.cell.arch for row in coverage.rows))


_PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:24px;background:#ffffff;color:#1b1b1b;
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px}
table{border-collapse:collapse;margin:16px 0;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px;border-bottom:1px solid #c8c8c8;text-align:right}
th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}
.picture{overflow-x:auto}.picture svg{max-width:100%;height:auto}
.broken{font-weight:bold}
@media (prefers-color-scheme:dark){body{background:#14171a;color:#ececec}
th,td{border-color:#4a5157}}
"""


def _total(found: Sequence[Grid], archs: Sequence[str]) -> Counter[Kind]:
    return sum((grid.counts(arch) for grid in found for arch in archs), Counter[Kind]())


def _verdict(found: Sequence[Grid], archs: Sequence[str], coverage: Coverage) -> str:
    total = _total(found, archs)
    cells = f"{total.total():,} cells on {', '.join(archs)}"
    broken = sum(count for kind, count in total.items() if not kind.holds)
    if broken:
        return f"{cells}: {broken:,} claims of the catalog do not hold"
    if not coverage.holds:
        return f"{cells}: every cell's claim holds, but {'; '.join(coverage.complaints)}"
    return f"{cells}: every claim of the catalog holds"


def _table(found: Sequence[Grid], archs: Sequence[str]) -> str:
    """Family, dtype and arch with a column a kind; kinds that no cell is of are left out."""
    total = _total(found, archs)
    kinds = [kind for kind in KINDS if total[kind]]
    head = "".join(
        f"<th>{SIGNS[kind.name]} {escape(kind.label)}</th>"
        if kind.holds
        else f'<th class="broken">{SIGNS[kind.name]} {escape(kind.label)}</th>'
        for kind in kinds
    )
    rows = []
    for grid in found:
        for arch in archs:
            counts = grid.counts(arch)
            if counts:
                numbers = "".join(
                    f"<td>{counts[kind]:,}</td>" if counts[kind] else "<td></td>" for kind in kinds
                )
                rows.append(
                    f"<tr><td>{escape(grid.family)}</td><td>{escape(grid.dtype)}</td>"
                    f"<td>{escape(arch)}</td>{numbers}<td>{counts.total():,}</td></tr>"
                )
    return (
        f"<table>\n<thead><tr><th>family</th><th>dtype</th><th>arch</th>{head}<th>cells</th></tr>"
        "</thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>"
    )


def _pattern(kind: Kind) -> str:
    """A kind's tile; the colours here are the light ones, and the style has the dark ones."""
    look, name = LOOKS[kind.name], kind.name
    lines = (
        f'<path d="{look.lines}" stroke="{look.light.ink}" class="sp-{name}-ink" '
        'stroke-width="1.2" fill="none"/>'
        if look.lines
        else ""
    )
    return (
        f'<pattern id="sp-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{look.light.paper}" class="sp-{name}-paper"/>'
        f"{lines}</pattern>"
    )


def _dark() -> str:
    return "\n".join(
        f".sp-{name}-paper{{fill:{look.dark.paper}}}.sp-{name}-ink{{stroke:{look.dark.ink}}}"
        f".sp-{name}-thin{{fill:{look.dark.thin}}}"
        for name, look in LOOKS.items()
    )


def _legend(
    drawing: _Drawing,
    found: Sequence[Grid],
    archs: Sequence[str],
    coverage: Coverage,
    width: float,
) -> float:
    """Title, verdict, what the marks mean and how to read a plot; returns where it ends."""
    total = _total(found, archs)
    drawing.text(EDGE, EDGE + 14, "specplan coverage", size=20, more=' font-weight="bold"')
    drawing.text(
        EDGE,
        EDGE + 36,
        _verdict(found, archs, coverage),
        "text" if coverage.holds else "bad",
        size=14,
    )
    x, y = float(EDGE), EDGE + 52.0
    for kind in KINDS:
        if total[kind]:
            words = f"{SIGNS[kind.name]} {kind.label}: {total[kind]:,} cells"
            needed = 36 + len(words) * 6.6 + 16
            if x + needed > width - EDGE:
                x, y = float(EDGE), y + 24
            drawing.swatch(kind, x, y, 28, 16)
            drawing.text(x + 34, y + 12.5, words, size=12)
            x += needed
    if x + 190 > width - EDGE:
        x, y = float(EDGE), y + 24
    drawing.box(x, y, 28, 16, 'class="sp-plot"')
    drawing.text(x + 34, y + 12.5, "not in the catalog: declined", size=12)
    return y + 16


def _overview(
    drawing: _Drawing, found: Sequence[Grid], archs: Sequence[str], y: float, width: float
) -> float:
    """A bar for each family, dtype and arch, parted by kind; returns where it ends."""
    _heads(drawing, archs, y)
    for grid in found:
        y += 19
        drawing.text(EDGE, y, f"{grid.family}, {grid.dtype}")
        for column, arch in enumerate(archs):
            counts = grid.counts(arch)
            x = float(_left(column))
            for kind in KINDS:
                if counts[kind]:
                    part = BAR * counts[kind] / counts.total()
                    title = f"{counts[kind]:,} cells {kind.label}"
                    drawing.box(x, y - 10, part, 12, f'fill="url(#sp-{kind.name})"', title)
                    x += part
            _counts(drawing, counts, _left(column) + BAR + 8, y)
    y += 12
    for line in wrap(_READING, int((width - 2 * EDGE) / 6)):
        y += 14
        drawing.text(EDGE, y, line, "dim")
    return y + 4


_READING = (
    "Below, each plot is one problem on one arch: requests of a batch to the right, tokens a "
    "request downwards. Planned: the splits that the planning rule chooses; forced: others that a "
    "caller may name."
)


def _heads(drawing: _Drawing, archs: Sequence[str], y: float) -> None:
    for column, arch in enumerate(archs):
        drawing.text(_left(column), y, arch, size=13, more=' font-weight="bold"')


def _counts(
    drawing: _Drawing, counts: Counter[Kind], x: float, y: float, *, names: bool = False
) -> None:
    """How many cells of each kind, with its sign and perhaps its name."""
    words = "   ".join(
        f"{SIGNS[kind.name]} {counts[kind]:,}" + (f" {kind.name}" if names else "")
        for kind in KINDS
        if counts[kind]
    )
    broken = any(not kind.holds for kind in counts)
    drawing.text(x, y, words or "no cells", "bad" if broken else "dim", 10)


def _grid(drawing: _Drawing, grid: Grid, archs: Sequence[str], y: float, width: float) -> float:
    """One family and dtype; returns where it ends."""
    more = ' font-weight="bold"'
    drawing.parts.append(
        f'<line x1="{EDGE}" y1="{y - 14:g}" x2="{width - EDGE:g}" y2="{y - 14:g}" class="sp-rule"/>'
    )
    drawing.text(EDGE, y + 6, f"{grid.family}, {grid.dtype}", size=15, more=more)
    y += 24
    _heads(drawing, archs, y)
    y += 6
    for strip in grid.strips:
        y = _strip(drawing, grid, strip, archs, y)
    drawing.text(_left(0) - 12, y + 10, "requests", "dim", 9, ' text-anchor="end"')
    for column, _ in enumerate(archs):
        _axis(drawing, _left(column), y, grid.most_requests)
    return y + 16


def _left(column: int) -> float:
    return EDGE + LABEL + column * (PLOT + GAP)


def _axis(drawing: _Drawing, x: float, y: float, most: int) -> None:
    """Ticks of requests under the last strip."""
    step = PLOT / most
    marks = [1, *(most * quarter // 4 for quarter in (1, 2, 3, 4))] if most >= 8 else [1, most]
    for mark in dict.fromkeys(marks):
        at = x + (mark - 0.5) * step
        drawing.parts.append(
            f'<line x1="{at:g}" y1="{y - 4:g}" x2="{at:g}" y2="{y:g}" class="sp-rule"/>'
        )
        drawing.text(at, y + 10, str(mark), "dim", 9, ' text-anchor="middle"')


def _strip(drawing: _Drawing, grid: Grid, strip: Strip, archs: Sequence[str], y: float) -> float:
    """The problems that look alike, with a plot an arch; returns where the strip ends."""
    top = y + 14
    starts: dict[int, float] = {}
    at = top
    for band, tokens in strip.bands.items():
        starts[band] = at
        at += len(tokens) * LINE + 3
    names = _wrapped(strip.problems, 22)
    for number, line in enumerate(names):
        drawing.text(EDGE, top + 8 + 12 * number, line)
    left = _left(0)
    drawing.text(left - 5, top - 4, "tokens", "dim", 8, ' text-anchor="end"')
    for band, start in starts.items():
        tokens = strip.bands[band]
        if len(strip.bands) > 1:
            name = "planned" if band == PLANNED else f"{band} splits, forced"
            drawing.text(left - 36, start + 8, name, "dim", 9, ' text-anchor="end"')
        few = len(tokens) * LINE < 16
        drawing.text(
            *(left - 5, start + 7, ranges.spell(tokens) if few else str(tokens[0])),
            *("dim", 8, ' text-anchor="end"'),
        )
        if not few:
            end = start + len(tokens) * LINE
            drawing.text(left - 5, end, str(tokens[-1]), "dim", 8, ' text-anchor="end"')
    for column, arch in enumerate(archs):
        drawing.parts.append(
            f'<g data-family="{grid.family}" data-dtype="{grid.dtype}" data-arch="{arch}">'
        )
        _counts(drawing, strip.counts(arch), _left(column), top - 4, names=True)
        for band, start in starts.items():
            _plot(drawing, grid, strip, band, arch, _left(column), start)
        drawing.parts.append("</g>")
    return max(at, top + 12 * len(names)) + 3


def _wrapped(names: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for number, name in enumerate(names):
        word = name + ("," if number < len(names) - 1 else "")
        if lines[-1] and len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _plot(
    drawing: _Drawing, grid: Grid, strip: Strip, band: int, arch: str, x: float, y: float
) -> None:
    """The cells of one band on one arch."""
    lines = strip.bands[band]
    drawing.box(x - 0.5, y - 0.5, PLOT + 1, len(lines) * LINE + 1, 'class="sp-plot"')
    step = PLOT / grid.most_requests
    for patch in strip.plots.get((band, arch), ()):
        first, last = patch.requests
        width = (last - first + 1) * step
        name = patch.kind.name
        fill = f'fill="url(#sp-{name})"'
        if width < NARROW:
            fill = f'fill="{LOOKS[name].light.thin}" class="sp-{name}-thin"'
        drawing.box(
            x + (first - 1) * step,
            y + lines.index(patch.tokens[0]) * LINE,
            max(width, LEAST),
            len(patch.tokens) * LINE,
            f'{fill} data-kind="{name}" data-cells="{patch.cells}"',
            _title(patch, band, arch, strip),
        )


def _title(patch: Patch, band: int, arch: str, strip: Strip) -> str:
    """What a patch says when pointed at."""
    which = "planned" if band == PLANNED else "forced"
    of = f" of {len(strip.problems)} problems" if len(strip.problems) > 1 else ""
    return (
        f"{arch}, requests {_span(*patch.requests)}, tokens {ranges.spell(patch.tokens)}, "
        f"splits {_span(*patch.splits)} {which}: {patch.kind.label} ({patch.cells:,} cells{of})"
    )


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"
