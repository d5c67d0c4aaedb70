"""The causal convolution in front of Gated DeltaNet, over a ring of inputs by position."""
