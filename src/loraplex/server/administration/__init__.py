"""Administering adapters over HTTP: registration at start, endpoints, and their client."""
