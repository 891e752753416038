"""Images in prompts, for text and policy; the towers are in `engine.models.vision`."""
