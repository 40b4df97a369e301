"""MQTT side of a device: connection, session, heartbeats, values of peers."""
