"""Adapters (LoRA): one base model, many sets of small updates.

`files` reads what an adapter is, `queue` decides which adapters are in memory and which requests
may run (both without torch). `slots` holds the adapters that a step's rows have; `adapted_model`
gives each layer of a model a place for every slot, and `layer_adapters` and `cpu_adapters` compute
what they add.
"""
