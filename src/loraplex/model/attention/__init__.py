"""Attention over the page pool: appends keys and values in place and attends, one backend a file."""
