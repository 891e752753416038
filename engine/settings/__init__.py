"""How settings are declared and checked, and the kinds of their values."""
