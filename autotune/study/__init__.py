"""The study over Optuna: what to try next, what is known already, and when to stop. Owns optuna."""
