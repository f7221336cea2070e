"""Tests of autotune.core."""
