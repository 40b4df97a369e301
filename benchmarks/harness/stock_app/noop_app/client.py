"""Sends the model back as it came, after as long as training is to take."""

import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    time.sleep(float(context.run_config["train-s"]))
    metrics = MetricRecord({"num-examples": 64})
    return Message(content=RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
