"""Two workloads on which short measures go wrong: the product against a plain 15 s loop, in interleaved pairs.

queue_trap   1 ms an item, 2 workers, prefetch 8, batch 32, and a first step that stalls for 3 s: meanwhile the queue
             fills, and the next 16 batches come for free.
heavy_tail   an unshuffled stream in which every 64th item of each worker takes 40 ms, the others 0.2 ms.

Of each: product / plain, what ten steps after three warm-up steps would have said, and what the median step would.
Some four minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.cases.cpu import Case, heavy_tail, queue_trap
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    say,
    start_recording,
)
from benchmarks.quietness import keep_freed_memory
from benchmarks.yardsticks.plain_loop import run_plain
from benchmarks.yardsticks.product_run import measurement_figures, only, search

_TRAPS: dict[str, Callable[[], Case]] = {"queue_trap": queue_trap, "heavy_tail": heavy_tail}
_PAIRS = 3
_PLAIN_S = 15.0
_SKIP_S = 5.0  # the queue that the stall has filled is used up within a second
_TARGET = 0.05


def main() -> None:
    parser = make_parser(__doc__ or "", "one pair, and a plain loop of 4 s")
    arguments = parser.parse_args()
    recording = start_recording("traps", arguments, describe_machine("cpu"))
    pairs, plain_s = (1, 4.0) if arguments.quick else (_PAIRS, _PLAIN_S)
    rows = []
    for name, make_case in _TRAPS.items():
        figures = _measure(name, make_case(), pairs, plain_s)
        recording.add(name, figures)
        rows.append(_row(name, figures))
    head = ["trap", "plain/s", "product/s", "product/plain", "10 steps/plain", "median/plain"]
    print_table(
        f"Medians of {pairs} pairs; product/plain is to be within {_TARGET:.0%} of 1.", head, rows
    )
    print(f"\n{recording.path}")


def _measure(name: str, case: Case, pairs: int, plain_s: float) -> dict[str, Any]:
    products, plains = [], []
    for number in range(pairs):
        for side in ("product", "plain") if number % 2 == 0 else ("plain", "product"):
            if side == "product":
                products.append(_measure_by_product(case))
                say(f"{name}: product {products[-1]['samples_per_s']:,.0f} samples/s")
            else:
                plains.append(
                    run_plain(
                        f"benchmarks.cases.cpu:{name}",
                        case.settings,
                        seconds=plain_s,
                        skip_s=_SKIP_S,
                    )
                )
                say(f"{name}: plain   {plains[-1]['samples_per_s']:,.0f} samples/s")
    return {**_medians(products, plains), "products": products, "plains": plains}


def _measure_by_product(case: Case) -> dict[str, Any]:
    """A search of one trial: the baseline, measured as every trial is."""
    result = search(case, space=only(case.settings), n_trials=1, device="cpu")
    record = result.trials[0]
    if record.measurement is None:
        raise RuntimeError(f"the trial must end well, but it is {record.outcome}: {record.reason}")
    return measurement_figures(record.measurement)


def _medians(products: list[dict[str, Any]], plains: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates as medians over the runs; ratios as medians over the pairs."""
    ratios = {
        "product": [
            a["samples_per_s"] / b["samples_per_s"] for a, b in zip(products, plains, strict=True)
        ],
        "naive": [run["naive_samples_per_s"] / run["samples_per_s"] for run in plains],
        "median_step": [run["median_step_samples_per_s"] / run["samples_per_s"] for run in plains],
    }
    return {
        "plain_samples_per_s": median(run["samples_per_s"] for run in plains),
        "product_samples_per_s": median(run["samples_per_s"] for run in products),
        **{f"{name}_over_plain": median(values) for name, values in ratios.items()},
        "is_within_target": abs(median(ratios["product"]) - 1) <= _TARGET,
        "ratios": ratios,
    }


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{figures['plain_samples_per_s']:,.0f}",
        f"{figures['product_samples_per_s']:,.0f}",
        f"{figures['product_over_plain']:.3f}",
        f"{figures['naive_over_plain']:.2f}",
        f"{figures['median_step_over_plain']:.2f}",
    ]


if __name__ == "__main__":
    keep_freed_memory()
    main()
