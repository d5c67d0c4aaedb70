"""Tests of the commands that read, check and explain: no compiler, no GPU."""
