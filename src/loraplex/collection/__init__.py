"""Joint compression of adapter collections (0x06G)."""
