"""State what a diagnosis of each script must find, and which remedies are right and wrong for it.

Data only: `benchmarks/measures/judged.py` holds a diagnosis against it. All kinds of advice, settings
and words are named here, so that a renamed kind is a change in this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).parent / "scripts"
SHARED_MODULE = "meter.py"
"""The module that all scripts import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Advice of any of these kinds, or that changes one of these settings, or with such words."""

    kinds: frozenset[str] = frozenset()
    settings: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values by setting; ANY is any value."""
    words: str = ""
    """A regular expression, searched for in the advice's text and in the lines of the script that it
    names, regardless of case; "" for none."""


ANY: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The right answer for a script."""

    name: str
    """The script's name without .py."""
    causes: frozenset[str]
    """Accepted bottlenecks of the first finding; empty if the fault is no matter of speed."""
    says: str = ""
    """A regular expression that the answer must contain, regardless of case, for the cause to be
    right: in headline, evidence of the first finding, first advice, or a note; "" for none."""
    right: Remedies
    wrong: Remedies
    """Remedies that would not touch the cause: none may stand above the right one."""
    effect: Literal["rate", "growth"] = "rate"
    """The line of the script that shows what the fix brings: throughput, or memory growth in MiB."""
    ranks: int = 1
    """Processes, started by torchrun if more than one."""


_STEP = {
    "amp_dtype": ANY,
    "micro_batch_size": ANY,
    "compile": ANY,
    "intra_op_threads": ANY,
    "channels_last": ANY,
    "fused": ANY,
}
_LOADER = {"num_workers": ANY, "prefetch_factor": ANY, "persistent_workers": ANY}
_ITEM_KINDS = frozenset({"add_workers", "cache_items", "make_items_cheaper", "shorten_waits"})
_STEP_KINDS = frozenset({"make_step_cheaper", "fuse_operations", "move_fewer_bytes"})
_NOT_THE_STEP = Remedies(kinds=_ITEM_KINDS | _STEP_KINDS, settings=_STEP | _LOADER)
"""For time outside of computing and of loading: settings of either only blur it."""
_NOT_THE_ITEM = Remedies(kinds=_STEP_KINDS | {"cache_items"}, settings=_STEP)
"""For a loader that more computing speed can't help, and whose items are cheap."""
_MORE_WORKERS = Remedies(
    kinds=frozenset({"add_workers"}) | _STEP_KINDS,
    settings=_STEP | {"num_workers": (3, 4, 5, 6, 7, 8, 12, 16), "prefetch_factor": ANY},
)
"""For workers that read the same, share a handle, or each come to own a copy. Fewer are no mistake."""

