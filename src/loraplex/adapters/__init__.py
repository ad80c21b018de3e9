"""An adapter's life above the engine: prepare, register, publish, swap, pin, retire."""
