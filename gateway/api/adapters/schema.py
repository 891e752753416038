"""The requests of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's format."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.gateway.api.schema.model import Model

_Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f]+$")]


class LoadAdapter(Model):
    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    load_inplace: bool = False
    """Take the name away from another adapter."""


class UnloadAdapter(Model):
    lora_name: _Name
    lora_int_id: int | None = None
    """vLLM's; ignored."""
