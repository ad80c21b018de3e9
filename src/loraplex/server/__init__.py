"""OpenAI-compatible HTTP front: wire types, text (tokenise, detokenise, stop strings), streaming,
adapter administration and authentication. Talks to the engine by messages only.
"""
