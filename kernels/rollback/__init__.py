"""Rollback of a verify step's writes: device code, reference, cases. Nothing is imported here."""
