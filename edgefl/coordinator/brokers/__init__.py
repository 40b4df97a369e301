"""MQTT brokers: the private mosquitto, the embedded one, somebody else's; who may say what, and our own end of it."""
