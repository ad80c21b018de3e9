"""Puts an engine together: model folder, base model, page pool, CUDA start-up."""
