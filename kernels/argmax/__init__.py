"""``argmax``: the largest logit of each row, as torch orders them. See ``kernel.py``."""
