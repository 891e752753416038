"""The benches, a file for each command of `penstock bench` and `make bench`."""
