"""Random calls of scatter, gather and rollback on a GPU: each equals the reference or is declined,
and no byte beside what it may write changes.

    python tests/device/fuzz.py --packs packs             # 100,000 calls
    python tests/device/fuzz.py --packs packs --seed 7 --batch 12    # one batch again

Exit 1 on the first batch with a failure. ``tests/fuzzing.py`` says what calls are made.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

import specplan
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fuzzing

#: Calls of a batch, and bytes that each has.
COPIES, COPY_BYTES = 512, 32 << 10
EPISODES, EPISODE_BYTES = 128, 128 << 10
#: Every fourth batch is of rollback.
TURN = 4


def geometries(pack: specplan.Pack) -> dict[str, list[dict[str, int]]]:
    """The problems of the loaded pack by family."""
    problems = pack.manifest().problems
    return {family: [dict(g) for g in named.values()] for family, named in problems.items()}


def batch(
    number: int,
    seed: int,
    pack: specplan.Pack,
    problems: dict[str, list[dict[str, int]]],
    device: torch.device,
    score: fuzzing.Score,
) -> None:
    """Make, run and judge one batch; it depends on the seed and its number alone."""
    chance = Random(f"{seed}:{number}")
    generator = torch.Generator().manual_seed(chance.getrandbits(62))
    rollback = number % TURN == TURN - 1

    def noise(rows: int, size: int) -> torch.Tensor:
        words = torch.empty(rows, size // 4, dtype=torch.int32)
        return words.random_(-(1 << 31), (1 << 31) - 1, generator=generator).view(torch.uint8)

    if rollback:
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
            noise(EPISODES, EPISODE_BYTES),
            lambda row, call, layout, arguments, rows: fuzzing.through(
                getattr(pack.rollback, call.op.partition(".")[2]), call.bound, layout, **arguments
            ),
            device,
            score,
        )
        return
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
        noise(COPIES, COPY_BYTES),
        lambda call, arguments: fuzzing.through(getattr(pack, call.op), call.bound, **arguments),
        device,
        score,
    )


def work(
    packs: Path | None, seed: int, first: int, step: int, calls: int
) -> tuple[fuzzing.Score, int]:
    """Run the batches first, first + step ... until there are enough calls, or a failure."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    pack = specplan.load(packs, candidates=True)
    pack.prepare()
    problems = geometries(pack)
    score = fuzzing.Score()
    batches = 0
    while score.calls < calls and not score.failures:
        batch(first + batches * step, seed, pack, problems, device, score)
        batches += 1
    return score, batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4, help="processes, which share the GPU")
    parser.add_argument("--batch", type=int, help="only this batch")
    options = parser.parse_args()
    start = time.monotonic()
    if options.batch is not None:
        done = [work(options.packs, options.seed, options.batch, 1, 1)]
    else:
        share = -(-options.calls // options.jobs)
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            futures = [
                pool.submit(work, options.packs, options.seed, job, options.jobs, share)
                for job in range(options.jobs)
            ]
            done = [future.result() for future in futures]
    answers = sum((score.answers for score, _ in done), Counter[str]())
    failures = [failure for score, _ in done for failure in score.failures]
    for answer, count in sorted(answers.items()):
        print(f"{count:8,}  {answer}")
    for failure in failures[:10]:
        print(failure)
    calls, batches = answers.total(), sum(batches for _, batches in done)
    launched = sum(count for answer, count in answers.items() if answer.endswith(": launched"))
    print(
        f"{calls:,} calls, seed {options.seed}, {batches} batches, "
        f"{time.monotonic() - start:.0f} s, {launched:,} launched and equal, "
        f"{len(failures)} failures"
    )
    # If hardly anything was launched, or hardly anything declined, nothing was shown.
    lopsided = options.batch is None and not 0.2 < launched / max(1, calls) < 0.9
    if lopsided:
        print("too few calls were launched, or too few declined")
    return int(bool(failures) or lopsided)


if __name__ == "__main__":
    sys.exit(main())
