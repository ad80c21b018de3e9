"""Metrics from the engine's events (0x09K, 0x0B), and the typed failures (0x0DB). Changes no state."""
