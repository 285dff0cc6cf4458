"""A campaign of random programs from the command line: ``python FILE --tries N --seed S``."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable


def main(description: str | None, run: Callable[[int], Counter[str]], tries: int) -> int:
    """Run programs with consecutive seeds, and print what they executed and which went wrong. Returns the status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tries", type=int, default=tries)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done: Counter[str] = Counter()
    wrong, start = 0, time.monotonic()
    for number in range(options.tries):
        try:
            done += run(options.seed + number)
        except (AssertionError, RuntimeError) as error:
            wrong += 1
            print(f"seed {options.seed + number}: {error}", flush=True)
        if number % 100 == 99:
            print(f"{number + 1} programs, {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(f"{dict(sorted(done.items()))}\n{wrong} of {options.tries} programs went wrong")
    return 1 if wrong else 0
