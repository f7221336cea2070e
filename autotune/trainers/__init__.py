"""Trainers of other frameworks, taken apart: what a trial builds from, what they are set to, and what is left out.

Comes in: a transformers.Trainer, a LightningModule with its data, or what accelerate has prepared.
Goes out: a model whose forward pass is the framework's own step, a DataLoader, an optimizer, the
baseline's settings, and a note on what a trainer does besides training. None of the objects is
changed. The frameworks are imported by their users, not here.
"""
