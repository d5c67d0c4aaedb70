"""What tests share. Names say what is real: see each module."""
