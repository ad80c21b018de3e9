"""Which adapters are where: registration, loads, host images, wants; who gives pages up, and whether there is
room.
"""
