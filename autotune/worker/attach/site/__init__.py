"""The folder that stands first on the PYTHONPATH of what a command starts; Python runs its sitecustomize by itself."""
