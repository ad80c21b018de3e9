"""Calls of tools: the forms in which models write them, each with its parser and its grammar in one file.

`tool_use` is the way in: what a request may call, as a prompt, a grammar and a parser. `choosing` finds a
model's form.
"""
