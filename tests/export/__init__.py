"""Exports, and what is read back from them."""
