"""Who guesses the tokens that a step verifies. A wrong guess costs time and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol


class Drafter(Protocol):
    """Guesses the next tokens of a request."""

    def draft(self, request: int, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` guesses after ``tokens``; fewer where there is nothing to go by."""
        ...


class PromptLookup:
    """What came after the last earlier place where the same few tokens stand."""

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def draft(self, request: int, tokens: Sequence[int], count: int) -> list[int]:
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            tail = list(tokens[-length:])
            for start in range(len(tokens) - length - 1, -1, -1):
                if list(tokens[start : start + length]) == tail:
                    return list(tokens[start + length : start + length + count])
        return []


class Oracle:
    """Knows what each request will say, and says it with a set agreement: to measure with."""

    def __init__(
        self, answers: dict[int, list[int]], agreement: float, vocabulary: int, seed: int = 0
    ) -> None:
        self.answers, self.agreement, self.vocabulary = answers, agreement, vocabulary
        self.chance = Random(seed)

    def draft(self, request: int, tokens: Sequence[int], count: int) -> list[int]:
        coming = self.answers[request][len(tokens) : len(tokens) + count]
        return [
            t if self.chance.random() < self.agreement else (t + 1) % self.vocabulary
            for t in coming
        ]
