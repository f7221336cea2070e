"""What keeps trackers quiet, and what of the user's own settings is kept."""

from __future__ import annotations

from pathlib import Path

from autotune.protocol.attach import is_muted_by, quiet_environment

SCRATCH = Path("/scratch")


def test_trackers_are_muted_or_led_to_scratch() -> None:
    said = quiet_environment(SCRATCH, {})
    assert said["WANDB_MODE"] == "disabled"
    assert said["HF_HUB_OFFLINE"] == "1"
    assert said["TRACKIO_DIR"] == "/scratch/trackio"
    assert said["MLFLOW_TRACKING_URI"] == "sqlite:////scratch/mlflow.db"


def test_a_users_mode_is_kept_where_it_uploads_nothing_either() -> None:
    user = {
        "WANDB_MODE": "offline",
        "NEPTUNE_MODE": "async",
        "HF_HUB_OFFLINE": "ON",
        "MLFLOW_TRACKING_URI": "http://x",
    }
    said = quiet_environment(SCRATCH, user)
    assert "WANDB_MODE" not in said
    assert "HF_HUB_OFFLINE" not in said
    assert said["NEPTUNE_MODE"] == "offline"
    assert said["MLFLOW_TRACKING_URI"].startswith("sqlite:")


def test_a_timed_tracker_works_offline_in_scratch() -> None:
    said = quiet_environment(SCRATCH, {}, is_timed=True)
    assert said["WANDB_MODE"] == "offline"
    assert said["WANDB_DIR"] == "/scratch"
    assert said["COMET_AUTO_LOG_DISABLE"] == "true"
    assert not is_muted_by("wandb", said)
    assert is_muted_by("comet_ml", said)
    assert is_muted_by("wandb", quiet_environment(SCRATCH, {}))


def test_a_tracker_that_the_user_disabled_stays_so() -> None:
    assert "WANDB_MODE" not in quiet_environment(SCRATCH, {"WANDB_MODE": "disabled"}, is_timed=True)
