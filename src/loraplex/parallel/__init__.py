"""Tensor parallelism: how base and adapter factors are cut over ranks (0x06F)."""
