"""The overlap scheduler's four input gathers in one launch."""
