"""Scripts that nobody changed: seen, changed and ended at torch's seams."""
