"""penstock's own client without asyncio: stream, then a second turn."""

import os

from penstock.clients import Client, output_text

with Client(os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")) as client:
    with client.responses.stream(model="demo", input="What is paged attention?") as stream:
        for event in stream:
            if event["type"] == "response.output_text.delta":
                print(event["delta"], end="", flush=True)
    second = client.responses.create(
        model="demo", input="Thank you!", previous_response_id=stream.response_id
    )
    print(f"\n{output_text(second)}")
