"""The engine of ``examples/engine`` on a model of a few layers, on a CPU."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def model() -> Any:
    """transformers' Qwen3-Next with random weights, cut for the engine."""
    for needed in ("torch", "transformers"):
        pytest.importorskip(needed)
    sys.path.insert(0, str(EXAMPLES))
    warnings.filterwarnings("ignore", category=FutureWarning)
    import torch

    from engine.model import HybridModel, load

    return HybridModel(load("tiny", torch.device("cpu")))
