"""Workloads and benchmark commands. Reports numbers; asserts none."""
