"""Adapter operators: the exact reference, torch families, the CPU kernel, Triton, and their dispatch.

Obeys the plan: never chooses pages, slots or victims.
"""
