"""MQTT: the broker (private mosquitto, embedded, or external), its access rules, and the coordinator's client.

Begin with `broker` (what all kinds share) and `mqtt_service` (broker and client together). The embedded broker is
`embedded_broker` over `topic_router` and `packets`.
"""
