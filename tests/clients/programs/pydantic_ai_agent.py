"""pydantic-ai's agent over both interfaces: a tool's result goes back, and an answer has a type."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


asked: list[str] = []


async def once(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
    """A small model would go on calling."""
    return None if asked else definition


provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    asked.clear()
    model = kind(os.environ["MODEL"], provider=provider)
    agent = Agent(model, model_settings={"max_tokens": 48, "temperature": 0})

    @agent.tool_plain(prepare=once)
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"rain in {city}"

    run = agent.run_sync("What is the weather in Oslo?")
    assert asked, run.all_messages()
    assert run.usage.input_tokens > 0
    typed = Agent(model, output_type=Weather, model_settings={"max_tokens": 48, "temperature": 0})
    assert isinstance(typed.run_sync("What is the weather in Oslo?").output, Weather)
