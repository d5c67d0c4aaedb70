"""The mapping of a step's rows, their pages and positions, in one launch."""
