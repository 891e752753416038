"""How the built-in demo model was made: what it was taught, its training and its examination.

A wheel leaves this out; the model itself is in `engine/model_files/demo`.
"""
