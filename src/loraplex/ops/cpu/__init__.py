"""The compiled CPU kernel: its source, its build, and the loaded library."""
