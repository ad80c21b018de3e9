"""Durable alias -> revision -> artifact records, and the sources that artifacts come from (local, s3, hf)."""
