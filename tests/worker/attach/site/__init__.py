"""What a Python process runs before its first line, where a command has started it."""
