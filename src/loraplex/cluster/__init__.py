"""Several replicas: pure placement and routing decisions, and the one file that imports Ray."""
