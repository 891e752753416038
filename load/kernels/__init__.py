"""`penstock bench kernels`: this machine's kernels, against its limits and against torch."""
