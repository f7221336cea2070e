"""Tests of autotune.worker inside this process; what needs a process of its own stands in tests/launch."""
