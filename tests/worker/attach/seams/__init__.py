"""Torch's seams: what is put into a script there, and how."""
