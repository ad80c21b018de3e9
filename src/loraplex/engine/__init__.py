"""Engine state and the step: synchronous, deterministic, driven by ports only."""
