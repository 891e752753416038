"""Outputs that must match a JSON Schema, a regular expression, a list of choices or a grammar.

    forms       from what a user writes to a `StructuredOutputs`
    json_schema which schemas are supported, and what is wrong with the others
    compiler    from a `StructuredOutputs` to a matcher that knows which tokens may come next

`llguidance` does the grammars. A sequence's matcher is on the device: `engine.sampling`.
"""
