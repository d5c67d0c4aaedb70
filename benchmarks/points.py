"""What the result files say, point by point: ours and its peers of the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Metric:
    """One figure of a benchmark's rows: our column, and the columns of its peers."""

    name: str
    ours: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's rows are told apart, and what they measure."""

    keys: tuple[str, ...]
    metrics: tuple[Metric, ...]


#: Peers of the ops of a step's bookkeeping.
BOOKKEEPING = ("graph_triton_us", "graph_compiled_us", "graph_torch_us", "eager_torch_us")

BENCHMARKS: Mapping[str, Benchmark] = {
    "whole_step": Benchmark(
        ("dtype", "requests"),
        (Metric("a step", "ours_us", ("triton_replay_us", "state_a_token_us")),),
    ),
    "gdn_replay": Benchmark(
        ("heads", "dtype", "tokens", "requests"),
        (
            Metric("mixed batch", "ours_mixed_us", ("triton_replay_mixed_us",)),
            Metric("weighted", "ours_us", ("triton_replay_us", "fla_us", "snapshots_us")),
        ),
    ),
    "sparse_gqa_verify": Benchmark(
        ("dtype", "context", "overlap", "rows"),
        (Metric("a call", "ours_us", ("triton_us", "torch_us")),),
    ),
    "rollback": Benchmark(
        ("rows",),
        (
            Metric("gather", "graph_gather_us", ("graph_torch_gather_us",)),
            Metric("restore", "graph_restore_us", ("graph_torch_restore_us",)),
            Metric("gather, host", "host_op_us", ("host_bare_us", "host_torch_gather_us")),
        ),
    ),
    "between_steps": Benchmark(
        ("requests", "tokens"),
        (
            Metric("in a graph", "graph_ours_us", ("graph_torch_us",)),
            Metric("eager", "eager_ours_us", ("eager_torch_us",)),
        ),
    ),
    "accept": Benchmark(
        ("dtype", "columns", "requests", "tokens"),
        (
            Metric("a call", "graph_ours_us", BOOKKEEPING),
            Metric("host", "host_op_us", ("host_bare_us",)),
        ),
    ),
    "step_setup": Benchmark(
        ("family", "size"),
        (
            Metric("a call", "graph_ours_us", BOOKKEEPING),
            Metric("host", "host_op_us", ("host_bare_us",)),
        ),
    ),
    "step_copies": Benchmark(
        ("family", "requests", "tokens"),
        (
            Metric("a call", "graph_ours_us", ("graph_torch_us",)),
            Metric("host", "host_op_us", ("host_bare_us", "host_torch_us")),
        ),
    ),
}


@dataclass(frozen=True)
class Run:
    """One result file."""

    path: Path
    body: Mapping[str, Any]

    @property
    def benchmark(self) -> str:
        return str(self.body["benchmark"])

    @property
    def where(self) -> str:
        """Device, driver and date, in words."""
        body = self.body
        return f"{body['device']}, driver {body['driver']}, {body['date']}"


def read(path: Path) -> Run:
    """One result file; ValueError names a file that is none."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["benchmark"] not in BENCHMARKS or not isinstance(body["rows"], list):
            raise ValueError(f"benchmark {body['benchmark']!r} is not known")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of benchmark results ({error})") from error
    return Run(path, body)


def runs(directory: Path = RESULTS) -> Sequence[Run]:
    """Every result file of a directory, oldest first; of one day, the shorter runs first."""
    found = [read(path) for path in directory.glob("*.json")]
    return sorted(found, key=lambda r: (str(r.body["date"]), len(r.body["rows"]), r.path.name))


def key(benchmark: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a row of a benchmark from the others."""
    return tuple(row[name] for name in BENCHMARKS[benchmark].keys)


def latest(
    found: Sequence[Run], benchmark: str
) -> Mapping[tuple[Any, ...], tuple[Run, Mapping[str, Any]]]:
    """The newest row of every point of a benchmark, with the run that it is of."""
    rows = {
        key(benchmark, row): (run, row)
        for run in found
        if run.benchmark == benchmark
        for row in run.body["rows"]
    }
    return dict(sorted(rows.items(), key=lambda item: tuple(map(str, item[0][:-1]))))


@dataclass(frozen=True)
class Ratio:
    """Our time over a peer's of the same run, at one point."""

    benchmark: str
    point: tuple[Any, ...]
    metric: str
    peer: str
    value: float


def ratios(run: Run) -> Iterator[Ratio]:
    """Every ratio of a run, the peers in the order of the benchmark's declaration."""
    for row in run.body["rows"]:
        for metric in BENCHMARKS[run.benchmark].metrics:
            if isinstance(row.get(metric.ours), float):
                for peer in metric.peers:
                    if isinstance(row.get(peer), float) and row[peer] > 0:
                        yield Ratio(
                            run.benchmark,
                            key(run.benchmark, row),
                            metric.name,
                            peer,
                            row[metric.ours] / row[peer],
                        )
