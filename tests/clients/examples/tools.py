"""Tools by Python's clients: openai, LangChain, litellm and OpenAI's agents, from the server at
PENSTOCK_URL."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not ask the internet
BASE_URL = os.environ["PENSTOCK_URL"] + "/v1"
QUESTION = "what is 12 plus 30?"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
asked: list[str] = []


def check(answer: str) -> None:
    assert "4711" in answer, answer
    assert asked == ["12 + 30"], asked
    asked.clear()


def with_langchain() -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def calculator(expression: str) -> str:
        """Computes."""
        asked.append(expression)
        return "4711"

    for use_responses in (False, True):
        model = ChatOpenAI(
            model="demo",
            base_url=BASE_URL,
            api_key="none",
            temperature=0,
            use_responses_api=use_responses,
        ).bind_tools([calculator])
        messages: list[Any] = [HumanMessage(QUESTION)]
        messages.append(model.invoke(messages))
        [call] = messages[-1].tool_calls
        messages.append(calculator.invoke(call))
        whole = None
        for chunk in model.stream(messages):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        check(str(whole.text))


def with_litellm() -> None:
    import litellm

    arguments = {
        "model": "openai/demo",
        "api_base": BASE_URL,
        "api_key": "none",
        "temperature": 0,
        "tools": [SCHEMA],
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(messages=messages, **arguments).choices[0].message
    [call] = message.tool_calls
    asked.append(json.loads(call.function.arguments)["expression"])
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "4711"}]
    chunks = list(litellm.completion(messages=messages, stream=True, **arguments))
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


async def with_agents() -> None:
    import agents
    from openai import AsyncOpenAI

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Computes."""
        asked.append(expression)
        return "4711"

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="A",
            model=kind("demo", client),
            tools=[calculator],
            model_settings=agents.ModelSettings(temperature=0),
        )
        check((await agents.Runner.run(agent, QUESTION)).final_output)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        check(streamed.final_output)


if __name__ == "__main__":
    with_langchain()
    with_litellm()
    asyncio.run(with_agents())
    print("done")
