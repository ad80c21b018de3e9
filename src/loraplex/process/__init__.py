"""Processes: children, transport, supervision, engine and worker processes, the real clock, logs."""
