"""LangChain: a picture in a message, from the server at PENSTOCK_URL.

Writes one line of JSON: by API and form of the part, what the model says about a picture, about
another one, and about the first in a stream.
"""

from __future__ import annotations

import json
import os
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

ONE, OTHER = os.environ["PICTURE"], os.environ["OTHER_PICTURE"]  # PNG files in base64


def openai_part(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def standard_part(data: str) -> dict[str, Any]:
    return {"type": "image", "base64": data, "mime_type": "image/png"}


said: dict[str, list[str]] = {}
for api, use_responses in (("chat", False), ("responses", True)):
    model = ChatOpenAI(
        model="llava",
        base_url=os.environ["PENSTOCK_URL"] + "/v1",
        api_key="none",
        temperature=0,
        max_tokens=16,
        max_retries=0,
        use_responses_api=use_responses,
    )
    for part in (openai_part, standard_part):
        first, other = (
            [HumanMessage([{"type": "text", "text": "what is this?"}, part(data)])]
            for data in (ONE, OTHER)
        )
        said[f"{api}: {part.__name__}"] = [
            str(model.invoke(first).text),
            str(model.invoke(other).text),
            "".join(str(chunk.text) for chunk in model.stream(first)),
        ]
print(json.dumps(said))
