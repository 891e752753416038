"""What a request needs before a step can have it: grammar, adapter and images, loaded beside the
steps."""
