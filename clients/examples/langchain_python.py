"""LangChain: `pip install langchain-openai`, then `python langchain_python.py`."""

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model="demo",
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_API_KEY", "none"),
)
chain = ChatPromptTemplate.from_messages([("user", "What is {subject}?")]) | model

for chunk in chain.stream({"subject": "paged attention"}):
    print(chunk.text, end="", flush=True)
print()
