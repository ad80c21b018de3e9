"""LiteLLM by both of its names for such servers: calls that go back, streams, Responses, its errors."""

import json
import os

import litellm

OPTIONS = {"api_base": os.environ["BASE_URL"], "api_key": "none", "max_retries": 0}
ASK = {"role": "user", "content": "What is the weather in Oslo?"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}

for provider in ("openai", "hosted_vllm"):
    options = {**OPTIONS, "model": f"{provider}/{os.environ['MODEL']}"}
    answer = litellm.completion(
        messages=[ASK], tools=[TOOL], tool_choice="required", max_tokens=48, **options
    )
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "rain"}
    final = litellm.completion(messages=[ASK, message, result], max_tokens=16, **options)
    assert final.usage.prompt_tokens > 0
    chunks = list(litellm.completion(messages=[ASK], stream=True, max_tokens=16, **options))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    said = litellm.responses(input="Hello!", max_output_tokens=16, **options)
    assert said.output[0].type == "message"
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 9000}], **options)
    except litellm.ContextWindowExceededError:
        continue
    raise AssertionError("a prompt that is too long was not refused as one")
