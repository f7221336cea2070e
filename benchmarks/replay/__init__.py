"""Searches replayed on measured surfaces."""
