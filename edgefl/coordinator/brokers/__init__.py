"""MQTT brokers (private mosquitto, embedded, external), their access rules, and the coordinator's client."""
