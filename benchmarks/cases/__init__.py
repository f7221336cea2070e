"""Workloads that benchmarks train."""
