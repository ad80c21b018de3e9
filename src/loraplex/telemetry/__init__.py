"""Metrics from the engine's events (0x09K, 0x0B). Reads events; changes no state of the engine."""
