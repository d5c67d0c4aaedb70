"""Tests of the ``plans`` room: no torch, no compiler, no GPU."""
