"""Random calls of every op on a GPU: each equals the reference or is declined, and no byte beside
what it may write changes.

    python tests/device/fuzz.py --packs packs --jobs 16        # 100,000 calls, a fresh seed
    python tests/device/fuzz.py --packs packs --family gdn_replay --family sparse_gqa_verify
    python tests/device/fuzz.py --packs packs --seed 7 --batch 12    # one batch again

A batch is of one family, which its number says, or of ``mixed`` calls: every op, problem and dtype
in one sequence, each call answered as a fresh pack answers it. What is in a batch depends on the
seed and the number alone; without a seed one is drawn, and printed. Each process stops at its first
batch with a failure, and then the exit status is 1. Where the device itself fails, the batch again
with ``CUDA_LAUNCH_BLOCKING=1`` names the call. ``tests/fuzzing`` says what calls are made.
"""

from __future__ import annotations

import argparse
import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import specplan
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fuzzing
from fuzzing import gdn_replay, mixed, scenes, sparse_gqa_verify

#: Calls of a batch, and bytes that each has.
COPIES, COPY_BYTES = 512, 32 << 10
EPISODES, EPISODE_BYTES = 128, 128 << 10
#: Scenes of a batch, and calls over each.
SCENES, SCENE_CALLS = 8, 32
FAMILIES = ("scatter", "gdn_replay", "gather", "sparse_gqa_verify", "rollback", "mixed")
#: Calls of a mixed batch; each is made twice.
MIXED = 256

Problems = dict[str, list[dict[str, int]]]


def geometries(pack: specplan.Pack) -> Problems:
    """The problems of the loaded pack by family."""
    problems = pack.manifest().problems
    return {family: [dict(g) for g in named.values()] for family, named in problems.items()}


def family_of(number: int) -> str:
    """The family of a batch: of every six in a row each is of another, in no regular order, so
    that the batches of one process are of all of them.
    """
    order = list(FAMILIES)
    Random(f"families:{number // len(order)}").shuffle(order)
    return order[number % len(order)]


