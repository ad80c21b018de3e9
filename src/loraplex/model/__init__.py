"""Decoder families, weights, attention backends, sampler, runner: the data plane that runs plans."""
