"""PEFT checkpoints: read, verify, convert to the kernel layout, export."""
