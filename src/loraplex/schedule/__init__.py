"""Predicates, the waiting queue, the running table, selection of rows, the plan that they become (0x03,
0x09).
"""
