"""Sends the model back as it came."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001 Flower's signature
    metrics = MetricRecord({"num-examples": 64})
    return Message(content=RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
