"""Thin functions from a server's tensors and metadata to the arguments of specplan's ops.

One module a server: ``vllm``, ``sglang``, ``trtllm``; none of them imports it. ``tensors`` has what
they share, and ``paging`` the view that cuts a server's K/V blocks into pages that cells have.
Views are free. What launches something says how many launches, writes into memory that the caller
allocated, waits for nothing, and may be captured: it belongs before the layers, once a step.
"""
