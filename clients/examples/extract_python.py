"""Data out of a text, as a class: `pip install openai`, start `make serve MODEL=smollm2`, then
`python extract_python.py`."""

import os

from openai import OpenAI
from pydantic import BaseModel

base_url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1"
client = OpenAI(base_url=base_url, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))


class Person(BaseModel):
    name: str
    age: int


for text in ("My name is Ada and I am 36.", "Tom, who is 12 years old, met a friend."):
    answer = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        response_format=Person,
        temperature=0,
    )
    print(answer.choices[0].message.parsed)
