"""Attach in a process: to the script that a forked rank becomes, or in a Python process of a command.

In: a job, or what `AUTOTUNE_ATTACH` holds: the folder of a trial with its job, or, for a training
that runs to its end, settings and the facts of its script. Out: a Session that watches torch from
then on. Imports nothing heavy before the process itself imports torch.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autotune.protocol.attach import ATTACH_VARIABLE
from autotune.worker.script.cores import remember_start
from autotune.worker.script.patching import after_import

if TYPE_CHECKING:
    from autotune.protocol import messages
    from autotune.worker.failures import HangDump
    from autotune.worker.place import Place
    from autotune.worker.script.overrides import Overrides
    from autotune.worker.script.session import Session


def begin() -> None:
    """Protect files at once and attach once torch is imported, in a Python process of a command."""
    attached = json.loads(os.environ[ATTACH_VARIABLE])
    if "folder" in attached:
        from autotune.protocol.disk import TrialFolder
        from autotune.worker.script.files.protection import protect_files

        folder = TrialFolder(Path(attached["folder"]))
        protect_files(folder.overlay, own=[*map(Path, attached.get("own_folders", [folder.path]))])
        if "started" not in attached:  # a loader's worker
            if "sampled_by" in attached:
                from autotune.worker.script.reading import allow_reading

                allow_reading(attached["sampled_by"])
            return
    remember_start()
    after_import("torch", lambda _: _attach(attached))


def open_session(
    job: messages.WorkloadJob, place: Place, dump: HangDump, started: float
) -> Session:
    """Watch torch in this process, and do a job once the script trains."""
    from autotune.protocol import messages as kinds
    from autotune.worker.build import seed_all
    from autotune.worker.place import DEADLINE_SHARE, Start
    from autotune.worker.script.files.protection import protect_torch
    from autotune.worker.script.hooks import install
    from autotune.worker.script.reading import allow_reading
    from autotune.worker.script.seams import install_seams
    from autotune.worker.script.session import Session, doer_of
    from autotune.worker.script.watch import Watch

    remember_start()
    protect_torch()
    overrides = overrides_of(job)
    overrides.in_process()
    seed_all(job.process.seed)
    ends_at = started + DEADLINE_SHARE * job.process.deadline_s
    start = Start(started=started, built_from=perf_counter(), ends_at=ends_at, before={})
    is_watched = isinstance(job, kinds.ProbeJob) and job.watch_s > 0
    # Of several ranks the first one alone is watched.
    watch = Watch(started) if is_watched and os.environ.get("RANK", "0") == "0" else None
    if watch is not None:
        allow_reading()  # before loader workers start
    session = Session(job, overrides, place, doer_of(job, place, dump, start, watch), watch)
    install(session)
    if watch is not None:
        os.register_at_fork(after_in_child=watch.forget)  # in loader workers
        install_seams(watch)
    return session


def overrides_of(job: messages.WorkloadJob) -> Overrides:
    """Return the overrides of a job; a script whose settings are switched later begins with its own."""
    from autotune.protocol import messages as kinds
    from autotune.worker.script.overrides import Overrides

    config = job.config
    is_switched = isinstance(job, kinds.PrecisionJob | kinds.CurvesJob)
    if is_switched and job.script is not None:
        own = {
            name: getattr(job.script.observed, name)
            for name in ("amp_dtype", "channels_last", "intra_op_threads")
        }
        config = config.model_copy(update=own)
    return Overrides(config, job.script, is_switched=is_switched)


def _attach(attached: dict[str, Any]) -> None:
    """Open a session; if that fails, say so and let the script run."""
    try:
        session = _session_of(attached)
    except Exception as error:  # noqa: BLE001 - the trial's folder is gone, or of another version
        sys.stderr.write(
            f"autotune: could not attach to this process: {type(error).__name__}: {error}\n"
        )
        return
    if session.job is None:
        return
    before = sys.excepthook
    seen = session.sightings

    def on_error(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        before(kind, error, traceback)
        if seen.made or seen.outermost or seen.steps:
            session.script_ended(error)

    def on_end() -> None:
        # Else it only prepares something, or loads batches for a process that trains.
        if seen.steps:
            session.script_ended()

    sys.excepthook = on_error
    atexit.register(on_end)


def _session_of(attached: dict[str, Any]) -> Session:
    from autotune.config.plan import ScriptFacts
    from autotune.config.training_config import TrainingConfig
    from autotune.protocol.disk import TrialFolder
    from autotune.protocol.messages import RankReport, WorkloadJob, read_job
    from autotune.records.trial import TrialResult
    from autotune.worker.device import DeviceError
    from autotune.worker.failures import HangDump
    from autotune.worker.place import Place
    from autotune.worker.script.hooks import install
    from autotune.worker.script.overrides import Overrides
    from autotune.worker.script.session import Session

    if "folder" in attached:
        folder = TrialFolder(Path(attached["folder"]))
        started = float(attached["started"])
        job: WorkloadJob = read_job(folder.job)  # type: ignore[assignment] # a command's job has a workload
        place = Place(folder, 0, 0)
        dump = HangDump(file=sys.stderr, ends_at=started + job.process.deadline_s)
        try:
            return open_session(job, place, dump, started)
        except DeviceError as refusal:  # to run on would train otherwise than is to be measured
            place.write(RankReport(result=TrialResult(outcome="invalid", reason=str(refusal))))
            os._exit(1)
    config = TrainingConfig.model_validate(attached["config"])
    overrides = Overrides(config, ScriptFacts.model_validate(attached["script"]), is_trial=False)
    overrides.in_process()
    session = Session(None, overrides, Place(TrialFolder(Path()), 0, 0))
    install(session)
    return session
