"""Orders to boards and what comes back: the live fleet under the round loop, the door of a run, the downlink."""
