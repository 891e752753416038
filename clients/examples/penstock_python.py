"""penstock's own client: several answers at once on one WebSocket, which may break meanwhile."""

import asyncio
import os

from penstock.clients import AsyncClient, output_text

QUESTIONS = ["What is paged attention?", "Count to 5.", "What is the capital of France?"]


async def main() -> None:
    async with (
        AsyncClient(os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")) as client,
        client.connect() as socket,
    ):
        streams = [await socket.create(model="demo", input=question) for question in QUESTIONS]
        answers = await asyncio.gather(*(stream.final() for stream in streams))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {output_text(answer)}")


asyncio.run(main())
