"""Which adapters are where: registration, loads, host images, wishes; who gives pages up, and whether there is room."""
