"""What is kept for the backward pass, and what checkpointing the model's repeated blocks would leave of it.

Takes a Trainer after its window; returns Activations.
"""
