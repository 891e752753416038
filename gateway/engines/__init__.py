"""The client of the engine, and the streams that outlive an engine."""
