"""Pages, slabs, residency states, leases, transactions, eviction order, the prefix index (0x04, 0x05, 0x07,
0x08).
"""
