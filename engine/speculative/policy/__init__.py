"""How many tokens of which sequence are guessed, and guesses that are copied from text."""
