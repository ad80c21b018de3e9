"""Answering a request: how it is read, sent to the engine, and answered piece by piece."""
