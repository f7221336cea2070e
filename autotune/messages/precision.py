"""Messages of the precision guard: why a precision was refused, or could not be compared with float32. Clauses."""

from __future__ import annotations

from autotune.messages import message
from autotune.note import Note

__all__ = [
    "gradient_not_finite",
    "gradients_differ",
    "loss_not_finite",
    "losses_deviate",
    "precision_not_compared",
    "precision_refused",
    "steps_skipped",
    "too_few_steps_compared",
]


@message
def precision_not_compared(reason: Note | str | None, log: str | None) -> str:
    where = "" if log is None else f" (log: {log})"
    return f"precision guard could not run: {reason or 'no figures came'}{where}"


@message
def precision_refused(reason: Note) -> str:
    return f"precision guard: {reason}"


@message
def too_few_steps_compared(steps: int, least_steps: int) -> str:
    return f"only {steps} of at least {least_steps} steps were compared before the deadline"


@message
def loss_not_finite(loss: str, step: int, steps: int) -> str:
    return f"the loss became {loss} at step {step} of {steps}; float32's stayed finite"


@message
def steps_skipped(last_skipped: int, last: int, skipped: int, attempts: int) -> str:
    return (
        f"the GradScaler still skipped {last_skipped} of the last {last} steps because gradients were not finite "
        f"({skipped} of {attempts} in total)"
    )


@message
def losses_deviate(steps: int, deviation_fraction: float, allowed_fraction: float) -> str:
    return (
        f"over {steps} steps from the same weights and batches the losses deviate from float32's by "
        f"{100 * deviation_fraction:.1f} % of their mean; at most {100 * allowed_fraction:.1f} % is allowed"
    )


@message
def gradient_not_finite() -> str:
    return "the first step's gradient is not finite; float32's is"


@message
def gradients_differ(cosine: float, least_cosine: float) -> str:
    return (
        f"the first step's gradient has a cosine of {cosine:.3f} with float32's, but must have at least "
        f"{least_cosine:.2f}"
    )
