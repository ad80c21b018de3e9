"""Predicates, cost vector, policies, fairness, prefetch and the batch planner (0x03, 0x09)."""
