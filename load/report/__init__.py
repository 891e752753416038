"""What is said of a measured run: figures and tables."""
