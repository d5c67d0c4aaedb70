"""``draft_step``: a draft's token and the state of the next draft step. See ``kernel.py``."""
