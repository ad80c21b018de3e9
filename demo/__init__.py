"""Real adapters for the demo model: how they were made, how they are measured, and a client to try them."""
