"""Parts of benchmarks that measure."""
