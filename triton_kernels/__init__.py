"""Triton kernels, one family per file; each names its twin in engine/reference.py.

They run on NVIDIA GPUs, and on the CPU under Triton's interpreter (TRITON_INTERPRET=1 before the import).
"""
