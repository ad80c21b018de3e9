"""Virtual clock, device and faults around the real control plane; nothing else is simulated."""
