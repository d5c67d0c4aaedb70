"""Reading YAML strictly: every complaint has file, line, column and the nearest valid spelling.

Nodes are walked instead of the values that they stand for, because a node knows its place in the
file and a value does not, and because a mapping of values has lost its duplicate keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import yaml
from specplan.plans import ranges

#: libyaml where PyYAML has it: the same nodes, ten times faster.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class LocatedError(ValueError):
    """A file does not say what it may say; the message has file, line and column."""

    def __init__(self, source: str, mark: yaml.Mark | None, problem: str) -> None:
        self.source = source
        self.line = mark.line + 1 if mark else 0
        self.column = mark.column + 1 if mark else 0
        self.problem = problem
        where = f"{source}:{self.line}:{self.column}" if mark else source
        super().__init__(f"{where}: {problem}")


class Reader:
    """Checks the shapes of YAML nodes; subclasses know what they mean, and raise ``error``."""

    error: type[LocatedError] = LocatedError

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, node: yaml.Node, problem: str) -> LocatedError:
        """The error at a node's place, to raise."""
        return self.error(self.source, node.start_mark, problem)

    def compose(self, text: str, what: str) -> yaml.Node:
        """The root node of a text that is not empty."""
        try:
            node = yaml.compose(text, Loader=_LOADER)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            detail = getattr(error, "problem", None) or str(error)
            raise self.error(self.source, mark, f"not YAML: {detail}") from error
        except RecursionError as error:
            raise self.error(self.source, None, f"not {what}: nested too deeply") from error
        except UnicodeEncodeError as error:
            raise self.error(self.source, None, f"not YAML: {error}") from error
        if node is None:
            raise self.error(self.source, None, "is empty")
        return node

    def mapping(self, node: yaml.Node, what: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, f"{what} must be a mapping")
        items: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.fail(key, f"a key of {what} must be a plain word")
            if key.value in items:
                raise self.fail(key, f"{key.value!r} stands twice in {what}")
            items[key.value] = (key, value)
        return items

    def record(
        self, node: yaml.Node, what: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> dict[str, yaml.Node]:
        items = self.mapping(node, what)
        known = (*required, *optional)
        for name, (key, _) in items.items():
            if name not in known:
                raise self.fail(key, f"unknown key {name!r} in {what}{suggest(name, known)}")
        for name in required:
            if name not in items:
                raise self.fail(node, f"{what} lacks {name!r}")
        return {name: value for name, (_, value) in items.items()}

    def text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
            raise self.fail(node, f"{what} must be a non-empty text")
        return str(node.value).strip()

    def boolean(self, node: yaml.Node, what: str) -> bool:
        if not isinstance(node, yaml.ScalarNode) or node.value not in ("true", "false"):
            raise self.fail(node, f"{what} must be true or false")
        return bool(node.value == "true")

    def words(self, node: yaml.Node, what: str) -> tuple[tuple[str, yaml.Node], ...]:
        """One plain word or a list of them, each once, with the node that has it."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values: dict[str, yaml.Node] = {}
        for item in nodes:
            word = self.text(item, what)
            if word in values:
                raise self.fail(item, f"{what} names {word!r} twice")
            values[word] = item
        if not values:
            raise self.fail(node, f"{what} is empty")
        return tuple(values.items())

    def integer(self, node: yaml.Node, what: str, low: int, high: int) -> int:
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:int":
            raise self.fail(node, f"{what} must be an integer")
        try:
            value = int(yaml.SafeLoader("").construct_yaml_int(node))
        except (ValueError, IndexError) as error:  # IndexError: an empty scalar tagged !!int
            raise self.fail(node, f"{what} must be an integer") from error
        if not low <= value <= high:
            raise self.fail(node, f"{what} is {value}, outside {low}..{high}")
        return value

    def integers(self, node: yaml.Node, what: str, low: int, high: int) -> tuple[int, ...]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values: set[int] = set()
        for item in nodes:
            if not isinstance(item, yaml.ScalarNode):
                raise self.fail(item, f"{what} must be integers or ranges such as 1..256")
            try:
                part = ranges.parse(item.value)
            except ValueError as error:
                raise self.fail(item, f"{what}: {error}") from error
            for value in part:
                if not low <= value <= high:
                    raise self.fail(item, f"{what} has {value}, outside {low}..{high}")
                if value in values:
                    raise self.fail(item, f"{what} has {value} twice")
            values.update(part)
        if not values:
            raise self.fail(node, f"{what} is empty")
        return tuple(sorted(values))

    def names(
        self, node: yaml.Node, what: str, known: Iterable[str], *, empty: bool = False
    ) -> tuple[str, ...]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        known = tuple(known)
        values: list[str] = []
        for item in nodes:
            if not isinstance(item, yaml.ScalarNode) or item.value not in known:
                name = item.value if isinstance(item, yaml.ScalarNode) else "..."
                raise self.fail(item, f"{what}: unknown name {name!r}{suggest(name, known)}")
            if item.value in values:
                raise self.fail(item, f"{what} names {item.value!r} twice")
            values.append(item.value)
        if not values and not empty:
            raise self.fail(node, f"{what} is empty")
        return tuple(values)


def suggest(name: Any, known: Iterable[str]) -> str:
    known = tuple(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}"