EXPECTATIONS: tuple[Expectation, ...] = (
    Expectation(
        name="accum_no_sync",
        causes=frozenset({"communication"}),
        right=Remedies(kinds=frozenset({"accumulate_without_sync"}), words=r"no_sync"),
        wrong=Remedies(
            kinds=_STEP_KINDS | {"compress_gradients", "try_ddp"},
            settings=_STEP | {"ddp": ANY, "strategy": ANY},
        ),
        ranks=2,
    ),
    Expectation(
        name="anomaly_mode",
        causes=frozenset({"debugging"}),
        right=Remedies(words=r"anomaly"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="checkpoint_often",
        causes=frozenset({"checkpoint"}),
        right=Remedies(
            kinds=frozenset({"save_less_often"}), words=r"(save|checkpoints?)\b.*(less often|async)"
        ),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="cow_list",
        causes=frozenset(),
        says=r"copy.on.write|own copy|memory still to come|workers?\b.*\b(copy|copies|copied)\b",
        right=Remedies(
            kinds=frozenset({"store_index_compactly"}), words=r"(numpy|array).*index|index.*array"
        ),
        wrong=_MORE_WORKERS,
        effect="growth",
    ),
    Expectation(
        name="denormals",
        causes=frozenset({"denormals"}),
        right=Remedies(words=r"set_flush_denormal"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="eval_often",
        causes=frozenset({"validation"}),
        right=Remedies(
            kinds=frozenset({"validate_less"}), words=r"validat.*(less often|fewer batches)"
        ),
        # Memory of validation is no matter of its time.
        wrong=Remedies(
            kinds=_NOT_THE_STEP.kinds | {"validate_with_less_memory"},
            settings=_NOT_THE_STEP.settings,
        ),
    ),
    Expectation(
        name="iterable_dup",
        causes=frozenset({"repeats"}),
        says=r"repeats|shared? out|share the stream|same (samples|items)|whole stream|get_worker_info",
        right=Remedies(
            kinds=frozenset({"shard_stream"}), words=r"get_worker_info|share the stream"
        ),
        wrong=_MORE_WORKERS,
    ),
    Expectation(
        name="mixed_lengths",
        causes=frozenset({"compute"}),
        says=r"padding|padded",
        right=Remedies(
            kinds=frozenset({"batch_like_lengths", "pack_sequences"}), settings={"max_tokens": ANY}
        ),
        wrong=Remedies(kinds=_ITEM_KINDS | _STEP_KINDS, settings=_STEP | _LOADER),
    ),
    Expectation(
        name="persistent_workers",
        causes=frozenset({"restart"}),
        right=Remedies(
            kinds=frozenset({"keep_workers"}),
            settings={"persistent_workers": (True,), "num_workers": (0,)},
        ),
        wrong=_NOT_THE_ITEM,
    ),
    Expectation(
        name="slow_collate",
        causes=frozenset({"data_cpu"}),
        says=r"collat",
        right=Remedies(kinds=frozenset({"speed_up_collate"}), words=r"collate"),
        wrong=Remedies(kinds=_STEP_KINDS | {"cache_items"}, settings=_STEP | _LOADER),
    ),
    Expectation(
        name="slow_disk",
        causes=frozenset({"data_io"}),
        right=Remedies(
            # Cores are few, so that more workers than cores are the point: 3 of them or more.
            settings={"num_workers": tuple(range(3, 17))}
        ),
        wrong=Remedies(
            kinds=_STEP_KINDS | {"add_workers"}, settings=_STEP | {"num_workers": (0, 1, 2)}
        ),
    ),
    Expectation(
        name="slow_tail",
        causes=frozenset({"data_tail"}),
        right=Remedies(
            kinds=frozenset({"deliver_out_of_order", "fix_slowest_items"}),
            # Values above the script's own, 4 workers with 2 batches each, hide a late batch.
            settings={
                "in_order": (False,),
                "prefetch_factor": tuple(range(3, 65)),
                "num_workers": tuple(range(5, 33)),
            },
            words=r"in_order=False",
        ),
        wrong=Remedies(kinds=_STEP_KINDS, settings=_STEP),
    ),
    Expectation(
        name="spawn_pickle",
        causes=frozenset({"restart"}),
        right=Remedies(
            kinds=frozenset({"keep_workers", "pickle_less"}),
            settings={"persistent_workers": (True,)},
            words=r"pickl",
        ),
        wrong=_NOT_THE_ITEM,
    ),
    Expectation(
        name="tensor_items",
        causes=frozenset({"data_cpu"}),
        right=Remedies(kinds=frozenset({"fetch_batches"}), words=r"__getitems__|whole batch"),
        wrong=Remedies(kinds=_STEP_KINDS | {"cache_items"}, settings=_STEP | _LOADER),
    ),
    Expectation(
        name="whole_file",
        causes=frozenset({"data_cpu"}),
        right=Remedies(
            kinds=frozenset({"read_parts", "cache_items"}),
            words=r"mmap|memory.map|only the part",
        ),
        wrong=Remedies(kinds=_STEP_KINDS, settings=_STEP | _LOADER),
    ),
    Expectation(
        name="worker_threads",
        causes=frozenset({"threads", "data_cpu"}),
        says=r"thread",
        right=Remedies(
            kinds=frozenset({"one_thread_per_worker"}),
            settings={"worker_threads": (1,)},
            words=r"OMP_NUM_THREADS",
        ),
        wrong=Remedies(kinds=_STEP_KINDS | {"cache_items"}, settings=_STEP | _LOADER),
    ),
    Expectation(
        name="pinned_cores",
        causes=frozenset({"cores"}),
        right=Remedies(kinds=frozenset({"release_cores"}), words=r"sched_setaffinity|affinity"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="ema_loop",
        causes=frozenset({"script"}),
        right=Remedies(words=r"_foreach|\bupdate\b|loop over (the )?parameters"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="collect_each_step",
        causes=frozenset({"collection"}),
        right=Remedies(kinds=frozenset({"collect_less_often"}), words=r"gc\.collect"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="profiler_left_on",
        causes=frozenset({"debugging"}),
        right=Remedies(words=r"torch's profiler|torch\.profiler"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="histograms_each_step",
        # The tracker is the script's own class, so that its time may count as the script's code.
        causes=frozenset({"logging", "script"}),
        right=Remedies(
            kinds=frozenset({"log_less_often"}), words=r"\blog\w*\b.*less often|histogram"
        ),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="weighted_sampler",
        causes=frozenset({"restart", "data_cpu"}),
        says=r"sampler|draw",
        right=Remedies(kinds=frozenset({"draw_faster"}), words=r"sampler|replacement"),
        wrong=_NOT_THE_STEP,
    ),
    Expectation(
        name="shared_zip",
        causes=frozenset({"data_io", "data_cpu"}),
        says=r"\block|one at a time|no faster than|(shared?|one) (file |archive )?handle",
        right=Remedies(
            kinds=frozenset({"open_in_each_worker"}), words=r"(open|handle).*each worker"
        ),
        wrong=_MORE_WORKERS,
    ),
    Expectation(
        name="one_shard",
        causes=frozenset({"data_io", "data_cpu"}),
        says=r"shard|only (1|one)|of (the )?\d+ workers",
        right=Remedies(kinds=frozenset({"add_shards", "shard_stream"}), words=r"shards"),
        wrong=_MORE_WORKERS,
    ),
    Expectation(
        name="kept_graphs",
        causes=frozenset(),
        says=r"autograd graph|graphs? of autograd|graphs? of (each|every) step|graphs? kept|kept.* graph",
        right=Remedies(kinds=frozenset({"detach_kept_tensors"}), words=r"detach\(\)"),
        wrong=Remedies(kinds=_ITEM_KINDS, settings=_STEP),
        effect="growth",
    ),
    Expectation(
        name="python_forward",
        causes=frozenset({"script", "launch"}),
        # By its function, or by the line of the comprehension that calls it.
        says=r"trigrams",
        right=Remedies(words=r"trigrams"),
        wrong=_NOT_THE_STEP,
    ),
)
"""The scripts of the first cases, then of ten more."""


def expectation_of(name: str) -> Expectation:
    """Return the expectation of a script.

    Raises:
        KeyError: There is none of this name.
    """
    return {each.name: each for each in EXPECTATIONS}[name]
