"""Tests of autotune.launch, and of the worker as its launchers meet it: real processes throughout."""
