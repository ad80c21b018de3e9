"""PEFT checkpoints: read, verify, identify, convert to the kernel layout."""
