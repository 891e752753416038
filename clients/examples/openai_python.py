"""The `openai` package for Python: `pip install openai`, then `python openai_python.py`."""

import os

from openai import OpenAI

base_url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1"
client = OpenAI(base_url=base_url, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))

with client.responses.stream(model="demo", input="What is paged attention?") as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    first = stream.get_final_response()

second = client.responses.create(model="demo", input="Thank you!", previous_response_id=first.id)
print(f"\n{second.output_text}")
