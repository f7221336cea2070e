"""Held against the frameworks of others, as they are installed by the extra `integrations`."""
