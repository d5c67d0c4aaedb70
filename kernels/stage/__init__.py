"""Segments of one record to up to sixteen buffers, in one launch."""
