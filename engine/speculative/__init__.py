"""Speculative decoding: guesses of a sequence's next tokens, computed and checked in one step.

A step computes a sequence's last token and its drafts at once, and draws the next token after each.
A draw depends on (seed, index, position) alone, so it is the token that a step of its own would
have drawn, as long as every draft before it was right. So the output is the same, token for token,
with drafts and without (Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", ICML 2023, of which drafts that are single tokens are a special case).
"""
