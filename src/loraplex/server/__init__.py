"""OpenAI-compatible HTTP front: wire types, streaming, adapter administration and
authentication. Talks to the engine by messages only.
"""
