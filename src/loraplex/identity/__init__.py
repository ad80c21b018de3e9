"""Canonical serialisation, digests, manifests and generation vectors (0x01G)."""
