"""Which adapters are where: registration, loads, host images, wishes, and who gives pages up."""
