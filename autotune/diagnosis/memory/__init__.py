"""Advice on memory: what makes room for a larger batch or for a model, and what shares a device that stays empty. Pure.

Comes in: an Evidence with its findings, or a group of devices. Goes out: advice without settings, as codes with
figures.
"""
