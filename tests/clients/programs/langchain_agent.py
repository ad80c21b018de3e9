"""LangChain's chat model over both interfaces: calls that go back, streams, and answers under a schema."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


@tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


for interface in ({}, {"use_responses_api": True}):
    model = ChatOpenAI(
        model=os.environ["MODEL"],
        base_url=os.environ["BASE_URL"],
        api_key="none",
        temperature=0,
        max_tokens=48,
        max_retries=0,
        **interface,
    )
    ask = HumanMessage("What is the weather in Oslo?")
    called = model.bind_tools([get_weather], strict=True, tool_choice="any").invoke([ask])
    call = called.tool_calls[0]
    assert call["name"] == "get_weather"
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    final = model.invoke([ask, called, result])
    assert final.usage_metadata["input_tokens"] > 0
    chunks = list(model.stream("Hello!"))
    assert len(chunks) > 1
    for method in ("json_schema", "function_calling"):
        assert isinstance(
            model.with_structured_output(Weather, method=method, strict=True).invoke([ask]), Weather
        )
