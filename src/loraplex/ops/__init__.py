"""Adapter operators: exact reference, torch, CPU kernel, Triton, and the dispatch between them
(0x02, 0x06).
"""
