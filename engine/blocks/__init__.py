"""KV memory as policy sees it: which sequence holds which blocks. No torch, no bytes."""

from penstock.engine.blocks.block_manager import BlockManager

__all__ = ["BlockManager"]
