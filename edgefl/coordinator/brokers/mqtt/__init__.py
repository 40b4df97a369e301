"""The server's side of MQTT 3.1.1: packets, routing, and one client's connection. `EmbeddedBroker` runs it."""
