"""Event spine, metric registry and tracing (0x09K, 0x0B). Reads events; changes no state of the engine."""
