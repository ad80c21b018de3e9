"""Decoder families, weights, attention backends, sampler, runner and CUDA graphs. Runs plans, chooses nothing."""
