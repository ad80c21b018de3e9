"""OpenAI's agents on both interfaces: a tool's result goes back, also streamed; an answer has a type."""

import asyncio
import os
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


asked: list[str] = []


def once(context: Any, agent: Any) -> bool:
    """A small model would go on calling."""
    return not asked


@function_tool(is_enabled=once)
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return f"rain in {city}"


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    settings = ModelSettings(max_tokens=48, temperature=0, tool_choice="required")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=os.environ["MODEL"], openai_client=client)
        agent = Agent(
            name="a", instructions="Be brief.", model=model, tools=[get_weather], model_settings=settings
        )
        asked.clear()
        run = await Runner.run(agent, "What is the weather in Oslo?")
        assert len(asked) == 1, run.new_items
        assert run.context_wrapper.usage.requests == 2
        asked.clear()
        streamed = Runner.run_streamed(agent, "What is the weather in Oslo?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        assert len(asked) == 1
        typed = Agent(name="b", model=model, output_type=Weather, model_settings=ModelSettings(max_tokens=48))
        assert isinstance((await Runner.run(typed, "What is the weather in Oslo?")).final_output, Weather)


set_tracing_disabled(True)
asyncio.run(main())
