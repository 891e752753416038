"""What is said of a measured run: figures, tables, pictures."""
