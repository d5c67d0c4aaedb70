"""Measuring: graph nodes, host time of calls, and the arms beside which a figure means something.

GPU time of one call is a CUDA graph of back-to-back calls, replayed, over the number of calls. Host
time of one call is a loop that never waits for the GPU. All arms of a comparison run in one
process, alternating over rounds; figures are medians of rounds.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from specplan.plans.version import VERSION
from specplan.tools.certify import driver_version

Call = Callable[[], Any]


def graph_times(
    arms: Mapping[str, Sequence[Call]], *, nodes: int = 64, rounds: int = 15
) -> dict[str, float]:
    """Median µs of one call inside a CUDA graph, by arm. An arm is one call for each rotating
    buffer set.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, calls in arms.items():
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(nodes):
                calls[index % len(calls)]()
        graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_number >= 2:
                samples[name].append(start.elapsed_time(end) * 1000 / nodes)
    return {name: statistics.median(times) for name, times in samples.items()}


def host_times(arms: Mapping[str, Call], *, calls: int = 400, rounds: int = 25) -> dict[str, float]:
    """Median host µs of one call, by arm; the GPU is idle at the start of every round."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(rounds + 3):
        for name, call in arms.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            spent = time.perf_counter() - start
            if round_number >= 3:
                samples[name].append(spent * 1e6 / calls)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in samples.items()}


def eager_times(arms: Mapping[str, Call], *, calls: int = 50, rounds: int = 9) -> dict[str, float]:
    """Median µs of one call outside of a graph, by arm: the device has done all calls of a round at
    its end, so it is the host's time or the device's, whichever is longer.
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(rounds + 2):
        for name, call in arms.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            if round_number >= 2:
                samples[name].append((time.perf_counter() - start) * 1e6 / calls)
    return {name: statistics.median(times) for name, times in samples.items()}


def device_work(call: Call) -> int:
    """How many kernels, copies and fills a call makes the device do, by torch's profiler: the
    launches of an eager call, the nodes of a graph's replay.
    """
    call()
    torch.cuda.synchronize()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


class EmptyKernel:
    """The floor: a kernel that does nothing, launched through the driver by cuda-python."""

    SOURCE = b'extern "C" __global__ void empty() {}'

    def __init__(self) -> None:
        from cuda.bindings import driver, nvrtc

        self.driver = driver
        major, minor = torch.cuda.get_device_capability()
        program = _checked(nvrtc.nvrtcCreateProgram(self.SOURCE, b"empty.cu", 0, [], []))
        _checked(
            nvrtc.nvrtcCompileProgram(
                program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]
            )
        )
        image = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
        self.module = _checked(driver.cuModuleLoadData(image))
        self.function = _checked(driver.cuModuleGetFunction(self.module, b"empty"))

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.driver.cuLaunchKernel(self.function, 1, 1, 1, 128, 1, 1, 0, stream, 0, 0)

    def bound(self, stream: int) -> Call:
        """A launch on a fixed stream, so that the figure has no stream look-up in it."""
        launch, function = self.driver.cuLaunchKernel, self.function
        return lambda: launch(function, 1, 1, 1, 128, 1, 1, 0, stream, 0, 0)


def _checked(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA answered {error!r}")
    return values[0] if values else None


def facts() -> dict[str, Any]:
    """What a figure needs to be understood: device, driver, date, versions."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "sm_count": properties.multi_processor_count,
        "driver": driver_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "specplan": VERSION,
        "torch": str(torch.__version__),
        "apache-tvm-ffi": metadata.version("apache-tvm-ffi"),
        "python": platform.python_version(),
    }


def write(path: Path, name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write results as JSON: facts, then rows."""
    body = {"benchmark": name, **facts(), **more, "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a text table, figures with two decimals."""
    names = list(rows[0])
    texts = [[f"{r[n]:.2f}" if isinstance(r[n], float) else str(r[n]) for n in names] for r in rows]
    widths = [max(len(n), *(len(t[i]) for t in texts)) for i, n in enumerate(names)]
    lines = [names, *texts]
    return "\n".join(
        "  ".join(t.rjust(w) for t, w in zip(line, widths, strict=True)) for line in lines
    )
