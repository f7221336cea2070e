"""Frozen models and pure functions: what the rest of autotune talks about. No I/O, no torch, no optuna."""
