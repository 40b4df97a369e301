"""MQTT side of a device: connection, session, wake-ups, heartbeats."""
