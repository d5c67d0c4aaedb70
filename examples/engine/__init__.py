"""A decode engine for hybrid models (Gated DeltaNet and attention layers) on specplan: continuous
batching, lossless speculative decoding, one graph of launches per step.

The model is transformers' own Qwen3-Next code. It computes projections, norms and MLPs; what stands
between them in a verify step is an op of specplan, or its reference in torch. ``model.py`` cuts the
layers at these places, ``caches.py`` holds what outlives a step, ``ops.py`` says who computes the
ops, ``drafting.py`` guesses tokens and ``engine.py`` runs requests.
"""
