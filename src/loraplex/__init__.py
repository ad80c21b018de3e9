"""loraplex: a serving runtime for thousands of LoRA adapters over one resident base model.

Owns the version and nothing else. It must stay free of imports: importing any part of the package runs
this file first, so an import here would reach the deterministic core through the back door. Public names
are added by a module `__getattr__` that imports them when they are asked for.
"""

__version__ = "0.1.0"
