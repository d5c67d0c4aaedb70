"""The sampler's store update in one launch."""
