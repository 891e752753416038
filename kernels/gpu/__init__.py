"""Triton kernels: one operation per module, its kernels and one launcher `<operation>_triton`.

Imported only through `kernels.gpu_operations`, since a machine without a GPU may not have Triton.
Nothing here is specific to NVIDIA: the same source compiles for AMD.
"""
