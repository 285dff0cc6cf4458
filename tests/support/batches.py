"""Campaigns of tries in batches, each in a separate process, so that crashes are counted too.

A program calls `main` with a function that makes the tries. It prints what went wrong, and exits with 1 if it did.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import forks

# The number and the problems of each try, and a word for its outcome.
Try = tuple[int, list[str], str]


def main(
    program: str,
    batch: Callable[[str, int, int, int], Iterator[Try]],
    kinds: Mapping[str, float],
    size: int,
    arguments: list[str] | None = None,
) -> int:
    """Run a campaign. `kinds` have shares of the tries; `batch` gets one, its first try, their number, and the seed."""
    parser = argparse.ArgumentParser(description=sys.modules[batch.__module__].__doc__)
    parser.add_argument("--tries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=kinds, help="only this")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("FIRST", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.batch:
        for number, problems, outcome in batch(options.kind, *options.batch, options.seed):
            print(json.dumps([number, problems, outcome]), flush=True)
        return 0
    complaints: list[str] = []
    outcomes: Counter[str] = Counter()
    for kind in [options.kind] if options.kind else kinds:
        number, end = 0, max(1, round(options.tries * (1 if options.kind else kinds[kind])))
        while number < end:
            count = min(size, end - number)
            words = [program, "--kind", kind, "--seed", options.seed, "--batch", number, count]
            ended = forks.run(words, timeout=60 + 5 * count)
            tries = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
            complaints += [f"{kind}, try {tried}: {problem}" for tried, problems, _ in tries for problem in problems]
            outcomes.update(f"{kind}: {outcome}" for _, _, outcome in tries)
            number += count
            if ended.returncode:
                failed = tries[-1][0] + 1 if tries else number - count
                complaints.append(f"{kind}, try {failed}: it ended with {ended.returncode}: {ended.stderr[-300:]!r}")
                number = failed + 1
            print(f"{kind}: {number} of {end}, {len(complaints)} complaints", file=sys.stderr, flush=True)
    print(*complaints[:50], *(f"{times:6} {outcome}" for outcome, times in sorted(outcomes.items())), sep="\n")
    print(f"{len(complaints)} complaints.")
    return 1 if complaints else 0
