"""Variables of the environment that keep experiment trackers and hubs quiet in trials. Stub."""

from __future__ import annotations

__all__ = ["quiet_environment"]


def quiet_environment() -> dict[str, str]:
    """Variables to set."""
    return {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
