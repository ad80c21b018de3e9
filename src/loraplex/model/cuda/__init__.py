"""The CUDA way to run a plan: staging, step kernels, fused operators, captured decode steps, sampling on the
device.
"""
