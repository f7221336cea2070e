"""Give the scripts next to it their two options, and print their rate."""

import argparse
import time


def options(fix, **numbers):
    """Read --seconds, --fixed (whose help is `fix`), and one option for each further number."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600, help="train for this long")
    parser.add_argument("--fixed", action="store_true", help=fix)
    for name, default in numbers.items():
        parser.add_argument("--" + name, type=int, default=default)
    return parser.parse_args()


class Meter:
    """Counts samples until the seconds are over."""

    def __init__(self, seconds):
        self.start = time.perf_counter()
        self.end = self.start + seconds
        self.samples = 0
        self.steps = 0
        self.first_step_s = float("nan")

    def seconds(self):
        return time.perf_counter() - self.start

    def over(self):
        return time.perf_counter() >= self.end

    def add(self, samples):
        """Count a step of this many samples; True once the time is over."""
        self.samples += samples
        self.steps += 1
        if self.steps == 1:
            self.first_step_s = self.seconds()
        return self.over()

    def report(self, unit="samples"):
        took = self.seconds()
        print(
            f"rate: {self.samples / took:.1f} {unit}/s over {took:.1f} s, "
            f"{self.steps} steps, the first after {self.first_step_s:.2f} s",
            flush=True,
        )
