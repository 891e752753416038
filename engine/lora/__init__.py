"""Adapters (LoRA): one base model, many sets of small updates.

`files` reads what an adapter is, without torch; requests wait for theirs in `preparation`. `slots`
holds the adapters that a step's rows have; `adapted_model` gives each layer of a model a place for
every slot, and `layer_adapters` computes what they add.
"""
