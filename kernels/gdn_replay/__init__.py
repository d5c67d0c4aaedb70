"""Gated DeltaNet verify over a checkpoint plus records, committing in the kernel."""
