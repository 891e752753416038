"""KV memory as policy sees it: which block belongs to whom. No torch, no bytes."""

from penstock.engine.blocks.block_manager import BlockManager

__all__ = ["BlockManager"]
