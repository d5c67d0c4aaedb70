"""``accept``: greedy acceptance of a verify step in one launch. See ``kernel.py``."""
