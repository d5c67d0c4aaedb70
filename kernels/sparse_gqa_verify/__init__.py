"""Sparse GQA over a paged K/V cache, for decode and speculative-verify rows: device code,
references, cases, writer.
"""