def batch(
    number: int,
    seed: int,
    pack: specplan.Pack,
    problems: Problems,
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    """Make, run and judge one batch; it depends on the seed and its number alone."""
    chance = Random(f"{seed}:{number}")
    family = family_of(number)
    if family == "mixed":
        mixed_batch(number, chance, pack, problems, device, score)
    elif family in ("gdn_replay", "sparse_gqa_verify"):
        scene_batch(number, family, chance, pack, problems, device, score)
    elif family == "rollback":
        rollback_batch(number, chance, pack, problems, device, score)
    else:
        copy_batch(number, chance, pack, {family: problems[family]}, device, score)


def noise(chance: Random, rows: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(chance.getrandbits(62))
    words = torch.empty(rows, size // 4, dtype=torch.int32)
    return words.random_(-(1 << 31), (1 << 31) - 1, generator=generator).view(torch.uint8)


def copy_batch(
    number: int,
    chance: Random,
    pack: specplan.Pack,
    problems: Problems,
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    rows = noise(chance, COPIES, COPY_BYTES)
    calls: list[fuzzing.Call] = []
    while len(calls) < COPIES:
        call = fuzzing.any_call(chance, problems)
        try:
            fuzzing.place(call, COPY_BYTES, chance)
        except fuzzing.DoesNotFit:
            continue
        calls.append(call)
    fuzzing.run_copies(
        number,
        calls,
        rows,
        lambda call, arguments: fuzzing.through(getattr(pack, call.op), call.way, **arguments),
        device,
        score,
    )


def rollback_batch(
    number: int,
    chance: Random,
    pack: specplan.Pack,
    problems: Problems,
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    rows = noise(chance, EPISODES, EPISODE_BYTES)
    small = [g for g in problems["rollback"] if g["planes"] <= 12]
    episodes: list[fuzzing.Episode] = []
    while len(episodes) < EPISODES:
        try:
            episodes.append(fuzzing.episode(chance, chance.choice(small), EPISODE_BYTES))
        except fuzzing.DoesNotFit:
            continue
    fuzzing.run_episodes(
        number,
        episodes,
        rows,
        lambda row, call, layout, arguments, rows: fuzzing.through(
            getattr(pack.rollback, call.op.partition(".")[2]), call.way, layout, **arguments
        ),
        device,
        score,
    )


def scene_batch(
    number: int,
    family: str,
    chance: Random,
    pack: specplan.Pack,
    problems: Problems,
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    words = sparse_gqa_verify.words_of(pack.sparse_gqa_verify)
    verdicts = scenes.Verdicts(number)
    try:
        for row in range(SCENES):
            if family == "gdn_replay":
                scene = gdn_replay.scene(chance, problems[family], device)
                calls = [gdn_replay.any_call(chance, scene) for _ in range(SCENE_CALLS)]
                scenes.run_scene(
                    *(row, scene, calls, gdn_replay.FAMILY),
                    lambda call, given: gdn_replay.launch(pack.gdn_replay, call, given),
                    *(verdicts, score),
                )
            else:
                scene = sparse_gqa_verify.scene(chance, problems[family], device, words)
                calls = [sparse_gqa_verify.any_call(chance, scene) for _ in range(SCENE_CALLS)]
                scenes.run_scene(
                    *(row, scene, calls, sparse_gqa_verify.FAMILY),
                    lambda call, given: fuzzing.through(pack.sparse_gqa_verify, call.way, **given),
                    *(verdicts, score),
                )
    finally:
        verdicts.settle(score)


class Watched:
    """A compiled function that writes down the calls that it takes."""

    def __init__(
        self, symbol: str, function: Any, taken: list[tuple[str, tuple[Any, ...]]]
    ) -> None:
        self.symbol, self.function, self.taken = symbol, function, taken

    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)
        self.taken.append((self.symbol, arguments))


def mixed_batch(
    number: int,
    chance: Random,
    pack: specplan.Pack,
    problems: Problems,
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    """A sequence of mixed calls, each compared with the same call on a fresh pack."""
    taken: mixed.Launched = []
    arch_packs = []
    for each in pack._packs.values():
        watched = copy(each)
        watched.functions = {s: Watched(s, f, taken) for s, f in each.functions.items()}
        arch_packs.append(watched)

    def fresh() -> specplan.Pack:
        made = specplan.Pack(arch_packs, candidates=True)
        # The code is loaded: by the pack that all of these are of.
        made._prepared |= pack._prepared
        return made

    def launches() -> mixed.Launched:
        found = list(taken)
        taken.clear()
        return found

    # Planes of some problems are many, and the lists of some long; calls are small.
    small = {
        **problems,
        "rollback": [g for g in problems["rollback"] if g["planes"] <= 12],
    }
    world = mixed.World(small, lambda tensor, _: tensor.to(device))
    answers, failures = mixed.sequence(chance, world, MIXED, fresh(), fresh, launches)
    for answer, found in answers.items():
        op, _, how = answer.partition(": ")
        launched = how == "True"
        score.answers[f"mixed.{op}: {'launched' if launched else f'declined: {how}'}"] += found
        score.calls += found
    score.calls += len(failures)
    score.failures += [fuzzing.Failure(number, -1, "", failure) for failure in failures]
    torch.cuda.synchronize(device)


def work(
    packs: Path | None, seed: int, numbers: Iterable[int], calls: int, seconds: float = math.inf
) -> tuple[fuzzing.Score, int]:
    """Run batches until there are enough calls, the time is over, or a failure."""
    end = time.monotonic() + seconds
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    pack = specplan.load(packs, candidates=True)
    pack.prepare()
    problems = geometries(pack)
    score = fuzzing.Score()
    batches = 0
    for number in numbers:
        run(number, seed, pack, problems, device, score)
        batches += 1
        if score.calls >= calls or score.failures or time.monotonic() > end:
            break
    return score, batches


def run(
    number: int,
    seed: int,
    pack: specplan.Pack,
    problems: Problems,
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    """One batch; an error that ends it, as one of the device does, is a failure of it."""
    try:
        batch(number, seed, pack, problems, device, score)
    except Exception as error:
        score.failures.append(fuzzing.Failure(number, -1, "", f"the batch raised {error!r}"))


@dataclass(frozen=True)
class Numbers:
    """The numbers of the batches of some families: every ``step``-th, from the ``first`` on."""

    families: tuple[str, ...]
    first: int
    step: int

    def __iter__(self) -> Iterator[int]:
        of_these = (number for number in count() if family_of(number) in self.families)
        return islice(of_these, self.first, None, self.step)


def lopsided(answers: Counter[str]) -> list[str]:
    """Families of which hardly any call was launched, or hardly any declined: they show nothing."""
    calls, launched = Counter[str](), Counter[str]()
    for answer, found in answers.items():
        family = answer.partition(":")[0].partition(".")[0]
        calls[family] += found
        launched[family] += found if answer.endswith(": launched") else 0
    return [f for f, found in sorted(calls.items()) if not 0.2 < launched[f] / found < 0.9]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--seed", type=int, help="without one, a fresh one")
    parser.add_argument("--jobs", type=int, default=4, help="processes, which share the GPU")
    parser.add_argument("--batch", type=int, help="only this batch")
    parser.add_argument(
        "--family", action="append", choices=FAMILIES, help="only these; may be repeated"
    )
    options = parser.parse_args()
    families = tuple(options.family or FAMILIES)
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 32)
    print(f"seed {options.seed}", flush=True)
    start = time.monotonic()
    if options.batch is not None:
        done = [work(options.packs, options.seed, (options.batch,), 1)]
    else:
        share = -(-options.calls // options.jobs)
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            futures = [
                pool.submit(
                    work,
                    *(options.packs, options.seed, Numbers(families, job, options.jobs)),
                    *(share, options.seconds),
                )
                for job in range(options.jobs)
            ]
            done = [future.result() for future in futures]
    answers = sum((score.answers for score, _ in done), Counter[str]())
    failures = [failure for score, _ in done for failure in score.failures]
    for answer, found in sorted(answers.items()):
        print(f"{found:8,}  {answer}")
    for failure in failures[:10]:
        print(failure)
    calls, batches = answers.total(), sum(batches for _, batches in done)
    launched = sum(found for answer, found in answers.items() if answer.endswith(": launched"))
    print(
        f"{calls:,} calls, seed {options.seed}, {batches} batches, "
        f"{time.monotonic() - start:.0f} s, {launched:,} launched and equal, "
        f"{len(failures)} failures"
    )
    uneven = lopsided(answers) if options.batch is None else []
    for family in uneven:
        print(f"{family}: too few calls were launched, or too few declined")
    missing = set(families) - {a.partition(":")[0].partition(".")[0] for a in answers}
    if missing and options.batch is None:
        print(f"no calls of {', '.join(sorted(missing))}")
    return int(bool(failures or uneven or (missing and options.batch is None)))


if __name__ == "__main__":
    sys.exit(main())
