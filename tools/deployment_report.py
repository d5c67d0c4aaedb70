"""The answer about a deployment as text, Markdown and JUnit XML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree

from specplan.plans import ranges
from specplan.plans.deployment import Answer, Reached
from specplan.plans.servers import Derived


def _groups(answer: Answer) -> list[tuple[Reached, int, list[int]]]:
    """Holes that differ only in requests, together: one of them, the tokens, all the requests."""
    found: dict[tuple[object, ...], tuple[Reached, list[int]]] = {}
    for hole in answer.holes:
        cell = hole.cell
        geometry = tuple(hole.geometry.values())
        alike = (cell.family, cell.problem, geometry, cell.dtype, cell.arch, cell.tokens)
        at = (*alike, hole.state, hole.reason)
        found.setdefault(at, (hole, []))[1].append(cell.requests)
    return [(first, first.cell.tokens, requests) for first, requests in found.values()]


def _summary(answer: Answer) -> str:
    deployment = answer.deployment
    counts = Counter(cell.state for cell in answer.cells)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    requests, tokens = ranges.spell(deployment.requests), ranges.spell(deployment.tokens)
    return (
        f"{len(answer.cells)} cells reachable on {', '.join(deployment.archs)} "
        f"(requests {requests}; tokens {tokens}): {states}"
    )


def text(answer: Answer) -> str:
    """For people: what can be reached, and each hole with its reason and what is nearest."""
    lines = [_summary(answer)]
    lines += [f"does not hold: {complaint}" for complaint in answer.complaints]
    several = len(answer.deployment.archs) > 1
    for hole, tokens, requests in _groups(answer):
        cell = hole.cell
        where = f" on {cell.arch}" if several else ""
        lines.append(
            f"hole: {cell.family} {cell.problem} {cell.dtype} requests={ranges.spell(requests)} "
            f"tokens={tokens}{where}: {hole.state}: {hole.reason}"
        )
        lines += [f"      nearest certified: {near}" for near in hole.near]
    lines.append("every reachable cell is certified and built" if answer.holds else "not covered")
    return "\n".join(lines)


def markdown(answer: Answer) -> str:
    """A table of holes, for a pull request's comment."""
    lines = [_summary(answer), ""]
    lines += [f"- does not hold: {complaint}" for complaint in answer.complaints]
    if answer.holds:
        return "\n".join([*lines, "Every reachable cell is certified and built."])
    lines += [
        "| family | problem | dtype | requests | tokens | state | reason | nearest certified |",
        "| --- | --- | --- | --- | ---: | --- | --- | --- |",
    ]
    for hole, tokens, requests in _groups(answer):
        cell = hole.cell
        near = "; ".join(str(found) for found in hole.near) or "none"
        row: Sequence[str] = (
            cell.family,
            cell.problem,
            cell.dtype,
            ranges.spell(requests),
            str(tokens),
            hole.state,
            hole.reason,
            near,
        )
        lines.append(f"| {' | '.join(value.replace('|', '/') for value in row)} |")
    return "\n".join(lines)


def junit(answer: Answer) -> str:
    """One test case a reachable cell, so that a CI shows the holes as failures."""
    failures = len(answer.holes) + len(answer.complaints)
    suite = ElementTree.Element(
        "testsuite",
        name=f"specplan deployment on {', '.join(answer.deployment.archs)}",
        tests=str(len(answer.cells) + len(answer.complaints)),
        failures=str(failures),
    )
    for complaint in answer.complaints:
        case = ElementTree.SubElement(suite, "testcase", classname="pack", name="pack")
        ElementTree.SubElement(case, "failure", message=complaint)
    for reached in answer.cells:
        cell = reached.cell
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{cell.family}.{cell.problem}", name=str(cell)
        )
        if not reached.holds:
            message = f"{reached.state}: {reached.reason}"
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = "\n".join(f"nearest certified: {near}" for near in reached.near)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def share(answer: Answer) -> str:
    """How much of what can be reached is certified and built."""
    held = len(answer.cells) - len(answer.holes)
    percent = f" ({100 * held / len(answer.cells):.1f} %)" if answer.cells else ""
    return f"certified and built: {held} of {len(answer.cells)} reachable cells{percent}"


def of_model(derived: Derived, answer: Answer, form: str) -> str:
    """The answer about a derived deployment, with the deployment before it."""
    if form == "junit":
        return junit(answer)
    body = FORMS[form](answer)
    fence = ["```yaml", derived.text.rstrip(), "```"] if form == "markdown" else []
    notes = [f"- {note}" if form == "markdown" else f"note: {note}" for note in derived.notes]
    shown = fence or [derived.text.rstrip()]
    head = [*shown, "", *notes, ""] if derived.text else [*notes]
    return "\n".join([*head, share(answer), *([""] if form == "markdown" else []), body])


FORMS: Mapping[str, Callable[[Answer], str]] = {
    "text": text,
    "markdown": markdown,
    "junit": junit,
}
