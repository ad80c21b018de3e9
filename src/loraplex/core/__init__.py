"""Words that every part of loraplex uses: ids, requests, plans, events, errors, limits and ports.

Imports nothing of the project and none of its heavy dependencies.
"""
