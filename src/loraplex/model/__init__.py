"""Decoder models: specification, weights, attention over the page pool, sampling and the runner of batch
plans.

The data tower's top: it obeys a `BatchPlan` and never chooses pages, slots or victims.
"""
