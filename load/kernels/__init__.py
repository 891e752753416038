"""The bench of the kernels: `penstock bench kernels`."""
