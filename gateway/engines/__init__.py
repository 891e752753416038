"""The gateway's end of the wire to the engine, and the streams that outlive one."""
