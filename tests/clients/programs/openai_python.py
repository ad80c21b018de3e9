"""OpenAI's client for Python: chat and Responses with calls that go back, streams, answers under a schema."""

import os
from typing import Literal

import openai
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
ASK = {"role": "user", "content": "What is the weather in Oslo?"}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


TOOL = openai.pydantic_function_tool(Weather, name="get_weather")
FLAT = {"type": "function", **TOOL["function"]}


def chat(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "max_tokens": 48, "temperature": 0, "tools": [TOOL]}
    answer = client.chat.completions.create(messages=[ASK], tool_choice="required", **options)
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "get_weather")
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    final = client.chat.completions.create(messages=[ASK, message, result], tool_choice="none", **options)
    assert final.choices[0].finish_reason in ("stop", "length")
    assert final.usage.prompt_tokens > 0
    with client.chat.completions.stream(
        messages=[ASK], tool_choice="required", stream_options={"include_usage": True}, **options
    ) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert isinstance(whole.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    assert whole.usage.total_tokens > 0
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[ASK], max_tokens=48, temperature=0, response_format=Weather
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def responses(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "max_output_tokens": 48, "temperature": 0}
    answer = client.responses.create(input=[ASK], tools=[FLAT], tool_choice="required", **options)
    call = answer.output[0]
    assert (answer.status, call.type, call.name) == ("completed", "function_call", "get_weather")
    Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    final = client.responses.create(input=[ASK, *answer.output, result], instructions="Be brief.", **options)
    assert final.output[0].type == "message"
    assert final.usage.input_tokens > 0
    with client.responses.stream(input="Hello!", **options) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    parsed = client.responses.parse(input=[ASK], text_format=Weather, **options)
    assert isinstance(parsed.output_parsed, Weather)


with openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0) as made:
    assert MODEL in [model.id for model in made.models.list()]
    chat(made)
    responses(made)
    said = ""
    try:
        made.embeddings.create(model=MODEL, input="x")
    except openai.NotFoundError as error:
        said = error.message
    assert "embedding" in said
