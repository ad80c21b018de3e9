"""Processes, transport, real clock and loader process: the real implementations of `core.ports`."""
